"""Replays of functions that return a release, and each stage of the comparison of a step."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dpaudit
from dpaudit.observers._neighbors import neighbors_of, other_batches
from dpaudit.observers._replay import compare_neighbors
from dpaudit.observers._replay_result import ReleaseTrace, ReplayedStep, StepTrace, fingerprint_rows
from dpaudit.observers.step import replay

NORM = 0.5
ROWS = np.random.default_rng(9).standard_normal((20, 100)).astype(np.float32)
NEIGHBORS = [ROWS[1:], np.concatenate([ROWS, 50 * ROWS[:1]])]


def clipped_sum(rows, norm=NORM):
    return (rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / norm)).sum(axis=0)


def replayed(release, batch=ROWS, neighbors=None, *, reseed=lambda: None, **options):
    return replay(release, batch, neighbors, reseed=reseed, max_grad_norm=NORM, **options)


def with_noise(release):
    """A release with noise, and the function that resets it."""
    rng = np.random.default_rng()

    def reseed():
        rng.bit_generator.state = np.random.default_rng(0).bit_generator.state

    return lambda rows: release(rows) + rng.standard_normal(100), reseed


def names(result):
    return [finding.name for finding in result.findings]


CORRECT = {
    "sum": (clipped_sum, {}),
    "mean": (lambda rows: clipped_sum(rows) / 20, {"batch_size": 20}),
    "list": (lambda rows: clipped_sum(rows).tolist(), {}),
    "tensor": (lambda rows: torch.as_tensor(clipped_sum(rows)), {}),
}


@pytest.mark.parametrize("neighbors", [None, NEIGHBORS])
@pytest.mark.parametrize("kind", CORRECT)
def test_a_correct_step_moves_by_at_most_the_clipping_norm(kind, neighbors):
    release, options = CORRECT[kind]
    result = replayed(release, neighbors=neighbors, **options)
    assert result.largest == pytest.approx(1.0, rel=1e-5)
    assert not result.is_violation
    assert not result.tests_coupling
    result.raise_for_violation()
    assert any("only releases were compared" in gap for gap in result.not_covered)


BROKEN = {
    "no clipping": lambda rows: rows.sum(axis=0),
    "batch statistics": lambda rows: clipped_sum(rows - rows.mean(axis=0)),
    "another norm": lambda rows: clipped_sum(rows, 1.01 * NORM),
}


@pytest.mark.parametrize("neighbors", [None, NEIGHBORS])
@pytest.mark.parametrize("fault", BROKEN)
def test_a_release_that_moves_too_far_is_a_violation(fault, neighbors):
    release, reseed = with_noise(BROKEN[fault])
    result = replayed(release, neighbors=neighbors, reseed=reseed)
    assert names(result) == ["sensitivity"]
    assert result.likely_causes()
    read = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (read["is_violation"], read["findings"][0]["name"]) == (True, "sensitivity")
    results = result.results()
    assert (results.certain, results.not_covered) == (result.findings, result.not_covered)
    with pytest.raises(
        dpaudit.ViolationError, match=r"clipping norms if one example is .*, more than the [12] "
    ):
        result.raise_for_violation()


def test_a_release_that_is_not_finite_hides_no_violation():
    missing = np.concatenate([ROWS[1:], np.full((1, 100), np.nan)])
    result = replayed(clipped_sum, neighbors=[missing])
    assert not result.is_violation
    assert [finding.name for finding in result.non_finite] == ["non-finite-example"]
    assert "if it can have a non-finite gradient" in str(result)
    assert result.likely_causes()
    assert result.to_dict()["checks"][0]["distance"] is None

    def doubled(rows):
        return clipped_sum(rows) * (2.0 if len(rows) > 20 else 1.0)

    assert names(replayed(doubled, neighbors=[missing, NEIGHBORS[1]])) == ["sensitivity"]
    result = replayed(lambda rows: np.exp(rows).sum(axis=0), neighbors=[1e6 * ROWS])
    assert not result.is_violation  # finite examples may have a non-finite gradient, too
    assert result.non_finite


def test_data_of_one_batch_that_is_left_for_the_next_is_a_finding():
    last = []

    def release(rows):
        last.append(rows.mean())
        return rows[0] / 100 + (last[-2] if len(last) > 2 else last[0])

    result = replayed(release)
    assert "next-release" in names(result)
    assert "it keeps data outside of its state" in str(result)


def test_an_error_of_an_example_is_a_finding_only_if_the_example_is_natural():
    def fixed_size(rows):
        return clipped_sum(rows.reshape(20, 100))

    result = replayed(fixed_size)
    assert names(result) == ["failing-step"]
    assert "The step raises ValueError if one example is removed" in str(result)
    result = replayed(fixed_size, neighbors=[ROWS[1:], np.concatenate([ROWS[:19], 0 * ROWS[:1]])])
    assert names(result) == []
    assert any(
        "raised ValueError if one example is added or removed, as" in gap for gap in result.not_covered
    )


def test_what_cannot_be_replayed_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(
        dpaudit.InputError, match=r"bit for bit, got other releases: let reseed\(\) reset the RNG"
    ):
        replayed(lambda _: rng.standard_normal(100))
    with pytest.raises(dpaudit.InputError, match="at least one batch"):
        replayed(clipped_sum, neighbors=[])
    with pytest.raises(dpaudit.InputError, match="a finite release"):
        replayed(clipped_sum, np.full((20, 100), np.nan), [ROWS])
    with pytest.raises(
        dpaudit.InputError, match="got 100 numbers for the batch and 99 for a neighboring one"
    ):
        replayed(clipped_sum, neighbors=[ROWS[:, 1:]])
    with pytest.raises(
        dpaudit.InputError,
        match=r"No change of an example changed the release of step\(batch\)\. Does the step",
    ):
        replayed(lambda _: np.zeros(100))
    with pytest.raises(dpaudit.InputError, match="at least 3 examples"):
        replayed(clipped_sum, ROWS[:2])
    with pytest.raises(dpaudit.InputError, match="one row per example"):
        replayed(lambda batch: clipped_sum(batch[0]), (ROWS, ROWS[1:]))
    with pytest.raises(ZeroDivisionError):
        replayed(lambda _: 1 / 0)
    with pytest.raises(dpaudit.InputError, match="max_grad_norm"):
        replay(clipped_sum, ROWS, reseed=lambda: None, max_grad_norm=0.0)


# ---- each stage of the comparison, on a step that is written out ----


class WrittenStep(ReplayedStep):
    """A step that writes to objects: a clipped and noisy sum, and what ``change`` does to its trace.

    ``change`` is called with the ``trace``, the ``rows`` of the batch, those of the step before (``last``)
    and the clipping ``norm``.
    """

    can_vary = True
    how_to_repeat = "name the state"

    def __init__(self, change=lambda _: None, **options):
        self.num_examples, self.change, self.num_runs = len(ROWS), change, 0
        vars(self).update(options)

    def run(self, batch, first, *, norm_factor=1.0, next_batch=None):
        del first
        self.num_runs += 1
        trace, last = StepTrace(state={("weights", "w"): "1"}), None
        for rows in [batch] if next_batch is None else [batch, next_batch]:
            norm = norm_factor * NORM
            with np.errstate(all="ignore"):
                total, prints = clipped_sum(rows, norm), fingerprint_rows([rows])
            noise = np.random.default_rng(len(trace.releases)).standard_normal(100)
            release = ReleaseTrace(
                total=total, noisy=total + noise, unit=norm, eps=1e-7, rows=prints, factor=1.0
            )
            trace.releases.append(release)
            try:
                self.change(SimpleNamespace(trace=trace, rows=np.nan_to_num(rows), last=last, norm=norm))
            except ArithmeticError as error:
                trace.error = error
            last = np.nan_to_num(rows)
        return trace


def release_of(run, **values):
    """Replace parts of the last release, and return it."""
    run.trace.releases[-1] = replace(run.trace.releases[-1], **values)
    return run.trace.releases[-1]


def scale_noise(run, factor):
    release = run.trace.releases[-1]
    release_of(run, noisy=release.total + factor * (release.noisy - release.total))


def stage(change, **options):
    return compare_neighbors(WrittenStep(change, **options), ROWS.astype(np.float64))


def longest(rows):
    return float(np.linalg.norm(rows, axis=1).max())


def written(kind, value):
    return lambda run: run.trace.state.update({(kind, "x"): str(value(run))})


def no_second_release(run):
    if run.last is not None and longest(run.rows) > 100:
        del run.trace.releases[-1]


def carried(run):
    if run.last is not None:
        release_of(run, noisy=run.trace.releases[-1].noisy + 1e-3 * run.last.sum())


def raises_if_small(run):
    if len(run.rows) < len(ROWS):
        raise ArithmeticError("too few\nof them")


def unclipped(run):
    release_of(run, noisy=run.rows.sum(axis=0), total=run.rows.sum(axis=0))


STAGES = {
    "the noise at 1,000 times the clipping norm": (
        lambda run: scale_noise(run, 1.0 if run.norm == NORM else longest(run.rows)),
        ("batch-dependent-noise", "if the clipping norm is large and one example is"),
    ),
    "the noise of other batches": (
        lambda run: scale_noise(run, 1.0 if run.rows.any() else 2.0),
        ("batch-dependent-noise", "if all inputs are zero"),
    ),
    "the noise of neighbors": (
        lambda run: scale_noise(run, len(run.rows)),
        ("batch-dependent-noise", "if one example is"),
    ),
    "the direction of the noise": (
        lambda run: scale_noise(run, np.where(run.trace.releases[-1].total < 0, -1.0, 1.0)),
        ("batch-dependent-noise", "The noise from the same random numbers changes its direction by"),
    ),
    "the first example": (
        lambda run: release_of(run, rows=run.trace.releases[-1].rows * (1 + abs(run.rows[0, 0]))),
        ("coupled-examples", "at the start of the batch"),
    ),
    "the state after other batches": (
        written("buffers", lambda run: np.sign(run.rows[:10, 0].sum())),
        ("buffers", "A buffer of the model changes if all inputs are multiplied by -1, although"),
    ),
    "the state after neighbors": (
        written("hyperparameters", lambda run: len(run.rows)),
        ("hyperparameters", "changes with one example changed, although the release is the same: x."),
    ),
    "the second of two steps": (no_second_release, ("release-count", "in the second of two steps")),
    "the release of the next step": (carried, ("next-release", "The release of the next step moves by")),
    "the state after the next step": (
        written("optimizer-state", lambda run: None if run.last is None else run.last.sum()),
        ("optimizer-state", "changes with an example of the step before changed"),
    ),
    "errors": (raises_if_small, ("failing-step", "ArithmeticError if one example is removed: too few.")),
    "the number of releases": (
        lambda run: run.trace.releases.extend(run.trace.releases * (len(run.rows) < 20)),
        ("release-count", "The step makes 2 releases instead of 1 if one example is removed."),
    ),
    "rows of one example": (
        lambda run: release_of(run, rows=np.concatenate([run.trace.releases[-1].rows] * 2)),
        ("rows-per-example", "The clipped gradients of 2 rows change if one example is"),
    ),
    "rows of other examples": (
        lambda run: release_of(run, rows=run.trace.releases[-1].rows * (1 + abs(run.rows.mean()))),
        ("coupled-examples", "other examples change if one example is"),
    ),
    "the factor of the sum": (
        lambda run: release_of(run, factor=1 / len(run.rows)),
        ("divisor", "The sum is scaled by"),
    ),
    "the distance of releases": (unclipped, ("sensitivity", "more than the")),
}


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_sees_what_no_other_does(name):
    change, (finding, sentence) = STAGES[name]
    result = stage(change)
    assert names(result)[0] == finding, str(result)
    assert sentence in result.findings[0].sentence


def test_a_correct_step_passes_every_stage():
    step = WrittenStep()
    result = compare_neighbors(step, ROWS)
    assert names(result) == []
    assert result.largest == pytest.approx(1.0, rel=1e-5)
    assert len(result.checks) == 11
    assert 40 < step.num_runs < 80


def test_a_factor_that_follows_more_than_the_size_is_no_divisor():
    assert names(stage(lambda run: release_of(run, factor=1 / (1 + longest(run.rows))))) == []


def test_a_consequence_is_not_a_finding_of_its_own():
    def change(run):
        for name in ("hyperparameters", "weights", "other-state"):
            run.trace.state[name, "x"] = str(len(run.rows))
        carried(run)

    assert names(stage(change)) == ["hyperparameters"]


def test_the_largest_of_the_findings_with_one_name_is_kept():
    [finding] = stage(unclipped).findings
    assert finding.estimate > 1000
    assert "1,000" in finding.sentence


def masked(run):
    run.trace.uses_randomness = True


def masked_and_sorted(run):
    masked(run)
    release_of(run, rows=np.sort(run.trace.releases[-1].rows, axis=0))


def masked_by_size(run):
    run.trace.has_same_randomness = len(run.rows) == len(ROWS)


def masked_by_content(run):
    run.trace.has_same_randomness = longest(run.rows) < 100


@pytest.mark.parametrize(
    ("change", "gap", "compared"),
    [
        (masked, "randomness such as dropout, which depends on the number of examples", {2.0}),
        (masked_and_sorted, "the step orders its examples by their content", set()),
        (masked_by_size, "random masks for the whole batch", {2.0}),
        (
            masked_by_content,
            "random numbers depend on the data if one example is multiplied by 1,000",
            {1.0, 2.0},
        ),
    ],
)
def test_randomness_in_the_model_limits_what_is_compared(change, gap, compared):
    result = stage(change)
    assert names(result) == []
    assert any(gap in text for text in result.not_covered)
    assert {check.allowed for check in result.checks if not np.isnan(check.distance)} == compared


def test_a_release_without_clipped_gradients_is_named():
    for must_clip in (True, False):
        result = stage(lambda run: release_of(run, rows=None), must_clip=must_clip)
        assert names(result) == ["missing-clipping"] * must_clip


def test_attributes_that_depend_on_examples_are_noted():
    result = stage(lambda run: run.trace.attributes.update({"last": str(run.rows[-1, 0]), "count": "1"}))
    assert "What the step writes to last depends" in result.notes[0]


def test_a_second_step_that_raises_is_not_covered():
    def once(run):
        if run.last is not None:
            raise ArithmeticError("again")

    assert "a second call of the step raised ArithmeticError: again." in str(stage(once))


@pytest.mark.parametrize("is_late", [lambda run: run == 2, lambda run: run % 7 == 0, lambda run: run > 40])
def test_a_state_that_is_not_restored_is_refused_whenever_it_shows(is_late):
    """In the second run, in one of a neighbor, or in the last ones."""
    step = WrittenStep()
    step.change = lambda run: run.trace.state.update({("other-state", "count"): str(is_late(step.num_runs))})
    with pytest.raises(dpaudit.InputError, match=r"bit for bit, got another state \(count\): name the state"):
        compare_neighbors(step, ROWS)


def test_labels_are_changed_alone_with_long_examples_and_all_at_once():
    batch = np.ones((5, 2)), np.array([1, 2, 1, 0, 2])
    neighbors = {neighbor.change: neighbor.batch for neighbor in neighbors_of(batch)}
    assert neighbors["given another label"][1][-1] == 1
    assert neighbors["multiplied by 1,000 and given yet another label"][1][-1] == 0
    added = neighbors["added that is 1,000 times as large and has yet another label"]
    assert (added[0][-1, 0], added[1][-1]) == (1000.0, 0)
    assert dict(other_batches(batch))["labels are exchanged"][1].tolist() == [2, 1, 0, 2, 1]
