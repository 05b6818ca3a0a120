"""An epsilon that was claimed of a run with Opacus is compared with the parameters that its code has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus_runs import DELTA, Made, run, small_data, small_model
from torch import nn
from torch.utils.data import DataLoader

import dpaudit
from dpaudit.observers.opacus import observe
from dpaudit.recording import Recorder

STEPS = 20


def trained(accountant: str = "rdp", gain: float = 1.0, **options: Any) -> tuple[Recorder, PrivacyEngine]:
    """Observe a few steps, after the first half of which the noise is multiplied by ``gain``."""
    torch.manual_seed(0)
    model, engine = small_model(), PrivacyEngine(accountant=accountant)
    criterion = nn.CrossEntropyLoss()
    made = Made.of(
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(small_data(200), batch_size=20),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        ),
        criterion,
    )
    with observe(made.optimizer, loader=made.loader, delta=DELTA, seed=0, **options) as recorder:
        run(made, STEPS // 2)
        made.optimizer.noise_multiplier *= gain
        run(made, STEPS // 2)
    return recorder, engine


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_the_epsilon_of_its_own_accountant_is_not_accused(accountant: str) -> None:
    recorder, engine = trained(accountant)
    epsilon = engine.get_epsilon(DELTA)
    for claimed in (epsilon, *(round(epsilon, digits) for digits in (1, 2, 3))):
        result = recorder.audit(epsilon=claimed)
        assert not result.is_violation
        assert result.to_check == ()


def test_an_epsilon_that_the_run_does_not_have_is_a_finding_wherever_it_is_passed() -> None:
    results = [trained(epsilon=1.0)[0].audit(), trained()[0].audit(epsilon=1.0)]
    for result in results:
        assert [finding.name for finding in result.findings] == ["claimed-epsilon"]
        assert "Epsilon 1 was claimed; these parameters have" in str(result)
        assert {part.name: part.source for part in result.claim.parts}["epsilon"] == "given"


def test_an_epsilon_of_more_steps_than_were_recorded_asks_for_their_number() -> None:
    result = trained(epsilon=30.0)[0].audit()
    assert not result.is_violation
    assert result.diagnosis is not None
    assert any("pass num_steps=..." in note for note in result.diagnosis.notes)


def test_the_epsilon_of_a_run_that_changes_its_noise_is_not_compared() -> None:
    recorder, engine = trained(gain=2.0)
    result = recorder.audit(epsilon=engine.get_epsilon(DELTA), noise_multiplier=1.0, num_steps=STEPS)
    assert not result.is_violation
    assert any("epsilon" in gap and "noise multiplier changed" in gap for gap in result.not_covered)


def test_an_epsilon_alone_does_not_make_up_for_a_missing_number() -> None:
    recorder, _ = trained(epsilon=3.0, num_steps=STEPS)
    with pytest.raises(dpaudit.InputError, match="epsilon must be positive, got -1"):
        recorder.audit(epsilon=-1.0)
    with pytest.raises(dpaudit.InputError, match=r"target_epsilon=3\.0 alone does not determine"):
        observe(None, target_epsilon=3.0)  # type: ignore[call-arg]
