"""Any step can be audited, in any library."""

from functools import partial

import numpy as np
import pytest
import torch
from score_noise import require_normal
from statistical_limits import LEVEL, least_caught, most_flagged

import dpaudit
from dpaudit.observers._arrays import as_numpy, with_rows
from dpaudit.observers.step import observe_step

CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.8563, sample_rate=0.05, num_steps=300, delta=1e-5)
NORM, NOISE = 0.5, 0.8563
VIOLATION = dpaudit.Verdict.VIOLATION
OTHERS = np.random.default_rng(9).standard_normal((20, 100)).astype(np.float32)


def numpy_step(*, noise=NOISE, clip=True, divisor=1.0, seed=0):
    rng = np.random.default_rng(seed)

    def step(rows):
        assert isinstance(rows, np.ndarray)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        clipped = rows / np.maximum(1.0, lengths / NORM) if clip else rows
        return (clipped.sum(axis=0) + noise * NORM * rng.standard_normal(rows.shape[1])) / divisor

    return step


def torch_step(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def step(rows):
        clipped = rows * (NORM / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
        return clipped.sum(0) + NOISE * NORM * torch.randn(rows.shape[1], generator=generator)

    return step


def watch(step, gradients=OTHERS, **options):
    return observe_step(step, gradients, claim=CLAIM, max_grad_norm=NORM, **({"seed": 0} | options))


def test_a_correct_step_is_not_flagged_in_95_percent_of_seeds_and_tight(is_long):
    runs = 40 if is_long else 12
    results = [watch(numpy_step(seed=seed), seed=seed).audit() for seed in range(runs)]
    assert sum(result.verdict is VIOLATION for result in results) <= most_flagged(runs, broken=0.8)
    tight = sum(result.bound.epsilon > 0.85 * CLAIM.epsilon for result in results)
    assert tight >= least_caught(runs, 0.95, broken=0.3)


@pytest.mark.parametrize("broken", [{"noise": 0.8 * NOISE}, {"noise": 0.0}, {"clip": False}], ids=str)
def test_a_broken_step_is_a_violation(broken):
    gradients = np.zeros((1, 100)) if "clip" in broken else OTHERS
    assert watch(numpy_step(**broken), gradients).audit().verdict is VIOLATION


def clipped_again(rows, *, is_noisy, rng=np.random.default_rng(0)):  # noqa: B008
    noise = NOISE * NORM * rng.standard_normal(rows.shape[1])
    total = (rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / NORM)).sum(axis=0)
    total = total + noise if is_noisy else total
    total = total / max(1.0, np.linalg.norm(total) / NORM)
    return total if is_noisy else total + noise


@pytest.mark.parametrize(
    ("is_noisy", "cause"), [(False, "it is clipped again"), (True, "the noisy sum is clipped")]
)
def test_a_sum_that_is_clipped_again_is_named_in_the_refusal(is_noisy, cause):
    step = partial(clipped_again, is_noisy=is_noisy)
    with pytest.raises(dpaudit.InputError, match=cause):
        watch(step, np.zeros((20, 100))).audit()


def test_a_noisy_sum_that_is_clipped_is_named_if_the_sum_is_not_zero():
    with pytest.raises(dpaudit.InputError, match="is the sum or the noisy sum clipped again"):
        watch(partial(clipped_again, is_noisy=True))


def test_a_step_that_clips_the_mean_is_a_violation_with_its_cause():
    rng = np.random.default_rng(0)

    def step(rows):
        total = rows.sum(axis=0)
        limit = NORM * len(rows) / max(np.linalg.norm(total), 1e-9)
        return total * min(1.0, limit) + NOISE * NORM * rng.standard_normal(rows.shape[1])

    result = watch(step, np.zeros((4, 100))).audit()
    assert result.verdict is VIOLATION
    assert "is the mean or the sum of the batch clipped" in result.likely_causes()[0]


@pytest.mark.parametrize("row", [0, 5, -1])
def test_a_row_at_any_position_that_is_not_clipped_is_a_violation(row):
    rng = np.random.default_rng(0)

    def step(rows):
        clipped = rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / NORM)
        clipped[row] = rows[row]
        return clipped.sum(axis=0) + NOISE * NORM * rng.standard_normal(rows.shape[1])

    result = watch(step, np.zeros((16, 300))).audit()
    assert result.verdict is VIOLATION
    assert row or "are rows skipped?" in result.likely_causes()[0]


@pytest.mark.parametrize(("expected", "is_longer"), [(60, True), (30, False)])
def test_a_sum_that_is_divided_by_the_number_of_rows_is_found_if_it_is_too_long(expected, is_longer):
    correct = numpy_step(noise=0.0)
    rng = np.random.default_rng(0)

    def step(rows):
        mean = correct(rows) / len(rows)
        return expected * mean + NOISE * NORM * rng.standard_normal(rows.shape[1])

    result = watch(step, np.zeros((16, 300))).audit()
    assert (result.verdict is VIOLATION) == is_longer
    texts = result.likely_causes() if is_longer else result.diagnosis.notes
    assert any("divided by the number of examples in the batch" in text for text in texts)


def test_the_number_of_rows_of_zeros_varies_but_is_never_smaller():
    sizes = []

    def step(rows):
        sizes.append(np.count_nonzero(~rows.any(axis=1)))
        return rows.sum(axis=0)

    watch(step, np.zeros((16, 100)), num_steps=20)
    assert set(sizes) == {16, 48}
    sizes.clear()
    watch(step, np.empty((0, 100)), num_steps=20)
    assert set(sizes) <= {0, 1}  # one if no canary is present


@pytest.mark.parametrize("num_parameters", [1, 5, 50])
def test_a_small_model_has_fewer_canaries_by_default(num_parameters):
    recorder = watch(numpy_step(), np.zeros((8, num_parameters)), num_steps=100)
    assert recorder.audit(confidence=1 - LEVEL).verdict is not VIOLATION
    assert recorder.state_dict()["scores"].shape[1] == max(1, num_parameters // 2)


def test_canaries_are_at_random_positions_that_depend_on_the_seed():
    def positions(seed):
        seen = []

        def step(rows):
            seen.append(np.flatnonzero(np.linalg.norm(rows, axis=1) > 0).tolist())
            return rows.sum(axis=0)

        watch(step, np.zeros((8, 100)), num_steps=30, seed=seed, num_canaries=8)
        return seen

    assert positions(1) == positions(1) != positions(2)
    assert {index for step in positions(1) for index in step} >= set(range(8))


def test_the_other_rows_keep_their_order_among_the_canaries():
    rows, rng = np.arange(12.0).reshape(6, 2), np.random.default_rng(3)
    for library in (np.asarray, torch.as_tensor):
        found = as_numpy(with_rows(library(rows), -rows[1:4], rng))
        assert np.array_equal(found[found[:, 1] > 0], rows)
        assert np.array_equal(found[found[:, 1] < 0], -rows[1:4])


def test_a_step_of_torch_gets_and_gives_tensors():
    recorder = watch(torch_step(), torch.as_tensor(OTHERS))
    assert recorder.audit(confidence=1 - LEVEL).verdict is not VIOLATION
    require_normal(recorder.observations, noise=NOISE)


def test_a_step_of_jax_gets_and_gives_arrays():
    jax = pytest.importorskip("jax")
    keys = iter(jax.random.split(jax.random.key(0), 300))

    def step(rows):
        lengths = jax.numpy.linalg.norm(rows, axis=1, keepdims=True)
        clipped = rows / jax.numpy.maximum(1.0, lengths / NORM)
        return clipped.sum(0) + NOISE * NORM * jax.random.normal(next(keys), (rows.shape[1],))

    recorder = watch(step, jax.numpy.asarray(OTHERS))
    require_normal(recorder.observations, noise=NOISE)


@pytest.mark.parametrize(
    "canary", [dpaudit.Dirac(), dpaudit.Constant(), dpaudit.RandomDirection(moving=True)]
)
def test_a_mean_is_scored_like_a_sum(canary):
    options = {"canary": canary, "num_steps": 100}
    means = watch(numpy_step(divisor=20.0), batch_size=20, **options).observations
    sums = watch(numpy_step(), **options).observations
    np.testing.assert_allclose(means.with_canary, sums.with_canary, atol=1e-5)
    require_normal(sums, noise=NOISE)


def test_a_step_of_jax_gets_few_numbers_of_rows():
    jax = pytest.importorskip("jax")
    sizes = []

    def step(rows):
        sizes.append(len(rows))
        return rows.sum(0)

    watch(step, jax.numpy.zeros((16, 100)), num_steps=40)
    assert all(size % 16 == 0 for size in sizes)
    assert len(set(sizes)) > 1


def test_there_may_be_no_other_examples():
    recorder = watch(numpy_step(), np.empty((0, 100)))
    require_normal(recorder.observations, noise=NOISE)


def test_gradients_releases_or_canaries_of_the_wrong_kind_are_refused():
    with pytest.raises(
        dpaudit.InputError, match=r"canary must be a gradient canary such as Dirac\(\), got 3"
    ):
        watch(numpy_step(), canary=3)
    with pytest.raises(dpaudit.InputError, match=r"examples x parameters, got \(100,\)"):
        watch(numpy_step(), np.zeros(100))
    with pytest.raises(dpaudit.InputError, match=r"gradient of shape \(100,\), got \(1, 100\)"):
        watch(lambda rows: rows[:1])


def own_sum(of_rows, seed=0):
    """A step with correct noise and a sum of its own."""
    rng = np.random.default_rng(seed)
    return lambda rows: of_rows(rows).sum(axis=0) + NOISE * NORM * rng.standard_normal(rows.shape[1])


def clipped_to(norm):
    return lambda rows: rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / norm)


@pytest.mark.parametrize(
    ("of_rows", "cause"),
    [
        (lambda rows: rows, "gradients are not clipped"),
        (clipped_to(10 * NORM), "times the claimed clipping norm"),
        (lambda rows: 2 * clipped_to(NORM)(rows), "every clipped gradient is multiplied by about"),
    ],
    ids=["not clipped", "another norm", "doubled"],
)
def test_other_gradients_that_count_too_much_are_a_violation_with_its_cause(of_rows, cause):
    found = watch(own_sum(of_rows), 5 * OTHERS).audit()
    assert found.verdict is VIOLATION
    assert "privacy" in found.refuted
    assert cause in found.likely_causes()[0]
    assert any("other gradients were replaced by zeros" in text for text in found.not_covered)


def normalized(rows):
    return NORM * rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 0.01)


@pytest.mark.parametrize(
    ("of_rows", "rows"),
    [
        (clipped_to(0.8 * NORM), OTHERS),
        (clipped_to(0.97 * NORM), np.ones((20, 100))),
        (normalized, OTHERS / 50),
        (lambda rows: clipped_to(NORM)(rows) + 0.2, OTHERS),
    ],
    ids=["a smaller norm", "a slightly smaller norm", "normalized", "with a constant"],
)
def test_another_sum_of_others_that_leaks_nothing_is_not_a_violation(of_rows, rows):
    with pytest.raises(dpaudit.InputError, match=r"differs by .* clipping norms where no canary is"):
        watch(own_sum(of_rows), rows)


def by_layer(rows):
    """Clip halves of the gradients; together, they are not longer than the norm."""
    return np.concatenate([clipped_to(NORM / 2**0.5)(half) for half in np.split(rows, 2, axis=1)], axis=1)


@pytest.mark.parametrize("seed", [0, 2])
def test_clipping_that_shifts_the_sum_of_others_a_little_is_not_a_violation(seed):
    rng = np.random.default_rng(seed)
    lengths = np.repeat([0.12, 0.05], 75) * rng.lognormal(0, 0.5, (50, 1))
    step, rows = own_sum(by_layer, seed), NORM * lengths * rng.standard_normal((50, 150))
    found = watch(step, rows, num_steps=300, seed=seed).audit()
    assert not found.refuted
    assert any("other gradients were replaced by zeros" in text for text in found.not_covered)


def test_a_known_sum_of_others_is_accepted():
    watch(numpy_step(noise=0.0))  # the sum is known, up to rounding
    watch(numpy_step(), num_steps=5)  # too few to tell


def test_a_step_that_drops_the_canaries_gets_no_verdict():
    step = numpy_step(noise=0.0)
    recorder = watch(lambda _: step(OTHERS))
    with pytest.raises(dpaudit.InputError, match="Scores must increase by 1 where a canary is present"):
        recorder.audit()


def test_what_cannot_be_held_against_the_noise_of_a_step_is_refused_in_a_sentence():
    claim = dpaudit.Claim.approximate_dp(epsilon=4.0, delta=1e-5)
    options = {"max_grad_norm": 1.0, "num_steps": 20, "num_canaries": 4, "seed": 0}
    others, step = np.zeros((1, 20)), lambda rows: rows.sum(axis=0) + np.ones(20)
    with pytest.raises(dpaudit.InputError, match="only be tested against a claim about Gaussian noise"):
        observe_step(step, others, claim=claim, **options).diagnose()
    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    recorder = observe_step(step, others, claim=claim, **options)
    assert recorder.diagnose(noise_multiplier=1.0).findings


def changed_step(change):
    """A correct step in single precision, but for what ``change`` does to the noise, given the rows."""
    rng, last = np.random.default_rng(1), []

    def step(rows):
        clipped = rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / NORM)
        total = clipped.sum(axis=0).astype(np.float32)
        noise = change(NOISE * NORM * rng.standard_normal(rows.shape[1]), rows, last)
        last.append(total)
        return total + np.asarray(noise, dtype=np.float32)

    return step


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda noise, _rows, _last: noise, None),
        (lambda noise, _rows, _last: noise.astype(np.float16), "tied-noise"),
        (lambda noise, _rows, _last: np.rint(noise * 1024) / 1024, "tied-noise"),
        (lambda noise, rows, _last: noise * np.sqrt(len(rows) / 52), "noise-by-batch"),
        (lambda noise, _rows, last: noise + 0.2 * (last[-1] if last else 0), "noise-by-sum"),
    ],
    ids=["correct", "half precision", "fixed point", "by rows", "left over"],
)
def test_noise_that_depends_on_the_data_or_is_on_a_lattice_is_found(change, expected):
    zeros = np.zeros((20, 200), dtype=np.float32)
    found = watch(changed_step(change), zeros, num_canaries=64).diagnose(confidence=1 - LEVEL)
    assert [finding.name for finding in found.findings][:1] == ([] if expected is None else [expected])
    assert not [one for one in found.not_covered if "precision" in one]


def test_noise_in_single_precision_is_no_lattice_in_a_release_in_double_precision():
    generator = torch.Generator().manual_seed(0)

    def step(rows):
        clipped = rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / NORM)
        return clipped.sum(axis=0) + NOISE * NORM * torch.randn(rows.shape[1], generator=generator).numpy()

    assert watch(step, OTHERS.astype(np.float64)).diagnose(confidence=1 - LEVEL).findings == ()


def test_a_step_that_releases_in_half_precision_is_not_accused_of_it():
    def step(rows):
        return torch_step_of(rows).half()

    torch_step_of = torch_step()
    diagnosis = watch(step, torch.as_tensor(OTHERS)).diagnose(confidence=1 - LEVEL)
    assert diagnosis.findings == ()
    assert "low precision" in diagnosis.not_covered[0]


def test_a_release_that_is_not_finite_ends_the_audit_and_the_steps_before_are_audited():
    rng, steps = np.random.default_rng(0), []

    def diverging(rows):
        steps.append(len(rows))
        noisy = rows.sum(axis=0) + rng.standard_normal(rows.shape[1])
        return noisy * (1 if len(steps) <= 30 else np.nan)

    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    options = {"claim": claim, "max_grad_norm": 1.0, "num_steps": 60, "canary": dpaudit.Dirac(), "seed": 0}
    with pytest.warns(
        match="The audit ends: steps from step 30 on are not audited: its gradients are not fin"
    ):
        recorder = observe_step(diverging, np.zeros((4, 100)), **options)
    assert recorder.num_done == 30
    assert recorder.audit().not_covered[0].startswith("steps from step 30 on are not audited")


@pytest.mark.parametrize("share", [-1.0, -0.125, 0.0, 0.125])
@pytest.mark.parametrize("canary", [dpaudit.Mixture(), dpaudit.Dirac()])
def test_canaries_that_hardly_reach_the_release_never_get_a_verdict(share, canary):
    rng = np.random.default_rng(0)

    def weak(rows):
        norms = np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
        return share * (rows / norms).sum(axis=0) + rng.standard_normal(rows.shape[1])

    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    options = {"claim": claim, "max_grad_norm": 1.0, "num_steps": 100, "canary": canary, "seed": 0}
    recorder = observe_step(weak, np.zeros((4, 200)), **options)
    with pytest.raises(dpaudit.InputError, match="Scores must increase by 1 where a canary is present"):
        recorder.audit()
