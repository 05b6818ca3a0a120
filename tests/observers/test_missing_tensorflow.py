"""Without TF Privacy the observer says what to install."""

import importlib
import sys

import pytest

import dpaudit


def test_a_missing_tensorflow_gives_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_privacy", None)
    with pytest.raises(dpaudit.MissingExtraError, match=r"pip install 'tensorflow<2.16' tensorflow-privacy"):
        importlib.import_module("dpaudit.observers.tensorflow")
