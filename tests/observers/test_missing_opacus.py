"""Without Opacus the observer says what to install."""

import importlib
import sys

import pytest

import dpaudit


def test_a_missing_opacus_gives_the_line_that_installs_it(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("dpaudit.observers.opacus")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(dpaudit.MissingExtraError, match=r"pip install 'dpaudit\[opacus\]'"):
        importlib.import_module("dpaudit.observers.opacus")
