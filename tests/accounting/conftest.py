"""These tests are of the accounting itself, so they do without the table of the others."""

import accountant_table
import pytest


@pytest.fixture(autouse=True)
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    accountant_table.bypass(monkeypatch)
