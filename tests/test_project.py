"""The files around the code agree with it and with each other."""

import importlib.metadata
import json
import re
import subprocess
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dpaudit

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Written in two parts, so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.])/" + r"(?:work|root|farm|home/\w+|opt/\w+|tmp/\w+)/")
REGISTRY = re.compile(r"--(?:extra-)?index" + r"-url|--find" + r"-links|--trusted" + r"-host")


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines]
    return {canonicalize_name(name): version for name, version in pairs}


def tracked() -> list[Path]:
    """What is or would be in the repository; in a copy without one, everything but hidden folders."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0 and (ROOT / ".git").exists():
        found = [ROOT / name for name in done.stdout.split("\0") if name]
    else:
        found = [path for path in ROOT.rglob("*") if not re.search(r"/[._]", f"/{path.relative_to(ROOT)}")]
    return [path for path in found if path.is_file()]


def needed(requirement: Requirement, seen: set[tuple[str, str]]) -> None:
    """Collect the names of everything that installing ``requirement`` installs."""
    for extra in ("", *requirement.extras):
        key = canonicalize_name(requirement.name), extra
        if key in seen:
            continue
        seen.add(key)
        for text in importlib.metadata.requires(requirement.name) or []:
            child = Requirement(text)
            if child.marker is None or child.marker.evaluate({"extra": extra}):
                needed(child, seen)


def test_the_version_is_the_same_in_the_package_and_in_the_project_file() -> None:
    assert PROJECT["version"] == dpaudit.__version__


def test_the_newest_version_of_the_changelog_is_this_one() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == dpaudit.__version__


def test_the_citation_is_of_this_version_and_names_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)  # what the format asks for
    assert (cited["cff-version"], cited["type"]) == ("1.2.0", "software")
    assert (cited["version"], cited["license"]) == (dpaudit.__version__, PROJECT["license"])
    assert cited["authors"] == [{"name": "The dpaudit authors"}]
    [paper] = cited["references"]
    assert {"type", "title", "authors"} <= set(paper)
    assert paper["title"] == "Tight Auditing of Differentially Private Machine Learning"
    assert len(paper["authors"]) == 8


def test_constraints_are_sorted_exact_versions_and_nothing_else() -> None:
    for folder in (".", "tests_tensorflow"):
        lines = (ROOT / folder / "constraints.txt").read_text().splitlines()
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
        assert lines == sorted(lines, key=str.lower)


def test_everything_that_the_development_install_needs_is_pinned() -> None:
    seen: set[tuple[str, str]] = set()
    needed(Requirement("dpaudit[dev]"), seen)
    names = {name for name, _ in seen} - {"dpaudit"}
    assert names - set(pinned()) == set()
    assert {"hatchling", "editables"} <= set(pinned())


def test_every_direct_dependency_allows_its_pinned_version() -> None:
    extras = PROJECT["optional-dependencies"]
    for text in (*PROJECT["dependencies"], *extras["dev"], *extras["docs"], *extras["report"]):
        requirement = Requirement(text)
        if requirement.name != "dpaudit":
            assert pinned()[canonicalize_name(requirement.name)] in requirement.specifier, text


def test_no_file_names_a_place_of_the_machine_it_was_written_on() -> None:
    paths = tracked()
    assert ROOT / "pyproject.toml" in paths
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if MACHINE_PATH.search(line) or REGISTRY.search(line)
    ]
    assert found == []


def test_actions_are_pinned_by_commit() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for action in re.findall(r"uses: (.*)", text):
        assert re.fullmatch(r"\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_pre_commit_uses_the_pinned_versions() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    revisions = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in config["repos"]}
    pins = pinned()
    assert revisions == {"ruff-pre-commit": f"v{pins['ruff']}", "mirrors-mypy": f"v{pins['mypy']}"}


def test_what_is_promised_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "evidence.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)`(\*?)", text)
    assert len(named) > 20
    for path, star in named:
        tests = (ROOT / path).read_text()
        assert "\ndef test_" in tests
        assert "long" in tests or not star, path


def test_the_map_has_the_layers_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    [drawn] = re.findall(r"^```text\n(cli .*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    shown = [re.split(r" {2,}", line)[0] for line in drawn.splitlines() if not line.startswith(" ")]
    assert shown == [layer.replace("dpaudit.", "") for layer in layers]


def test_readme_and_index_quote_the_numbers_of_the_picture() -> None:
    assets = ROOT / "docs" / "assets"
    light, dark = (
        json.loads(re.findall("<desc>(.*)</desc>", (assets / f"bound-{theme}.svg").read_text())[0])
        for theme in ("light", "dark")
    )
    assert light == dark
    assert light["correct_epsilon"] <= light["claimed_epsilon"] < light["broken_epsilon"]
    assert light["correct_accuracy"] == light["broken_accuracy"]
    quoted = (
        f"claim ε = {light['claimed_epsilon']:.2f}",
        f"both reach {100 * light['broken_accuracy']:.0f} % accuracy",
        f"at step {light['violation_step']}, dpaudit",
    )
    for page in ("README.md", "docs/index.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert [quote for quote in quoted if quote not in text] == []
    readme = (ROOT / "README.md").read_text()
    (bound, claimed), *_ = re.findall(r"epsilon >= ([\d.]+), but ([\d.]+) is claimed", readme)
    assert float(claimed) == light["claimed_epsilon"]
    assert float(bound) == light["broken_epsilon"]
