"""Tests of the accounting itself do without the table of the others."""

from collections.abc import Iterator

import accountant_table
import pytest


@pytest.fixture(autouse=True, scope="package")
def no_table() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        accountant_table.bypass(patch)
        yield
