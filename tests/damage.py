"""Files as they come back from a bad disk, or from somebody who means no good."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dpaudit.experiments._directory import _TRAILER, CHECKSUM, seal, with_checksum, with_digest

_FACTOR = 30 if os.environ.get("DPAUDIT_TEST_LONG") else 1


def examples(count: int) -> settings:
    """So many, and many more in `make test-long`."""
    return settings(max_examples=_FACTOR * count, suppress_health_check=[HealthCheck.function_scoped_fixture])


def forged(folder: Path) -> Path:
    """The directory as a forger leaves it: with checksums and a seal that fit what is in its files."""
    for name in ("config", "provenance", "canary"):
        path = folder / f"{name}.json"
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            values = json.loads(path.read_text())
            values.pop(CHECKSUM, None)
            path.write_text(json.dumps(with_checksum(values)))
    if (path := folder / "checkpoint.pt").exists():
        path.write_bytes(with_digest(path.read_bytes().partition(_TRAILER)[0]))
    seal(folder)
    return folder


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """The content with some bytes changed, dropped, put in, or cut off at the end."""
    return st.integers(0, 2**32 - 1).map(lambda seed: _damage(content, random.Random(seed)))


def _damage(content: bytes, draw: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(draw.randint(1, 6)):
        # headers and what is at the end hold the sizes
        first, last = draw.choice(((0, len(found)), (0, 130), (-200, -1)))
        place = draw.randint(first, last)
        kind = draw.choice(("flip", "put", "drop", "over", "cut"))
        if kind == "flip" and found:
            found[place % len(found)] ^= 1 << draw.randint(0, 7)
        elif kind == "put":
            found[place:place] = draw.randbytes(draw.randint(1, 8))
        elif kind == "drop":
            del found[place : place + draw.randint(1, 20)]
        elif kind == "over":
            found[place : place + 4] = draw.choice((b"9999", b"\xff\xff\xff\x7f", b'",(\n'))
        elif draw.randint(0, 3) == 0:
            del found[place:]
    return bytes(found)


STRANGE: list[Any] = [
    None, 0, 1, -1, 0.5, 1e300, 10**30, True, "x", "inf", "\x1b[2J", "9" * 500, [], {}, [[]], {"a": 1},
]  # fmt: skip


@st.composite
def altered(draw: st.DrawFn, values: Any) -> Any:
    """Plain values with one of them replaced by a strange one, or dropped."""
    found = copy.deepcopy(values)
    inner, key = {"whole": found}, "whole"
    outer: Any = inner
    while isinstance(outer[key], dict | list) and outer[key] and draw(st.integers(0, 9)):
        outer = outer[key]
        places = sorted(outer) if isinstance(outer, dict) else range(len(outer))
        key = draw(st.sampled_from(places))
    if draw(st.booleans()) and isinstance(outer, dict) and outer is not inner:
        del outer[key]
    else:
        outer[key] = copy.deepcopy(draw(st.sampled_from(STRANGE)))
    return inner["whole"]
