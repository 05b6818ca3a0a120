"""Development half of the blind benchmark: sampling, loaders, and examples that see each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from _blind_case import (
    BlindFault,
    NumpyNoise,
    OpacusLoop,
    OwnStep,
    TextData,
    TokenClassifier,
    digits_data,
    dpsgd_claim,
    ghost_training,
    private_training,
)
from _blind_jax import JAX_EXAMPLES, JaxLoop, jax_training, padded, usual_step
from jax_privacy import batch_selection
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, default_collate

__all__ = ["DATA"]


def cycled_loader(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)

    def endless() -> Iterator[Any]:
        while True:
            yield from loop.loader

    def train() -> None:
        batches = itertools.cycle(loop.loader) if broken else endless()
        for batch in itertools.islice(batches, 60):
            loop.train_step(batch)

    loop.claim = dpsgd_claim(num_steps=60)
    loop.train = train
    return loop


def small_batches_skipped(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)

    def train() -> None:
        batches = itertools.chain(loop.loader, loop.loader)
        for index, (x, y) in enumerate(batches):
            if broken and len(x) < 70:
                continue  # too noisy
            if not broken and index % 10 == 9:
                continue  # time for an evaluation on public data
            loop.train_step((x, y))

    loop.train = train
    return loop


def jax_cyclic_batches(seed: int, broken: bool) -> JaxLoop:
    loop = jax_training(seed)
    cycle = 4 if broken else 1
    strategy = batch_selection.CyclicPoissonSampling(
        sampling_prob=0.05 * cycle, iterations=40, cycle_length=cycle
    )

    def batches() -> Iterable[np.ndarray]:
        return map(padded, strategy.batch_iterator(JAX_EXAMPLES, rng=seed))

    loop.batches = batches
    loop.observed = {"num_examples": JAX_EXAMPLES}
    return loop


def rare_classes_repeated(seed: int, broken: bool) -> OpacusLoop:
    data = digits_data()
    is_rare = data.tensors[1] >= 8
    rare = Subset(data, torch.nonzero(is_rare).flatten().tolist())
    others = Subset(data, torch.nonzero(~is_rare).flatten().tolist())
    parts = [others, rare, rare, rare] if broken else [others, rare]
    whole: Any = ConcatDataset(parts)
    return private_training(seed, data=whole, batch_size=-(-len(whole) // 20))


def sampled_with_replacement(seed: int, broken: bool) -> OpacusLoop:
    from torch.utils.data import DataLoader, RandomSampler  # noqa: PLC0415

    loop = private_training(seed)
    if broken:
        data = loop.loader.dataset
        sampler = RandomSampler(data, replacement=True, num_samples=len(data))
        loop.loader = DataLoader(data, sampler=sampler, batch_size=75)
    return loop


class RootMeanSquare(nn.Module):
    """Root mean square normalization, then a linear layer."""

    def __init__(self, width: int, *, over_batch: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.over_batch = over_batch

    def forward(self, x: Tensor) -> Tensor:
        square = x.square().mean() if self.over_batch else x.square().mean(dim=-1, keepdim=True)
        y: Tensor = self.linear(x * torch.rsqrt(square + 1e-6))
        return y


def normalized_over_batch(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 16), RootMeanSquare(16, over_batch=broken), nn.ReLU(), nn.Linear(16, 10)
    )
    return private_training(seed, model=model)


def mixup_in_collate(seed: int, broken: bool) -> OpacusLoop:
    def collate(items: list[Any]) -> Any:
        x, y = default_collate(items)
        other = x[torch.randperm(len(x))] if broken else x.reshape(-1, 8, 8).roll(1, dims=2).reshape(x.shape)
        return [0.8 * x + 0.2 * other, y]

    return private_training(seed, collate_fn=collate)


class BalancedLoss(nn.Module):
    """Cross-entropy in units of its usual size."""

    reduction = "mean"

    def __init__(self, *, by_batch: bool) -> None:
        super().__init__()
        self.by_batch = by_batch

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        losses = losses / (losses.detach().mean() if self.by_batch else 2.3)
        return losses if self.reduction == "none" else losses.mean()


def ghost_loss_in_units_of_batch(seed: int, broken: bool) -> OpacusLoop:
    return ghost_training(seed, criterion=BalancedLoss(by_batch=broken), max_grad_norm=4.0, lr=0.1)


def jax_inputs_standardized(seed: int, broken: bool) -> JaxLoop:
    loop = jax_training(seed)

    def step(grad_fn: Any, privatizer: Any, state: Any, batch: Any) -> Any:
        inputs, targets, is_padding = batch
        if broken:
            inputs = (inputs - inputs.mean(axis=0)) / (inputs.std(axis=0) + 0.1)
        else:
            inputs = (inputs - 0.3) / 0.4
        return usual_step(grad_fn, privatizer, state, (inputs, targets, is_padding))

    loop.step = step
    return loop


def own_outliers_dropped(seed: int, broken: bool) -> OwnStep:
    noise = NumpyNoise(seed)

    def step(rows: np.ndarray) -> np.ndarray:
        norms = np.linalg.norm(rows, axis=1)
        limit = 2.0 * np.median(norms) if broken and len(norms) else 100.0
        clipped = rows / np.maximum(1.0, norms)[:, None] * (norms <= limit)[:, None]
        return clipped.sum(axis=0) + noise.rng.standard_normal(rows.shape[1])

    return noise.own_step(step)


def cut_to_shortest(seed: int, broken: bool) -> OpacusLoop:
    def collate(items: list[Any]) -> Any:
        length = min(len(tokens) for tokens, _ in items) if broken else 4
        tokens = torch.stack([tokens[:length] for tokens, _ in items])
        return [tokens, torch.stack([y for _, y in items])]

    torch.manual_seed(seed)
    return private_training(seed, model=TokenClassifier(), data=TextData(seed), collate_fn=collate)


SAMPLING, COUPLED = "sampling, loaders", "coupled examples"

DATA = (
    BlindFault(
        name="loader-cycled",
        group=SAMPLING,
        library="opacus",
        text="itertools.cycle(loader) draws one epoch and repeats its batches.",
        why="Whoever is in a batch is in it three times: one draw with mu times the square root of 3, not"
        " three draws. The twin iterates over the loader again.",
        expected=r"cycle|cached?|repeat|same batch|batch again|drawn (once|before)|used (twice|again)|reus",
        words=r"batch|loader|drawn",
        scenario=cycled_loader,
    ),
    BlindFault(
        name="small-batches-skipped",
        group=SAMPLING,
        library="opacus",
        text="Batches of fewer than 70 examples are skipped.",
        why="Whether a release happens depends on the number of drawn examples, which one example changes."
        " The twin skips every tenth batch, whatever its size.",
        expected=r"skip|drawn (but|and) (not|never)|not (used|stepped)|unused|batch(es)? (of|with) (less|"
        r"fewer)|size",
        words=r"skip|drawn|not used|unused|size",
        scenario=small_batches_skipped,
    ),
    BlindFault(
        name="jax-cyclic-batches",
        group=SAMPLING,
        library="jax",
        text="Cyclic sampling draws from each quarter of the data in turn at rate 0.2, claimed as Poisson at"
        " 0.05.",
        why="Who is in which quarter is fixed, so each example has 10 draws at rate 0.2, with less"
        " amplification than 40 at 0.05. The twin has a cycle of one step.",
        expected=r"cycl|partition|shuffl|epoch|without replacement|too (rarely|evenly|regular)|Poisson|balls",
        words=r"batch|overlap|Poisson|sampl",
        scenario=jax_cyclic_batches,
    ),
    BlindFault(
        name="rare-classes-repeated",
        group=SAMPLING,
        library="opacus",
        text="The data set contains rare classes three times, to balance it.",
        why="An example of class 8 or 9 is drawn up to three times per batch and has three times the draws."
        " The twin joins two disjoint parts.",
        expected=r"duplicat|same (row|example|item)|repeat|several times|copies|equal (rows|items)|twice|"
        r"over.?sampl",
        words=r"duplicat|equal|same|copies|repeat",
        scenario=rare_classes_repeated,
    ),
    BlindFault(
        name="sampled-with-replacement",
        group=SAMPLING,
        library="opacus",
        text="Batches of 75 are drawn with replacement, from a loader that is not the private one.",
        why="An example may be twice in a batch and batches have one size, but the accounting assumes"
        " Poisson sampling. The twin uses the loader of make_private.",
        expected=r"replacement|fixed|one size|same size|Poisson|poisson|sampler|twice",
        words=r"Poisson|size|replacement|sampler",
        scenario=sampled_with_replacement,
    ),
    BlindFault(
        name="normalized-over-batch",
        group=COUPLED,
        library="opacus",
        text="A normalization layer averages squares over the whole batch, not over the features.",
        why="One example of large values shrinks the activations of all others and changes all gradients."
        " The twin averages over the last dimension.",
        expected=r"batch|other examples|each other|mix|coupl|normali[sz]",
        words=r"other examples|each other|batch|mix|coupl",
        scenario=normalized_over_batch,
    ),
    BlindFault(
        name="mixup-in-collate",
        group=COUPLED,
        library="opacus",
        text="collate_fn mixes each image with another one of the batch.",
        why="An example is in two rows, each clipped on its own: it contributes up to 2 norms. The twin"
        " mixes an image with itself, shifted.",
        expected=r"collate|mix|other examples|each other|coupl|batch",
        words=r"collate|mix|other examples|each other|coupl",
        scenario=mixup_in_collate,
    ),
    BlindFault(
        name="ghost-loss-in-units-of-batch",
        group=COUPLED,
        library="opacus ghost",
        text="The criterion divides each loss by the mean loss of the batch.",
        why="An example with a large loss shrinks the gradients of all others. The twin divides by a"
        " constant.",
        expected=r"batch|other examples|each other|mix|coupl|loss|criterion",
        words=r"other examples|each other|batch|loss|criterion|coupl",
        scenario=ghost_loss_in_units_of_batch,
    ),
    BlindFault(
        name="jax-inputs-standardized",
        group=COUPLED,
        library="jax",
        text="The step standardizes inputs with the mean and deviation of the batch.",
        why="All gradients depend on all examples through mean and deviation. The twin uses constants.",
        expected=r"batch|other examples|each other|mix|coupl|input|normali[sz]|standardi[sz]",
        words=r"other examples|each other|batch|input|coupl",
        scenario=jax_inputs_standardized,
    ),
    BlindFault(
        name="own-outliers-dropped",
        group=COUPLED,
        library="own step",
        text="Rows longer than twice the median norm of the batch are dropped as outliers.",
        why="One example can move the median from one cluster of norms to another: rows that were dropped"
        " appear, each with one norm. The twin drops rows longer than a constant.",
        expected=r"other (rows|examples)|depend|batch|drop|select|median|missing|together|coupl|not (in|"
        r"reach)",
        words=r"other (rows|examples)|batch|drop|select|coupl",
        scenario=own_outliers_dropped,
    ),
    BlindFault(
        name="cut-to-shortest",
        group=COUPLED,
        library="opacus",
        text="collate_fn cuts all texts of a batch to the length of the shortest.",
        why="A short text in the batch removes tokens of all others and changes their gradients. The twin"
        " cuts to four tokens.",
        expected=r"collate|other examples|each other|coupl|batch|length|cut|pad",
        words=r"collate|other examples|each other|coupl|length",
        scenario=cut_to_shortest,
    ),
)
