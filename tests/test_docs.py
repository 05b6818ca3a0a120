"""The documentation builds, and a page loads nothing from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import dpaudit

ROOT = Path(__file__).parent.parent
LOADED = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^"'\s>]+""")


def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(site.rglob("*.html"))
    assert site / "index.html" in pages
    assert [match for page in pages for match in LOADED.findall(page.read_text())] == []


def test_every_public_name_is_in_the_api_reference() -> None:
    documented = re.findall(r"^::: dpaudit\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(set(dpaudit.__all__) - {"__version__"})
