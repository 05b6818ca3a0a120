"""A native training is diagnosed beside its audit."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from digits_training import dpsgd_training, finished
from statistical_limits import LEVEL, most_flagged

from dpaudit import InputError, Verdict
from dpaudit.diagnostics import ObservedStep, SumChange
from dpaudit.training import Diagnose, GaussianSum, OneRun, Training, broken
from dpaudit.training.gradients import flat_parameters
from dpaudit.training.models import mlp

NOISE = {"noise_multiplier": 1.0}  # to look for one that gives an epsilon takes long


def small():
    return mlp(64, 16, 10)


def names(hook):
    return {finding.name for finding in hook.diagnose().findings}


def test_a_correct_training_has_no_finding_in_95_percent_of_seeds(train):
    flagged = 0
    for seed in range(40):
        hook = Diagnose()
        train(hook, num_steps=25, seed=seed, build=small, **NOISE)
        flagged += bool(hook.diagnose().findings)
    assert flagged <= most_flagged(40)


def test_a_diagnosis_beside_an_audit_sees_no_canary_and_changes_nothing(train):
    audit, hook = OneRun(delta=1e-5, seed=0), Diagnose()
    both = train([audit, hook], num_steps=100, build=small, **NOISE)
    alone = train(num_steps=100, build=small, **NOISE)
    assert torch.equal(flat_parameters(both.model), flat_parameters(alone.model))
    assert hook.diagnose(1 - LEVEL).findings == ()
    assert audit.recorder.audit(confidence=1 - LEVEL).verdict is Verdict.NO_VIOLATION
    assert len(hook.diagnose().checks) == 28


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (broken.NoiseTooSmall, "noise-variance"),
        (broken.FewSeeds, "repeated-noise"),
        (partial(broken.UnnoisedCoordinates, count=605), "coordinate-noise"),
    ],
)
def test_broken_noise_is_found_within_200_steps(train, fault, expected):
    hook = Diagnose()
    train(hook, num_steps=200, fault=fault, build=small, **NOISE)
    assert expected in names(hook)


def test_shuffled_batches_are_found(train):
    hook = Diagnose()
    train(hook, num_steps=60, sampling=broken.ShuffledBatches, build=small, **NOISE)
    assert names(hook) >= {"batch-sizes", "participation-counts", "batch-overlap"}


def test_the_same_noise_in_two_runs_is_found(train):
    hook = Diagnose()
    for _ in range(2):
        train(hook, num_steps=20, build=small, **NOISE)
    sentences = [finding.sentence for finding in hook.diagnose().findings]
    assert "The noise repeats every 20 steps." in sentences


def test_a_diagnosis_goes_on_after_a_checkpoint(train):
    whole, first, second = Diagnose(), Diagnose(), Diagnose()
    training = train(whole, num_steps=20, build=small, **NOISE)

    def again(hook):
        return dpsgd_training(hook, build=small, data=training.data, num_steps=20, **NOISE)

    stopped, resumed = again(first), again(second)
    for _ in range(8):
        stopped.step()
    resumed.load_state_dict(stopped.state_dict())
    finished(resumed)
    assert second.diagnose() == whole.diagnose() != first.diagnose()


def test_what_sums_showed_before_a_checkpoint_is_not_forgotten(train):
    first, second = Diagnose(), Diagnose()
    stopped = train(first, num_steps=4, build=small, **NOISE)
    first.sums.observe(ObservedStep(example_sum_norm=9.0, num_rows=3))
    first.sums.observe(ObservedStep(sum_changes=(SumChange(2.0, 1.0, is_scaled=True),)))
    resumed = dpsgd_training(second, build=small, data=stopped.data, num_steps=4, **NOISE)
    state = stopped.state_dict()
    resumed.load_state_dict(state)
    assert second.diagnose() == first.diagnose()
    assert "sum-norm" in names(second)
    saved = second.state_dict()
    with pytest.raises(
        InputError, match="The state_dict of the sums of steps is damaged or was made with other"
    ):
        second.load_state_dict({**saved, "SumRecord": {"num_steps": 3}})


def test_of_a_large_model_a_thousand_coordinates_are_kept_and_the_largest_noise_of_all(train):
    hook = Diagnose()
    training = train(hook, num_steps=5, build=small, **NOISE)
    noise = hook.state_dict()["NoiseCheck"]["noise"]
    assert training.num_parameters > 1100 > noise["num_parameters"]
    assert list(noise["leaves"]) == [name for name, _ in training.model.named_parameters()]
    assert {count for _, count in hook.noise.record().largest} == {training.num_parameters}


def test_noise_that_is_not_finite_is_refused_at_any_coordinate(train):
    @dataclass(frozen=True, kw_only=True)
    class OneInfinite(GaussianSum):
        def noise(self, like, generator):
            noise = super().noise(like, generator)
            noise[1] = torch.inf
            return noise

    with pytest.raises(InputError, match=r"Noise must be finite, got inf in step 0\. Did training diverge\?"):
        train(Diagnose(), num_steps=1, fault=OneInfinite, build=small, **NOISE)


def test_trainings_of_another_claim_are_not_diagnosed_together(train):
    hook = Diagnose()
    train(hook, num_steps=2, build=small, **NOISE)
    with pytest.raises(InputError, match="equal noise and sample rate"):
        train(hook, num_steps=2, noise_multiplier=2.0, build=small)


def test_a_training_that_claims_no_noise_cannot_be_diagnosed(train):
    training = train(num_steps=1, build=small, **NOISE)
    settings = replace(training.settings, noise_multiplier=0.0)
    with pytest.raises(InputError, match="noise_multiplier must be positive, got 0"):
        Training(small(), training.data, settings, hooks=[Diagnose()])
