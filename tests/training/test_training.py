"""The training does what Algorithm 2 says, and an audit does not disturb it."""

import subprocess
import sys
from collections.abc import Iterable, Sequence

import pytest
import torch
from digits_training import dpsgd, finished
from scipy import stats
from statistical_limits import LEVEL, count_range, size_variance_room, spread_range
from torch import Tensor

from dpaudit.errors import InputError
from dpaudit.training import (
    DPSGD,
    SGD,
    Adam,
    Batch,
    FlipAndCrop,
    GaussianSum,
    Hook,
    Optimizer,
    PoissonSampling,
    Seeds,
    Step,
    Training,
    accuracy,
    cross_entropy,
    generator,
    initialize,
)
from dpaudit.training.broken import ClippedAfterMean, NoNoiseWhenEmpty
from dpaudit.training.data import Dataset, digits
from dpaudit.training.gradients import (
    DenseRows,
    Rows,
    add_clipped,
    flat_parameters,
    flat_zeros,
    num_parameters,
    per_example,
)
from dpaudit.training.models import conv_net, mlp

DIGITS = digits()
SEEDS = Seeds.of(1)


def settings(**changes: object) -> DPSGD:
    usual = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "sample_rate": 0.05, "num_steps": 5}
    return dpsgd(**(usual | changes))


def training(seeds: Seeds | None = SEEDS, hooks: Iterable[Hook] = (), **changes: object) -> Training:
    model = initialize(lambda: mlp(64, 16, 10), seed=1)
    return Training(model, DIGITS, settings(**changes), seeds=seeds, hooks=tuple(hooks))


def trained(seeds: Seeds | None = SEEDS, hooks: Iterable[Hook] = (), **changes: object) -> Tensor:
    run = training(seeds, hooks, **changes)
    finished(run)
    return flat_parameters(run.model)


class Canary(Hook):
    """One gradient that is far too long, in every step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def joining(self, index: int, entries: Sequence[int]) -> Iterable[Rows]:  # noqa: ARG002
        gradient = torch.zeros(1, 64 * 16 + 16 + 16 * 10 + 10)
        gradient[0, index] = 100.0
        return [DenseRows([gradient])]

    def observe(self, step: Step) -> None:
        self.steps.append(step)


def test_a_step_is_the_one_that_algorithm_2_describes() -> None:
    run = training(noise_multiplier=1.5)
    before = flat_parameters(run.model)
    indices = PoissonSampling(0.05).indices(len(DIGITS), generator(Seeds.of(1).sampling))
    noise = torch.empty_like(before).normal_(generator=generator(Seeds.of(1).noise)) * 1.5 * 0.5
    batch = Batch(*DIGITS.at(indices))
    clipped = flat_zeros(run.model)
    add_clipped(per_example(run.model, cross_entropy, batch), 0.5, clipped)
    step = run.step()
    assert step.batch_size == len(indices)
    assert torch.equal(step.indices, indices)
    torch.testing.assert_close(step.clipped_sum, clipped)
    torch.testing.assert_close(step.noisy_sum, clipped + noise)
    expected = before - 0.5 * (clipped + noise) / (0.05 * 1797)
    torch.testing.assert_close(flat_parameters(run.model), expected)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(learning_rate=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (Adam(learning_rate=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    ],
)
def test_without_noise_and_clipping_it_is_the_training_of_torch(ours: Optimizer, theirs: object) -> None:
    run = training(noise_multiplier=0.0, max_grad_norm=1e6, sample_rate=1.0, optimizer=ours, num_steps=4)
    model = initialize(lambda: mlp(64, 16, 10), seed=1)
    optimizer = theirs(model.parameters())  # type: ignore[operator]
    inputs, targets = DIGITS.at(torch.arange(len(DIGITS)))
    for _ in run.run():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    torch.testing.assert_close(flat_parameters(run.model), flat_parameters(model), atol=1e-5, rtol=1e-4)


def test_an_empty_batch_is_a_step_with_noise() -> None:
    run = training(sample_rate=1e-9)
    before = flat_parameters(run.model)
    step = run.step()
    assert step.batch_size == 0
    assert not step.clipped_sum.any()
    low, high = spread_range(step.noisy_sum.numel())
    assert low < step.noisy_sum.std().item() / 0.5 < high
    assert not torch.equal(flat_parameters(run.model), before)


def test_what_joins_is_clipped_and_noised_but_not_learned() -> None:
    canary = Canary()
    watched = trained(hooks=[canary])
    assert torch.equal(watched, trained())
    assert [step.index for step in canary.steps] == [0, 1, 2, 3, 4]
    for step in canary.steps:
        added = step.joined_sum - step.clipped_sum
        assert added[step.index].item() == pytest.approx(0.5, abs=1e-5)
        assert (added.abs() > 1e-5).sum() == 1


def test_a_mechanism_that_clips_too_late_can_be_put_in_and_lets_the_canary_through() -> None:
    canary = Canary()
    mechanism = ClippedAfterMean(noise_multiplier=1.0, max_grad_norm=0.5)
    model = initialize(lambda: mlp(64, 16, 10), seed=1)
    run = Training(model, DIGITS, settings(), seeds=SEEDS, hooks=[canary], mechanism=mechanism)
    run.step()
    (step,) = canary.steps
    assert (step.joined_sum - step.clipped_sum)[0].item() > 10 * 0.5


def test_noise_that_depends_on_the_batch_is_that_of_the_batch_with_the_canary() -> None:
    """A step that only a canary is in has an example: the fault leaves out the noise of empty steps."""
    mechanism = NoNoiseWhenEmpty(noise_multiplier=1.0, max_grad_norm=0.5)
    model = initialize(lambda: mlp(64, 16, 10), seed=1)
    empty = settings(sample_rate=1e-9)
    low, high = spread_range(num_parameters(model))
    for hooks, std in ([Canary()], 0.5), ([], 0.0):
        step = Training(model, DIGITS, empty, seeds=SEEDS, hooks=hooks, mechanism=mechanism).step()
        assert low * std <= step.noise.std().item() <= high * std


def test_equal_seeds_give_equal_models_and_no_seeds_give_others() -> None:
    assert torch.equal(trained(), trained())
    assert not torch.equal(trained(None), trained(None))


@pytest.mark.parametrize("name", ["sampling", "noise"])
def test_every_seed_matters_on_its_own(name: str) -> None:
    values = {"sampling": 1, "noise": 1, "augmentation": 1}
    assert not torch.equal(trained(Seeds(**values)), trained(Seeds(**(values | {name: 2}))))


def test_the_noise_does_not_depend_on_which_examples_are_sampled() -> None:
    first, second = training(Seeds(sampling=1, noise=7)).step(), training(Seeds(sampling=2, noise=7)).step()
    assert not torch.equal(first.clipped_sum, second.clipped_sum)
    torch.testing.assert_close(first.noisy_sum - first.clipped_sum, second.noisy_sum - second.clipped_sum)


def test_seeds_that_agree_in_32_bits_give_different_noise() -> None:
    first, second = generator(1), generator(1 + 2**32)
    assert not torch.equal(torch.randn(20, generator=first), torch.randn(20, generator=second))


def test_the_filled_generator_is_uniform_and_normal() -> None:
    made = generator(5)
    values, normal = torch.rand(100_000, generator=made), torch.randn(100_000, generator=made)
    assert stats.kstest(values.numpy(), "uniform").pvalue > LEVEL / 2
    assert stats.kstest(normal.numpy(), "norm").pvalue > LEVEL / 2


def test_initialisation_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = (initialize(lambda: mlp(4, 2), seed=3) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(flat_parameters(first), flat_parameters(second))


def test_poisson_batches_have_binomial_sizes_and_independent_members() -> None:
    made, sampling = generator(0), PoissonSampling(0.1)
    present = torch.zeros(2000, 100)
    for row in present:
        row[sampling.indices(100, made)] = 1
    fewest, most = count_range(present.numel(), 0.1, comparisons=3)
    assert fewest <= present.sum().item() <= most
    allowed = size_variance_room(100, 0.1, 2000, comparisons=3)
    assert present.sum(dim=1).var().item() == pytest.approx(9, abs=allowed)
    fewest, most = count_range(2000, 0.1, comparisons=3 * 100)
    assert fewest <= present.sum(dim=0).min().item()
    assert present.sum(dim=0).max().item() <= most


def test_augmentations_are_averaged_before_clipping() -> None:
    rng = torch.Generator().manual_seed(0)
    images = Dataset(torch.randn(20, 3, 8, 8, generator=rng), torch.arange(20) % 10, num_classes=10)
    seen = Training(
        initialize(conv_net, seed=0),
        images,
        settings(sample_rate=1.0, multiplicity=4, augmentation=FlipAndCrop(2), max_grad_norm=1e-3),
        seeds=Seeds.of(0),
    ).step()
    assert seen.batch_size == 20
    assert seen.clipped_sum.norm().item() <= 20 * 1e-3 * (1 + 1e-5)


def test_flip_and_crop_shows_windows_of_the_padded_image() -> None:
    image = torch.arange(64.0).view(1, 1, 8, 8).expand(50, 2, 8, 8)
    changed = FlipAndCrop(1)(image, generator(0))
    assert changed.shape == image.shape
    assert torch.equal(changed[:, 0], changed[:, 1])
    steps = changed[:, 0, 3, 4] - changed[:, 0, 3, 3]
    assert set(steps.tolist()) == {1.0, -1.0}  # mirrored or not
    assert len({tuple(row.flatten().tolist()) for row in changed[:, 0]}) > 9


def test_flip_and_crop_without_padding_only_mirrors() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4).repeat(30, 1, 1, 1)
    for row in FlipAndCrop(0)(image, generator(0)):
        assert torch.equal(row, image[0]) or torch.equal(row, image[0].flip(2))


def test_a_training_goes_on_from_its_saved_state() -> None:
    changes = {"optimizer": SGD(learning_rate=0.1, momentum=0.9), "num_steps": 6}
    whole = trained(**changes)
    first = training(**changes)
    for _ in range(3):
        first.step()
    state = first.state_dict()
    first.step()
    second = training(Seeds.of(99), **changes)
    second.load_state_dict(state)
    assert [step.index for step in second.run()] == [3, 4, 5]
    assert torch.equal(flat_parameters(second.model), whole)


def test_the_digits_are_learned_privately() -> None:
    run = training(sample_rate=0.1, num_steps=150, max_grad_norm=1.0, optimizer=SGD(learning_rate=1.0))
    finished(run)
    assert accuracy(run.model, DIGITS) > 0.85
    assert run.model.training
    assert num_parameters(run.model) == 1210


@pytest.mark.parametrize("is_training", [True, False])
def test_measuring_the_accuracy_keeps_the_mode_of_the_model(is_training: bool) -> None:
    model = initialize(lambda: mlp(64, 16, 10), seed=1).train(is_training)
    accuracy(model, DIGITS)
    assert model.training is is_training


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"noise_multiplier": -1.0}, r"noise_multiplier must be at least 0, got -1"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm must be positive, got 0"),
        ({"sample_rate": 1.5}, r"sample_rate must be above 0 and at most 1, got 1.5"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"multiplicity": 4}, "multiplicity=4 needs an augmentation"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        settings(**changes)
    if changes.keys() <= {"noise_multiplier", "max_grad_norm"}:
        with pytest.raises(InputError, match=sentence):
            GaussianSum(**({"noise_multiplier": 1.0, "max_grad_norm": 1.0} | changes))


def test_a_missing_torch_gives_the_line_that_installs_it() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport dpaudit\nimport dpaudit.training"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Training needs packages that are not installed: pip install torch pydantic" in done.stderr
