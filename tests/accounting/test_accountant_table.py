"""The table of epsilons that other tests look up holds what the accountant computes."""

import accountant_table
import pytest


def test_stored_epsilons_are_those_of_the_accountant(is_long):
    table = accountant_table.AccountantTable().known
    assert table, (
        "it was made with another version of dp-accounting: DPAUDIT_TEST_UPDATE_TABLE=1 make test-long"
    )
    for name, value in list(table.items())[:: 1 if is_long else 97]:
        noise, rate, steps, delta, finer = map(float, name.split(","))
        setting = noise, rate, int(steps), delta, finer
        # rounding errors of transforms grow with the number of steps
        assert accountant_table.compute(*setting) == pytest.approx(value, rel=2e-8)
        assert accountant_table.compute_removal(*setting) == pytest.approx(value, rel=2e-8)
