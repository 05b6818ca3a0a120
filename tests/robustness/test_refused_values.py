"""Values that are refused in a sentence before they can do harm; each was accepted once, or raised."""

from __future__ import annotations

import io
import zipfile
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpaudit import (
    Betting,
    Claim,
    ClopperPearson,
    Fixed,
    Gaussian,
    Guesses,
    Leak,
    Observations,
    Recorder,
    _io,
    audit,
    lower_bound,
    plan_steps,
)
from dpaudit._validate import percent
from dpaudit.accounting import _pld
from dpaudit.canaries import Mixture
from dpaudit.cli._score_files import Columns, ScoreFiles
from dpaudit.diagnostics import Diagnostics
from dpaudit.errors import InputError
from dpaudit.observers import AuditSession
from dpaudit.observers.step import observe_step
from dpaudit.recording import PerStep, WholeRun
from dpaudit.stats import Bound, Estimate, Power, ThresholdRule
from dpaudit.stats._result import ClaimPart
from dpaudit.stats._roc_band import RocBand
from dpaudit.training import DPSGD, SGD, FlipAndCrop, Training
from dpaudit.training.data import Dataset, random_images
from dpaudit.training.models import mlp

RNG = np.random.default_rng(0)
PRESENT, ABSENT = 1 + RNG.normal(size=30), RNG.normal(size=30)


@pytest.mark.parametrize("value", ["false", 1, None, np.array([True]), []])
@pytest.mark.parametrize("name", ["normalized", "paired", "coupled"])
def test_a_flag_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{name} must be True or False, got .*"):
        Observations(with_canary=PRESENT, without_canary=ABSENT, **{name: value})
    with pytest.raises(InputError, match=rf"{name} must be True or False, got .*"):
        Observations.from_presence(PRESENT, PRESENT > 1, **{name: value})


REFUSED_ARRAYS = {
    "masked": np.ma.masked_array(PRESENT, PRESENT > 1),
    "structured": np.zeros(30, dtype=[("a", "f8")]),
    "object": np.array([1.0] * 29 + [None]),
    "words": np.array(["0", "1"] * 15),
    "complex": PRESENT + 0j,
}


@pytest.mark.parametrize("name", REFUSED_ARRAYS)
def test_an_array_holds_plain_numbers(name: str) -> None:
    array = REFUSED_ARRAYS[name]
    with pytest.raises(InputError, match="with_canary must "):
        Observations(with_canary=array, without_canary=ABSENT)
    for make in (Observations.from_presence, lambda *both: Guesses.from_scores(*both, num_guesses=2)):
        with pytest.raises(InputError, match="scores must "):
            make(array, PRESENT > 1)
        with pytest.raises(InputError, match="present must "):
            make(PRESENT, array)


def test_what_an_archive_unpacks_to_is_limited_in_all(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "t.npz"
    np.savez_compressed(path, score=np.zeros(40), present=np.zeros(40), id=np.arange(40))
    files = ScoreFiles(path, None, None, Columns(identifier="id"))
    sizes = [one.file_size for one in zipfile.ZipFile(path).infolist()]
    monkeypatch.setattr(_io, "LARGEST_ARRAY", sum(sizes) - 1)  # more than any two of them
    with pytest.raises(InputError, match=r"t.npz contains arrays of .* bytes in all"):
        files.read(normalized=False)
    monkeypatch.setattr(_io, "LARGEST_ARRAY", sum(sizes))
    with pytest.raises(InputError, match="at least one is needed"):
        files.read(normalized=False)


def test_what_columns_unpack_to_is_limited_in_all(tmp_path: Path, monkeypatch: Any) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # noqa: PLC0415

    path = tmp_path / "t.parquet"
    parquet.write_table(arrow.table({"score": np.zeros(1000), "present": np.arange(1000) % 2}), path)
    monkeypatch.setattr(_io, "LARGEST_ARRAY", 2 * 8 * 1000 - 1)
    with pytest.raises(InputError, match="bytes in all"):
        ScoreFiles(path, None, None, Columns()).read(normalized=False)
    monkeypatch.setattr(_io, "LARGEST_ARRAY", 2 * 8 * 1000)
    assert ScoreFiles(path, None, None, Columns()).read(normalized=False).with_canary.size == 500


def test_one_long_word_does_not_make_room_for_all(tmp_path: Path, monkeypatch: Any) -> None:
    rows = [f"0.{number},{number % 2},{'a' * 50 if number == 3 else number}" for number in range(10, 40)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["score,present,id", *rows, f"1,1,{'a' * 500}"]))
    monkeypatch.setattr(_io, "LARGEST_ARRAY", 10_000)
    with pytest.raises(InputError, match="bytes in all"):
        ScoreFiles(path, None, None, Columns(identifier="id")).read(normalized=False)


@pytest.mark.parametrize("noise", [1e-320, 1e-160, 1e-10, 1e10, 1e308])
def test_a_noise_multiplier_whose_square_overflows_is_refused(noise: float) -> None:
    for make in (Claim.gaussian, lambda **both: Claim.dpsgd(**both, sample_rate=0.1, num_steps=10)):
        with pytest.raises(InputError, match=r"noise_multiplier must be between 1e-09 and 1e\+09, got"):
            make(noise_multiplier=noise, delta=1e-5)


def test_a_claim_with_hardly_any_noise_is_refused_with_its_own_numbers() -> None:
    claim = Claim.dpsgd(noise_multiplier=1e-4, sample_rate=0.01, num_steps=100, delta=1e-5)
    with pytest.raises(
        InputError, match=r"no epsilon that can be computed at delta=1e-05 for noise_multiplier=0\.0001"
    ):
        _ = claim.epsilon


def test_a_claim_whose_losses_do_not_fit_into_memory_is_computed_without_them(monkeypatch: Any) -> None:
    usual = Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.0123, num_steps=100, delta=1e-5).epsilon

    def refuse(num_losses: int) -> None:
        raise ValueError(f"{num_losses} losses")

    monkeypatch.setattr(_pld, "_require_size", refuse)
    claim = Claim.dpsgd(noise_multiplier=1.0 + 1e-12, sample_rate=0.0123, num_steps=100, delta=1e-5)
    assert claim.epsilon == pytest.approx(usual, rel=1e-2)
    assert claim.epsilon != usual


def test_curves_at_the_end_of_the_range_of_floats_have_an_infinite_epsilon() -> None:
    assert Gaussian().epsilon(1e308, 1e-5) == float("inf")
    observations = Observations(
        with_canary=np.full(30, 1e308), without_canary=1e300 * PRESENT, normalized=True
    )
    assert audit(observations, claim=Claim.curve(Gaussian(), parameter=1e300, delta=1e-5)).notes == ()


def test_a_confidence_is_not_rounded_to_all_of_it() -> None:
    observations = Observations(with_canary=PRESENT, without_canary=ABSENT)
    result = audit(observations, claim=Claim.gaussian(noise_multiplier=1.0, delta=1e-5), confidence=1 - 1e-12)
    assert "99.9999999999 % confidence" in result.details()
    assert Bound.from_dict(result.bound.to_dict()) == result.bound
    with pytest.raises(InputError, match="at most 1 - 1e-12"):
        audit(observations, claim=result.claim, confidence=1 - 1e-15)
    assert percent(1.0) == "100 %"


@pytest.mark.parametrize("kind", [Bound, Power, Estimate, ClaimPart, RocBand, ThresholdRule])
@pytest.mark.parametrize("values", [None, [], "x", 3, {}])
def test_values_that_are_no_dictionary_are_refused(kind: Any, values: Any) -> None:
    with pytest.raises(InputError):
        kind.from_dict(values)


def test_a_message_is_short() -> None:
    error = InputError(f"Expected a word, got {'a' * 5_000}; use another.")
    assert len(str(error)) == 1_000
    assert str(error).startswith("Expected a word, got aaa")
    assert str(error).endswith("a; use another.")
    with pytest.raises(InputError) as caught:
        Claim.gaussian(noise_multiplier="9" * 5_000, delta=1e-5)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_an_observer_that_was_used_says_so() -> None:
    recorder = Recorder(claim=Claim.gaussian(noise_multiplier=1.0, delta=1e-5), num_steps=2)
    block = AuditSession("observe", nullcontext(recorder))
    with block:
        pass
    with pytest.raises(InputError, match=r"was already used in a with block"), block:
        pass


@pytest.mark.parametrize("value", ["x", None, 3, object()])
def test_a_curve_is_a_family_of_curves(value: Any) -> None:
    with pytest.raises(InputError, match=r"The trade-off must be a curve such as Gaussian\(\), got"):
        Claim.curve(value, delta=1e-5)


def test_numbers_of_other_types_are_read_as_floats() -> None:
    claim = Claim.dpsgd(noise_multiplier=1.0, sample_rate=Fraction(1, 10), num_steps=np.int8(10), delta=1e-5)  # type: ignore[arg-type]
    assert "sample rate 0.1, 10 steps" in claim.summary
    assert Leak(noise_factor=np.float16(0.5)).noise_factor == 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["noise_factor", "epsilon"])
@pytest.mark.parametrize("value", ["x", [], np.nan, Decimal("NaN"), 1j, 10**400])
def test_a_leak_is_a_number(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        Leak(**{name: value})


ODD_SCORES = (
    {},
    1j,
    "x",
    "9" * 2_000,
    {1, 2},
    np.zeros(3, [("a", "f8")]),
    np.ones(3) + 1j,
    [[1.0], [1.0, 2.0]],
)


@pytest.mark.parametrize("value", [*ODD_SCORES, np.ma.masked_array(np.ones(3), np.arange(3) > 1)], ids=repr)
def test_recorded_scores_are_plain_numbers(value: Any) -> None:
    present = np.array([True, False, True])
    for record in (
        lambda: _recorder().record(value, present),
        lambda: _whole_run(present).record(value),
    ):
        with pytest.raises(InputError, match="scores must "):
            record()


@pytest.mark.parametrize("noise", [1e-160, 1e300])
def test_likelihood_ratios_have_a_noise_whose_square_is_a_number(noise: float) -> None:
    with pytest.raises(InputError, match=r"noise_multiplier must be between 1e-09 and 1e\+09, got"):
        _whole_run(np.array([True, False]), noise)


def test_likelihood_ratios_of_huge_scores_stay_numbers() -> None:
    recorder = _whole_run(np.array([True, False]), 1e-3, rate=1.0)
    with np.errstate(all="raise", under="ignore"):
        for sign in (1, -1, 1):
            recorder.record(np.array([sign * 1e308, 0.5]))
    ratios = recorder.state_dict()["ratios"]
    assert np.isfinite(ratios).all()
    assert ratios[0] > ratios[1] == 0


@pytest.mark.parametrize("leaves", [3.5, np.array(1.0), {"a": "x"}, {"a": -1}, {"a": 1.5}, ["x"]], ids=repr)
def test_the_sizes_of_parameters_are_whole_numbers(leaves: Any) -> None:
    with pytest.raises(InputError, match="size"):
        observe_step(
            lambda rows: np.asarray(rows).sum(axis=0),
            np.zeros((0, 80)),
            claim=Claim.gaussian(noise_multiplier=1.0, delta=1e-5),
            max_grad_norm=1.0,
            leaves=leaves,
        )


@pytest.mark.parametrize(
    "given",
    [{"leaves": 3.5}, {"precision": float}, {"precision": np.ones(2)}, {"longest": "x"},
     {"batch_size": 10**400},
     {"released": np.full(8, "x")}, {"known": {}}],
    ids=repr,
)  # fmt: skip
def test_noise_of_a_step_that_is_refused_leaves_no_trace(given: dict[str, Any]) -> None:
    tests = Diagnostics()
    tests.observe_noise(np.ones(8))
    before = repr(tests.state_dict())
    with pytest.raises(InputError):
        tests.observe_noise(np.ones(8), **given)
    assert repr(tests.state_dict()) == before


def test_noise_whose_square_overflows_is_refused_without_a_warning() -> None:
    with np.errstate(all="raise"), pytest.raises(InputError, match="Noise must be finite, got 1e"):
        Diagnostics().observe_noise(np.full(8, 1e300))


def test_a_threshold_above_the_range_of_the_scores_is_counted_without_a_warning() -> None:
    scores = PRESENT.astype(np.float32)
    with np.errstate(all="raise", under="ignore"):
        observations = Observations(with_canary=scores, without_canary=scores)
        found = lower_bound(
            observations, delta=1e-5, tradeoff=Gaussian(), inference=ClopperPearson(), threshold=Fixed(1e100)
        )
    assert found.counts.false_negatives == 30


def test_a_leak_of_any_size_is_planned_for_without_a_warning() -> None:
    claim = Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    with np.errstate(all="raise", under="ignore"):
        found = plan_steps(claim, leak=Leak(epsilon=1e160), inference=Betting(), num_canaries=8)
    assert found.num_steps is not None


def _whole_run(present: Any, noise: float = 1.0, rate: float = 0.5) -> Recorder:
    claim = Claim.dpsgd(noise_multiplier=noise, sample_rate=rate, num_steps=4, delta=1e-5)
    return Recorder(claim=claim, num_steps=4, scorer=WholeRun(present))


def _recorder() -> Recorder:
    return Recorder(claim=Claim.gaussian(noise_multiplier=1.0, delta=1e-5), num_steps=4)


@pytest.mark.parametrize(
    "change",
    [{"scores": 3}, {"scores": [[1.0, "x"]]}, {"scores": [[np.nan] * 6] * 3}, {"present": [[2] * 6] * 3},
     {"present": None}, {"looked": "no"}, {"betting": {"type": "Fixed"}}, {"confidence": 7}],
)  # fmt: skip
def test_a_damaged_state_of_a_recorder_is_refused(change: dict[str, Any]) -> None:
    recorder = _recorder()
    for step in range(3):
        present = np.arange(6) % 2 == step % 2
        recorder.record(present + 0.1 * np.arange(6.0), present)
    state = recorder.state_dict()
    again = _recorder()
    again.load_state_dict(state)
    assert again.num_done == 3
    with pytest.raises(InputError):
        _recorder().load_state_dict(state | change)
    for key in ("scores", "present", "looked"):
        with pytest.raises(InputError, match="The state_dict of a recorder"):
            _recorder().load_state_dict({name: value for name, value in state.items() if name != key})


@pytest.mark.parametrize("state", [None, {}, [], {"num_done": "x", "ratios": [1.0], "present": [True]}])
def test_other_damaged_states_are_refused(state: Any) -> None:
    data = Dataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), 2)
    settings = DPSGD(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.5,
        num_steps=2,
        optimizer=SGD(learning_rate=1.0),
    )
    for one in (
        _recorder(),
        _whole_run(np.array([True, False])),
        Diagnostics(),
        Training(mlp(2, 2), data, settings),
    ):
        with pytest.raises(InputError):
            one.load_state_dict(state)


def test_training_that_does_not_fit_into_memory_is_refused_before_it_starts() -> None:
    images = Dataset(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.long), 2)
    settings = DPSGD(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.5,
        num_steps=2,
        optimizer=SGD(learning_rate=1.0),
        multiplicity=10**12,
        augmentation=FlipAndCrop(),
    )
    with pytest.raises(InputError, match=r"multiplicity=1000000000000 .* would need about .* GB of memory"):
        Training(mlp(64, 2), images, settings)
    with pytest.raises(InputError, match="GB of memory"):
        random_images(10**12)
    with pytest.raises(
        InputError, match=r"weights of layers of sizes 10, 10000000000, 2 would need about .* GB of memory"
    ):
        mlp(10, 10**10, 2)


def test_a_python_2_header_is_read_without_a_warning(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, PRESENT)
    paths = [tmp_path / f"{side}.npy" for side in ("with", "without")]
    for path in paths:
        path.write_bytes(file.getvalue().replace(b"(30,), }  ", b"(30L,), } "))
    sides = ScoreFiles(None, *paths, Columns())
    assert sides.read(normalized=False).with_canary.size == 30


def test_scores_of_all_steps_fit_into_memory_before_the_first_is_recorded() -> None:
    claim = Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    with pytest.raises(
        InputError, match=r"num_steps=1000000000 x num_canaries=1000000 would need about .* GB of memory"
    ):
        Recorder(claim=claim, num_steps=10**9, scorer=PerStep(num_canaries=10**6))
    for num_canaries in (10**400, Decimal(3), Fraction(10**400), -1):
        with pytest.raises(InputError, match="num_canaries"):
            Recorder(claim=claim, num_steps=4, scorer=PerStep(num_canaries=num_canaries))  # type: ignore[arg-type]
    recorder = Recorder(claim=claim, num_steps=10**12)
    with pytest.raises(
        InputError, match=r"num_steps=1000000000000 x num_canaries=1000 would need about .* GB of memory"
    ):
        recorder.record(np.zeros(1_000), np.zeros(1_000, bool))


@pytest.mark.parametrize(("num_steps", "num_canaries"), [(20, 10**10), (10**11, 40)])
def test_steps_and_canaries_of_a_step_function_fit_into_memory(num_steps: int, num_canaries: int) -> None:
    with pytest.raises(InputError, match=f"num_canaries={num_canaries}.* would need about .* GB of memory"):
        observe_step(
            lambda rows: np.asarray(rows).sum(axis=0),
            np.zeros((0, 80)),
            claim=Claim.gaussian(noise_multiplier=1.0, delta=1e-5),
            max_grad_norm=1.0,
            num_steps=num_steps,
            num_canaries=num_canaries,
        )


def test_the_steps_that_count_are_counted_without_visiting_them() -> None:
    canary = Mixture()
    for number in (0, 1, 7, 50, 333):
        assert canary.num_counted(number) == sum(canary.is_counted(index) for index in range(number))
    assert 0 < canary.num_counted(10**15) < 10**15
