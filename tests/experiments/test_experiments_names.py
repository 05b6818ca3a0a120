"""The public names of the experiments package: a change here is a change for users."""

import inspect

import dpaudit.experiments
from dpaudit.experiments import config

NAMES = """
    EXAMPLES Config Experiment Outcome Progress Running build example load_config parse_config rehearse run
    use_one_thread
"""


def test_the_public_names_are_these() -> None:
    assert dpaudit.experiments.__all__ == NAMES.split()


def test_every_public_name_exists_and_is_documented() -> None:
    for module in (dpaudit.experiments, config):
        for name in module.__all__:
            member = getattr(module, name)
            assert inspect.getdoc(member), name
