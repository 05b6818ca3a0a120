"""Without its library an observer says what to install."""

import importlib
import sys

import pytest

import dpaudit


@pytest.mark.parametrize(
    ("observer", "library", "packages"),
    [("opacus", "opacus", "opacus"), ("jax_privacy", "jax_privacy", "jax-privacy optax")],
)
def test_a_missing_library_gives_the_line_that_installs_it(monkeypatch, observer, library, packages):
    for name in [name for name in sys.modules if name.startswith(f"dpaudit.observers.{observer}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(dpaudit.MissingExtraError, match=f"pip install {packages}$"):
        importlib.import_module(f"dpaudit.observers.{observer}")
