"""Noise that is not what it seems is found, each fault by the test made for it; its correct twin is not."""

import numpy as np
import pytest
from scipy import special, stats
from simulated import Releases
from statistical_limits import LEVEL

from dpaudit import InputError
from dpaudit.diagnostics import Diagnostics, likely_causes
from dpaudit.diagnostics._diagnosis import ALSO_ABSENT

LEAVES, STEPS = (150, 50, 100), 200
SIZE = sum(LEAVES)


def batches(seed=0):
    """Sums of random batches, with the sizes of the batches and their longest gradient."""
    rng = np.random.default_rng([seed, 1])
    direction = rng.standard_normal(SIZE) / np.sqrt(SIZE)
    for _ in range(STEPS):
        size = int(rng.poisson(40))
        total = np.sqrt(size) * rng.standard_normal(SIZE) / np.sqrt(SIZE) + 0.1 * size * direction
        yield total.astype(np.float32), size, 0.5 + 0.5 * rng.random()


def diagnosed(noise, seed=0, *, is_rounded=lambda released: released, level=0.01):
    """The diagnosis of a run; ``noise`` takes a generator, and the batch of the step and what came before."""
    rng, log, past, sums = np.random.default_rng([seed, 2]), Releases(), [], []
    for step, (total, size, longest) in enumerate(batches(seed)):
        context = {"step": step, "total": total, "size": size, "longest": longest, "past": past, "sums": sums}
        made = np.asarray(noise(rng, context), dtype=np.float32)
        log.observe(
            is_rounded(total + made),
            total,
            LEAVES,
            norm=1.0,
            eps=2.0**-23,
            num_rows=size,
            max_row_norm=longest,
        )
        past.append(made)
        sums.append(total)
    return log.diagnose(noise_multiplier=1.0, confidence=1 - level)


def normal(rng, _=None):
    return rng.standard_normal(SIZE)


def bfloat16(numbers):
    return (np.asarray(numbers, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def from_table(rng, _):
    return np.random.default_rng(5).standard_normal(4096)[rng.integers(4096, size=SIZE)]


def cut(limit):
    low, high = stats.norm.cdf([-limit, limit])
    scale = stats.truncnorm.std(-limit, limit)
    return lambda rng, _: stats.norm.ppf(rng.uniform(low, high, SIZE)) / scale


def uniforms(count):
    return lambda rng, _: (rng.random((count, SIZE)) - 0.5).sum(axis=0) * np.sqrt(12 / count)


def box_muller(rng, _):
    first, second = (rng.integers(4096, size=(2, SIZE // 2)) + 0.5) / 4096
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()


def rolled(rng, context):
    return np.roll(context["past"][-1], 7) if context["step"] % 2 else normal(rng)


def leaf_shifted(rng, _):
    noise = normal(rng)
    noise[205:295] = noise[10:100]
    return noise


def blocks(rng, _):
    return np.tile(rng.standard_normal(SIZE // 4), 4)


def low_rank(rank):
    basis = np.linalg.qr(np.random.default_rng(6).standard_normal((SIZE, rank)))[0]
    return lambda rng, _: np.sqrt(SIZE / rank) * basis @ rng.standard_normal(rank)


def common(rng, _):
    part = np.random.default_rng(7).standard_normal(SIZE)
    return np.sqrt(0.98) * normal(rng) + np.sqrt(0.02) * rng.choice([-1, 1]) * part


def earlier(lag, share):
    def noise(rng, context):
        sums = context["sums"]
        return normal(rng) + (share * sums[-lag] if len(sums) >= lag else 0)

    return noise


LATTICE, SHARED, TAILS = (
    ("drawn in half precision",),
    ("read twice", "reused", "same PRNG key"),
    ("truncated",),
)
FAULTS = {
    "bf16": (lambda rng, _: bfloat16(normal(rng)), "tied-noise", LATTICE),
    "fp16": (lambda rng, _: normal(rng).astype(np.float16), "tied-noise", LATTICE),
    "fixed point": (lambda rng, _: np.rint(512 * normal(rng)) / 512, "tied-noise", LATTICE),
    "table": (from_table, "tied-noise", LATTICE),
    "Box-Muller": (box_muller, "tied-pairs", ("few bits",)),
    "cut at 2": (cut(2.0), "missing-tail", TAILS),
    "cut at 3": (cut(3.0), "missing-tail", TAILS),
    "Irwin-Hall 4": (uniforms(4), "missing-tail", TAILS),
    "Irwin-Hall 12": (uniforms(12), "missing-tail", TAILS),
    "t(5)": (lambda rng, _: rng.standard_t(5, SIZE) * np.sqrt(0.6), "noise-tails", ("distribution",)),
    "rolled": (rolled, "shifted-noise", SHARED),
    "leaf shifted": (leaf_shifted, "shifted-noise", SHARED),
    "shared blocks": (blocks, "shifted-noise", SHARED),
    "rank 50": (low_rank(50), "low-rank-noise", ("smaller space",)),
    "rank 200": (low_rank(200), "low-rank-noise", ("smaller space",)),
    "common part": (common, "common-noise", ("share a part",)),
    "std by batch size": (
        lambda rng, context: np.sqrt(context["size"] / 40) * normal(rng),
        "noise-by-batch",
        ("from the batch",),
    ),
    "std by longest gradient": (
        lambda rng, context: context["longest"] * normal(rng),
        "noise-by-batch",
        ("from the batch",),
    ),
    "0.2 of the last sum": (earlier(1, 0.2), "noise-by-sum", ("left over",)),
    "0.3 of a sum 20 steps before": (earlier(20, 0.3), "noise-by-sum", ("left over", "reused")),
    "0.1 of the sum again": (
        lambda rng, context: normal(rng) + 0.1 * context["total"],
        "noise-by-sum",
        ("added again",),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_noise_is_found_and_its_cause_comes_first(fault):
    noise, name, words = FAULTS[fault]
    diagnosis = diagnosed(noise)
    assert name in [finding.name for finding in diagnosis.findings]
    assert any(word in diagnosis.likely_causes()[0] for word in words), diagnosis.likely_causes()


TWINS = {
    "correct": (normal, lambda released: released),
    "release in bf16": (normal, bfloat16),
    "release in fp16": (normal, lambda released: released.astype(np.float16)),
    "all in bf16": (lambda rng, _: bfloat16(normal(rng)), bfloat16),
    "more noise": (lambda rng, _: 1.3 * normal(rng), lambda released: released),
    "more noise in some leaves": (
        lambda rng, _: np.repeat([1.0, 3.0, 100.0], LEAVES) * normal(rng),
        lambda released: released,
    ),
    "a schedule": (
        lambda rng, context: (2 - context["step"] / STEPS) * normal(rng),
        lambda released: released,
    ),
}


@pytest.mark.parametrize("twin", TWINS)
def test_correct_noise_is_not_accused(twin):
    noise, is_rounded = TWINS[twin]
    diagnosis = diagnosed(noise, is_rounded=is_rounded, level=LEVEL)
    assert diagnosis.findings == ()
    is_coarse = "16" in twin
    assert bool(diagnosis.not_covered) == is_coarse
    assert ("tied-noise" in [check.name for check in diagnosis.checks]) != is_coarse


def test_low_precision_of_one_parameter_does_not_hide_a_lattice_in_the_others():
    def last_leaf_coarse(released):
        return np.concatenate([released[:200], bfloat16(released[200:])])

    diagnosis = diagnosed(lambda rng, _: normal(rng).astype(np.float16), is_rounded=last_leaf_coarse)
    assert diagnosis.findings[0].name == "tied-noise"
    assert "33 % of the coordinates" in diagnosis.not_covered[0]
    assert diagnosed(normal, is_rounded=last_leaf_coarse, level=LEVEL).findings == ()


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_the_8_million_normal_numbers_of_jax_are_not_a_lattice(scale):
    rng = np.random.default_rng(0)
    sums = scale * rng.standard_normal((150, 600)).astype(np.float32)
    low = np.nextafter(np.float32(-1), np.float32(0))  # as jax.random.normal: 2^23 uniform numbers
    uniform = rng.integers(0, 2**23, sums.shape).astype(np.float32) / np.float32(2**23) * (1 - low) + low
    noise = np.float32(2**0.5) * special.erfinv(uniform)
    log = Releases()
    for total, added in zip(sums, noise, strict=True):
        log.observe(total + added, total, (600,), norm=1.0, eps=2.0**-23)
    found = {check.name: check for check in log.diagnose(noise_multiplier=1.0, confidence=0.5).checks}
    assert found["tied-noise"].p_value > 0.5
    assert found["tied-pairs"].p_value > 0.1
    if scale == 0.0:  # nor are fewer numbers: ties of exact copies would be seen
        assert found["tied-noise"].estimate > 0


def test_a_grid_is_named_with_its_spacing():
    finding = diagnosed(FAULTS["fixed point"][0]).findings[0]
    assert "on a grid with a spacing of 0.002 claimed standard deviations" in finding.sentence


def stochastic(released):
    low = np.floor(64 * released)
    return (
        low + (np.random.default_rng(int(1e6 * abs(released[0]))).random(SIZE) < 64 * released - low)
    ) / 64


@pytest.mark.parametrize(
    "is_rounded",
    [
        lambda released: np.round(released * 64) / 64,
        lambda released: np.round(released.astype(np.float64) / 0.05) * 0.05,
        lambda released: (np.round(released * 1024) / 1024 / 30).astype(np.float32) * np.float32(30),
        stochastic,
    ],
    ids=["1/64", "0.05", "1/1,024 of a mean", "stochastic"],
)
def test_a_release_that_is_rounded_to_a_grid_is_not_accused(is_rounded):
    diagnosis = diagnosed(normal, is_rounded=is_rounded, level=LEVEL)
    assert diagnosis.findings == ()
    assert "ties are not tested" in diagnosis.not_covered[0]


@pytest.mark.parametrize("has_known", [True, False])
def test_a_grid_of_the_noise_is_found_where_the_sum_is_on_it_by_accident(has_known):
    rng, record, log = np.random.default_rng(0), Diagnostics(), Releases()
    for _ in range(100):
        total, noise = rng.integers(-1, 2, 200) / 2, np.rint(512 * rng.standard_normal(200)) / 512
        record.observe_noise(noise, known=total if has_known else None, released=7 * (total + noise))
        log.observe(total + noise, total, (200,), norm=1.0, eps=2.0**-23)
    for diagnosis in (record.diagnose(), log.diagnose(noise_multiplier=1.0, confidence=0.95)):
        assert diagnosis.findings[0].name == "tied-noise"


def test_a_grid_of_releases_in_other_units_is_recognized_and_kept_in_a_state():
    rng, record = np.random.default_rng(0), Diagnostics()
    for step in range(80):
        total, noise = rng.standard_normal((2, 150))
        released = np.round((total + noise) * 32) / 32
        record.observe_noise(released - total, known=total, released=3 * released)
        if step == 20:
            state, record = record.state_dict(), Diagnostics()
            record.load_state_dict(state)
    assert record._noise.record().grid == pytest.approx(1 / 32)
    diagnosis = record.diagnose(1 - LEVEL)
    assert diagnosis.findings == ()
    assert not {"tied-noise", "tied-pairs"} & {check.name for check in diagnosis.checks}
    record.observe_noise(np.full(150, 0.3), known=np.zeros(150), released=np.full(150, 0.9))
    assert record._noise.record().grid == 0.0  # one release that is not on it is enough


def test_a_constant_part_is_asked_about_and_no_finding():
    part = np.random.default_rng(8).standard_normal(SIZE)
    part *= 2 / np.linalg.norm(part)
    diagnosis = diagnosed(lambda rng, _: normal(rng) + part, level=LEVEL)
    assert diagnosis.findings == ()
    assert any("stays for many steps: does it depend on the data?" in note for note in diagnosis.notes)
    assert not any("stays for many steps" in note for note in diagnosed(normal).notes)


def test_a_schedule_of_batches_and_of_noise_at_the_same_time_is_no_dependence():
    rng, record = np.random.default_rng(0), Diagnostics()
    for step in range(200):
        factor = 1 if step < 97 else 2
        record.observe_noise(factor * rng.standard_normal(100), batch_size=factor * 64)
    assert "noise-by-batch" in [check.name for check in record.diagnose().checks]
    assert record.diagnose(1 - LEVEL).findings == ()


def test_the_largest_number_of_all_coordinates_counts_where_few_are_kept():
    def log_of(limit):
        rng, log = np.random.default_rng(3), Releases()
        for _ in range(150):
            noise = np.clip(rng.standard_normal(20_000), -limit, limit)
            top = (float(np.abs(noise).max()), noise.size)
            log.observe(noise[:50], np.zeros(50), (50,), norm=1.0, eps=0.0, max_noise=top)
        return log.diagnose(noise_multiplier=1.0, confidence=0.999)

    assert [finding.name for finding in log_of(4.3).findings] == ["missing-tail"]
    assert "3,000,000 numbers is 4.3 claimed" in log_of(4.3).findings[0].sentence
    assert log_of(np.inf).findings == ()


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (2, 2), (3, 1), (10, 5), (5, 20)])
def test_tiny_runs_neither_fail_nor_alarm(shape):
    for seed in range(20):
        rng, record = np.random.default_rng([seed, *shape]), Diagnostics()
        for noise in rng.standard_normal(shape):
            record.observe_noise(noise, known=rng.standard_normal(shape[1]), released=noise, batch_size=3)
        assert record.diagnose(1 - LEVEL / 100).findings == ()


def test_noise_without_any_is_not_also_tied():
    record = Diagnostics()
    for _ in range(60):
        record.observe_noise(1e-8 * np.random.default_rng(0).standard_normal(100), known=np.ones(100))
    assert not {"tied-noise", "tied-pairs"} & {finding.name for finding in record.diagnose().findings}


@pytest.mark.parametrize(("share", "expected"), [(0.0, []), (0.1, ["noise-by-sum"])])
def test_canaries_do_not_hide_a_part_of_the_sum_of_the_examples(share, expected):
    rng, found = np.random.default_rng(4), {}
    records = {"with examples": Diagnostics(), "without": Diagnostics()}
    for step in range(150):
        sums = (8 if step < 75 else 2) * rng.standard_normal(300) / np.sqrt(300)
        known, noise = sums + 2 * rng.integers(2, size=300), rng.standard_normal(300) + share * sums
        records["with examples"].observe_noise(noise, known=known, examples=sums)
        records["without"].observe_noise(noise, known=known)
    found = {name: record.diagnose(1 - LEVEL) for name, record in records.items()}
    assert [finding.name for finding in found["with examples"].findings] == expected
    assert found["without"].findings == ()
    if expected:
        assert "times the sum of the examples of the same step" in found["with examples"].findings[0].sentence


@pytest.mark.parametrize("name", ["known", "examples", "released"])
@pytest.mark.parametrize("bad", [np.zeros(4), np.full(5, np.nan)])
def test_sums_and_releases_of_another_shape_are_refused(name, bad):
    with pytest.raises(InputError, match=f"{name} of step 0 must be 5 finite numbers"):
        Diagnostics().observe_noise(np.ones(5), **{name: bad})


def test_a_state_holds_what_was_given_besides_the_noise():
    def observe(record, steps, seed):
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            noise, known = rng.standard_normal((2, 80)).astype(np.float32)
            given = {"known": known, "examples": known / 2, "released": known + noise}
            record.observe_noise(noise, **given, batch_size=rng.poisson(9))

    whole, first, second = (Diagnostics() for _ in range(3))
    first.load_state_dict(second.state_dict())  # of no step
    observe(whole, 30, 0)
    observe(first, 30, 0)
    second.load_state_dict(first.state_dict())
    observe(whole, 10, 1)
    observe(second, 10, 1)
    assert second.diagnose() == whole.diagnose()
    assert {"noise-by-sum", "noise-by-batch", "tied-noise"} <= {
        check.name for check in whole.diagnose().checks
    }


def test_shared_numbers_are_not_called_a_lattice():
    assert "read twice" in likely_causes(findings=["tied-noise", "shifted-noise"])[0]
    assert len(likely_causes(findings=["tied-noise", "shifted-noise"])) == 1
    assert "half precision" in likely_causes(findings=["tied-noise", "missing-tail"])[0]


def test_a_mean_that_follows_from_repeated_noise_is_not_its_cause():
    mean = {"coordinate-correlation": "the mean of the noise is 0.03"}
    names = ["repeated-noise", "coordinate-correlation", "tied-noise"]
    assert "reseeded" in likely_causes(findings=names, own_causes=mean)[0]
    assert "mean of the noise" in likely_causes(findings=names[:2], own_causes=mean)[0]


def test_a_large_sum_that_is_left_over_is_named_as_the_cause():
    rng, record, last = np.random.default_rng(0), Diagnostics(), np.zeros(200)
    for _ in range(100):
        noise, known = rng.standard_normal(200), rng.standard_normal(200)
        known[0] += rng.choice([0.0, 3e4])  # a canary
        record.observe_noise(noise + 0.5 * last, known=known)
        last = known
    assert "left over from another step" in record.diagnose().likely_causes()[0]


def test_a_sum_that_absent_canaries_show_is_no_fault_of_the_clipping():
    own = {"clipping": f"{ALSO_ABSENT} 5 clipping norms"}
    names = ["repeated-noise", "noise-by-sum", "clipping", "noise-tails"]
    assert likely_causes(findings=names, own_causes=own) == likely_causes(findings=["noise-by-sum"])
    assert "reseeded" in likely_causes(findings=[*names, "tied-noise"], own_causes=own)[0]


@pytest.mark.parametrize(("spacing", "noise"), [(0.05, 0.0), (0.05, 0.7), (1.0, 0.0), (4.0, 0.0)])
def test_a_grid_of_releases_does_not_hide_that_noise_is_missing(spacing, noise):
    rng, record = np.random.default_rng(5), Diagnostics()
    for _ in range(100):
        total = rng.standard_normal(400)
        released = np.round((total + noise * rng.standard_normal(400)) / spacing) * spacing
        record.observe_noise(released - total, known=total, released=released)
    assert record.diagnose(1 - LEVEL).findings != ()
