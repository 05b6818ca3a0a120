"""The rules of the house: a module is a chapter, and a name means one thing.

CONTRIBUTING.md has the map. A rule that has to bend gets an exception here, with its reason.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "dpaudit"
FILES = sorted(PACKAGE.rglob("*.py"))

# The numbers of today: they may only fall. Raising one needs a reason in the changelog.
MOST_FILES = 205
MOST_LINES_IN_ALL = 50_870
MOST_CONSTANTS = 514
MOST_COMPLEX_FUNCTIONS = 28
MOST_PRIVATE_IMPORTS = 38
MOST_CONTENTLESS_NAMES = 0.001
MOST_LINES = 450
FEWEST_LINES = 120  # of a private module that only one other imports
# words that mean the same in every sibling
SHARED_NAMES = {
    "__init__.py",
    "_base.py",
    "_observe.py",
    "_observer.py",
    "_clipping.py",
    "_crafting.py",
    "_canaries.py",
    "_replay.py",
    "_run.py",
}
SHORT_MODULES = {
    "dpaudit.cli._app": "gathers the commands, and nothing else",
}
# concrete classes that others extend
EXTENDED_CLASSES = {
    "ObservedFunctions": "a named tuple, whose class itself cannot have other attributes",
    "CanaryAudit": "what the audits of the native engine share, in template methods",
    "DpauditError": "the tree of errors",
    "GaussianSum": "a fault is the correct mechanism with one thing wrong",
    "HeldOutExamples": "the same container for each framework's arrays",
    "Hook": "an interface whose methods do nothing by default",
    "InputCanary": "an interface whose attributes have defaults",
    "InputError": "the tree of errors",
    "Section": "tables of a config share their pydantic settings",
    "Serializable": "what the three interfaces of a method share",
    "_AuditConfig": "tables of a config share their keys",
    "_StepAuditConfig": "tables of a config share their keys",
    "_SizedDataConfig": "tables of a config share their keys",
    "_StepRandomness": "streams of coins alone, and of coins and directions",
}

# the module that a benchmark measures
PRIVATE_IN_BENCHMARKS = {
    "crafting.py": {
        "dpaudit._torch._crafting",
        "dpaudit._torch._crafting.Crafting",
        "dpaudit._torch._crafting.cosine_objective",
        "dpaudit._torch._crafting.mean_gradient",
    },
    "diagnostics_error.py": {  # what observers record, without any training
        "dpaudit.diagnostics._data_tests",
        "dpaudit.diagnostics._data_tests.missing_direction",
        "dpaudit.diagnostics._noise_record",
        "dpaudit.diagnostics._noise_record.NoiseRecord",
        "dpaudit.diagnostics._distribution_tests",
        "dpaudit.diagnostics._distribution_tests.REGULARITY_TESTS",
        "dpaudit.diagnostics._row_digests",
        "dpaudit.diagnostics._row_digests.RowRecord",
        "dpaudit.diagnostics._batch_record",
        "dpaudit.diagnostics._batch_record.BatchRecord",
    },
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def imported(path: Path) -> Iterator[str]:
    """The modules of dpaudit that a file imports, also inside of functions."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]  # modules that are imported by their names


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                yield path, node


def test_the_house_has_a_size_that_can_be_kept_in_mind() -> None:
    lengths = [num_lines(path) for path in FILES]
    assert len(FILES) <= MOST_FILES
    assert 120 <= statistics.median(lengths) <= 265


def test_the_house_does_not_grow() -> None:
    assert sum(map(num_lines, FILES)) <= MOST_LINES_IN_ALL


def test_constants_of_modules_are_few() -> None:
    targets = [
        target
        for path in FILES
        for node in parsed(path).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in [node.targets[0] if isinstance(node, ast.Assign) else node.target]
    ]
    constants = [target for target in targets if isinstance(target, ast.Name) and target.id.isupper()]
    assert len(constants) <= MOST_CONSTANTS


def complexity(function: ast.AST) -> int:
    """One more than the number of branches."""
    branches = ast.If | ast.For | ast.While | ast.ExceptHandler | ast.IfExp | ast.comprehension | ast.Assert
    nodes = list(ast.walk(function))
    booleans = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return 1 + booleans + sum(isinstance(node, branches) for node in nodes)


def test_few_functions_have_many_branches() -> None:
    functions = [
        node
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert sum(complexity(function) > 10 for function in functions) <= MOST_COMPLEX_FUNCTIONS


def test_private_names_stay_in_their_package() -> None:
    crossing = [
        alias.name
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("dpaudit.")
        for package, *modules in [node.module.split(".")[1:]]
        if package != path.relative_to(PACKAGE).parts[0] and any(name.startswith("_") for name in modules)
        for alias in node.names
    ]
    assert len(crossing) <= MOST_PRIVATE_IMPORTS


def test_variables_are_named_after_what_they_hold() -> None:
    contentless = {"found", "one", "own", "known", "kept", "made", "given", "part", "parts", "it", "ones"}
    names = [
        node.id
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    assert sum(name in contentless for name in names) <= MOST_CONTENTLESS_NAMES * len(names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_is_not_two_chapters(path: Path) -> None:
    assert num_lines(path) <= MOST_LINES


def test_a_short_private_module_serves_more_than_one_other() -> None:
    importers: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for name in imported(path):
            importers[name].add(name_of(path))
    lonely = {
        name_of(path)
        for path in FILES
        if path.name.startswith("_")
        and not path.name.startswith("__")
        and num_lines(path) < FEWEST_LINES
        and len(importers[name_of(path)] - {name_of(path)}) < 2
    }
    assert lonely == set(SHORT_MODULES)


def test_file_names_are_unique() -> None:
    found = Counter(path.name for path in FILES if path.name not in SHARED_NAMES)
    assert [name for name, count in found.items() if count > 1] == []


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path, node in classes():
        homes[node.name].append(name_of(path))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def is_interface(node: ast.ClassDef) -> bool:
    """Whether a class says what others have to do: it is abstract, or a protocol."""
    bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
    abstract = any(
        "abstractmethod" in ast.unparse(one) for one in ast.walk(node) if isinstance(one, ast.Name)
    )
    return abstract or bool(bases & {"ABC", "Protocol"})


def test_a_class_is_an_interface_or_final() -> None:
    found = {node.name: node for _, node in classes()}
    extended = {
        base
        for node in found.values()
        for text in (ast.unparse(base).partition("[")[0] for base in node.bases)
        for base in [text.rpartition(".")[2]]
        if not text.startswith("torch.")
        if base in found and not is_interface(found[base])
    }
    assert extended == set(EXTENDED_CLASSES)


SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tools" / "pages").glob("*.py")])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_benchmarks_use_what_users_have(path: Path) -> None:
    private = {name for name in imported(path) if name.startswith("dpaudit.") and "._" in name}
    assert private <= PRIVATE_IN_BENCHMARKS.get(path.name, set())


def test_pages_import_public_names_only() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    pattern = re.compile(r"^(?:from|import) dpaudit[\w.]*\._|^from dpaudit[\w.]* import _", re.MULTILINE)
    assert [page.name for page in pages if pattern.search(page.read_text())] == []
