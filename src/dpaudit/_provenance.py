"""Where the numbers of a run come from: software, machine, code, time, and digests of what went in.

Everything is read from this process and from ``git``; nothing is imported, and a machine without ``git`` gets
no commit. Seeds appear only as digests: whoever knows a seed knows the noise.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

# name of the imported module, and of the distribution that it belongs to
_PACKAGES: Final = {
    "dpaudit": "dpaudit",
    "torch": "torch",
    "opacus": "opacus",
    "jax": "jax",
    "jax_privacy": "jax-privacy",
    "tensorflow": "tensorflow",
    "tensorflow_privacy": "tensorflow-privacy",
    "dp_accounting": "dp-accounting",
    "numpy": "numpy",
    "scipy": "scipy",
    "ray": "ray",
}
_GIT_SECONDS = 5.0  # a repository on a slow network drive must not delay a run any longer
_GIT = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--no-renames")
_COMMIT = "# branch.oid "
_MOST_STARTS = 100  # of one run, as listed in its provenance


def digest(values: object) -> str:
    """Return the SHA-256 of plain values, which does not depend on the order of keys.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def seed_digest(name: str, seed: int) -> str:
    """Return a digest that identifies a seed; a short seed can be guessed from it, a drawn one cannot."""
    return digest(["dpaudit seed", name, seed])


def spawn_seed(seed: int, *branch: int) -> int:
    """Return the 128-bit seed of a branch of a run's seed."""
    words = np.random.SeedSequence(seed, spawn_key=branch).generate_state(4, np.uint32)
    return int.from_bytes(words.astype("<u4").tobytes(), "little")


def now() -> str:
    """Return the time in UTC, to the second.

    >>> now().endswith("+00:00")
    True
    """
    return datetime.now(UTC).isoformat(timespec="seconds")


def seconds_since(start: object) -> float | None:
    """Return the seconds since a time that :func:`now` returned; None if it cannot be read."""
    try:
        began = datetime.fromisoformat(str(start))
        return max(0.0, round((datetime.now(UTC) - began).total_seconds(), 3))
    except (TypeError, ValueError):  # the latter for another form, the former for a time without a zone
        return None


def of_audit(started: str, audited: str) -> dict[str, Any]:
    """Return the provenance of an audit in this process, given when its steps began and when it was made."""
    began, ended = (datetime.fromisoformat(text) for text in (started, audited))
    seconds = max(0.0, (ended - began).total_seconds())
    return {**environment(), "started": started, "seconds": seconds}


def environment() -> dict[str, Any]:
    """Describe this process: versions of the packages that it has imported, Python, platform and code."""
    return {
        "packages": packages(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "git": git_state(),
    }


def packages() -> dict[str, str]:
    """Return the versions of the known packages that were imported so far.

    >>> {"dpaudit", "numpy"} <= set(packages())
    True
    """
    loaded = {name: sys.modules[module] for module, name in _PACKAGES.items() if module in sys.modules}
    return {name: _version(name, module) for name, module in loaded.items()}


def _version(distribution: str, module: object) -> str:
    """Return the version of the imported code: the installed package may be another one."""
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Return the commit of the folder, and whether tracked files differ from it; None outside a repository.

    Untracked files do not count, because the outputs of runs are among them. A ``git`` that is missing, fails
    or takes longer than a few seconds is the same as none.
    """
    program = shutil.which("git")
    if program is None:
        return None
    quiet = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        status = subprocess.run(
            [program, "-c", "core.fsmonitor=false", *_GIT],
            cwd=folder,
            env={**os.environ, **quiet},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    lines = status.stdout.decode(errors="replace").splitlines()
    commit = next((line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)), "")
    if not commit.isalnum():  # "(initial)" before the first commit
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def with_start(starts: list[Any], *, is_new: bool = True) -> list[Any]:
    """Return the starts of a run with this one: the first in full, later ones as far as they differ.

    A run that is resumed after an update has numbers of two versions. If the file with its starts was lost,
    the time of the first one is not known: this one must not pass for it.
    """
    here = environment()
    if not starts:
        return [{"at": now(), **here}] if is_new else [{"at": None, **here}, {"at": now()}]
    before: dict[str, Any] = {}
    for start in starts:
        before |= start if isinstance(start, Mapping) else {}
    changed = {key: value for key, value in here.items() if not _is_same(before.get(key), value)}
    return [*starts[: _MOST_STARTS - 1], {"at": now(), **changed}]


def _is_same(before: object, value: object) -> bool:
    """Return whether a start has nothing new; a package that is imported later is not new."""
    if isinstance(before, Mapping) and isinstance(value, Mapping) and "commit" not in value:
        return all(before.get(key, item) == item for key, item in value.items())
    return before == value


def of_run(
    starts: list[Any], digests: Mapping[str, Any], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the provenance of a finished run, given its starts and digests of what went in.

    ``elsewhere`` are the packages of its worker processes: this one does not import Ray, nor what the audited
    function imports.
    """
    first = dict(starts[0]) if starts and isinstance(starts[0], Mapping) else environment()
    started, before = first.pop("at", None), first.get("packages")
    # some are imported only at the end
    first["packages"] = {**elsewhere, **packages(), **(before if isinstance(before, Mapping) else {})}
    return {
        **first,
        **digests,
        "started": started,
        "seconds": seconds_since(started),
        **({"resumed": starts[1:]} if len(starts) > 1 else {}),
    }
