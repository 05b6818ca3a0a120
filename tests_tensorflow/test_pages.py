"""What the pages and the example say of TF Privacy is so."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from test_readme import PAGES, blocks, run_python, same  # noqa: E402


def test_the_blocks_that_need_tensorflow_print_what_the_page_shows():
    found = 0
    for page in PAGES:
        module = ModuleType(f"page_{page.stem}")
        for block in blocks(page):
            if block.needs == "tensorflow":
                found += 1
                printed = run_python(block, page, module)
                if block.output is not None:
                    assert same(printed, block.output), f"{page.name}:{block.line} printed\n{printed}"
    assert found


def test_the_example_accepts_the_correct_run_and_refutes_the_broken_one():
    script = ROOT / "examples" / "tensorflow_digits.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    headlines = re.findall(r"^(NO[ _]VIOLATION|VIOLATION|UNDERPOWERED)", done.stdout, re.MULTILINE)
    assert [headline.replace("_", " ") for headline in headlines] == ["NO VIOLATION", "VIOLATION"]
