"""Held-out half of the blind benchmark, for measurement only: do not open it while you work on checks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import torch
from _blind_case import (
    BlindFault,
    OpacusLoop,
    OwnStep,
    TextData,
    TorchNoise,
    digits_data,
    ghost_training,
    private_training,
)
from _blind_jax import CAPACITY, JAX_BATCH, JAX_EXAMPLES, JaxLoop, jax_training, padded
from jax_privacy import clipped_grad
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, default_collate

__all__ = ["HIDDEN_DATA"]


def batches_cut(seed: int, broken: bool) -> OpacusLoop:
    def collate(items: list[Any]) -> Any:
        return default_collate(items[:70] if broken else items)

    loop = private_training(seed, collate_fn=collate)

    def in_parts() -> None:
        for _ in range(2):
            with BatchMemoryManager(
                data_loader=loop.loader, max_physical_batch_size=40, optimizer=loop.optimizer
            ) as parts:
                for batch in parts:
                    loop.train_step(batch)

    loop.train = None if broken else in_parts
    return loop


class ClassRates(Sampler[list[int]]):
    """Draws each example with the rate of its class."""

    def __init__(self, targets: Tensor, rates: Tensor) -> None:
        self.rates = rates[targets]

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield torch.nonzero(torch.rand(len(self.rates)) < self.rates).flatten().tolist()


def rates_of_classes(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)
    data = digits_data()
    rates = torch.full((10,), 0.05)
    if broken:
        rates[8:] = 0.15
    loop.loader = DataLoader(data, batch_sampler=ClassRates(data.tensors[1], rates))
    return loop


def batches_echoed(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)

    def train() -> None:
        for _ in range(1 if broken else 2):
            for batch in loop.loader:
                for _ in range(2 if broken else 1):
                    loop.train_step(batch)

    loop.train = train
    return loop


def jax_rows_repeated(seed: int, broken: bool) -> JaxLoop:
    loop = jax_training(seed)

    def batches() -> Iterable[np.ndarray]:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            chosen = np.flatnonzero(rng.random(JAX_EXAMPLES) < 0.05)
            yield np.resize(chosen, CAPACITY) if broken else padded(chosen)

    loop.batches = batches
    loop.observed = {"num_examples": JAX_EXAMPLES}
    return loop


def three_draws_per_release(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)

    def parts() -> Iterator[list[Any]]:
        if not broken:
            for x, y in itertools.chain(loop.loader, loop.loader):
                yield list(zip(x.tensor_split(3), y.tensor_split(3), strict=True))
            return
        batches = itertools.chain.from_iterable(loop.loader for _ in range(6))
        while group := list(itertools.islice(batches, 3)):
            yield group

    def train() -> None:
        for group in parts():
            for index, batch in enumerate(group):
                loop.optimizer.signal_skip_step(do_skip=index < len(group) - 1)
                loop.train_step(batch)

    loop.train = train
    return loop


class PooledText(nn.Module):
    """The mean of the embeddings of a text, and a linear layer; token 0 is padding."""

    def __init__(self, *, over_padding: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8, padding_idx=0)
        self.head = nn.Linear(8, 4)
        self.over_padding = over_padding

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        is_token = (tokens > 0).unsqueeze(-1).float()
        if self.over_padding:
            pooled = (embedded * is_token).mean(dim=1)
        else:
            pooled = (embedded * is_token).sum(dim=1) / is_token.sum(dim=1).clamp(min=1.0)
        logits: Tensor = self.head(pooled)
        return logits


def pooled_over_padding(seed: int, broken: bool) -> OpacusLoop:
    def collate(items: list[Any]) -> Any:
        texts = [tokens + 1 for tokens, _ in items]
        return [
            nn.utils.rnn.pad_sequence(texts, batch_first=True),
            torch.stack([y for _, y in items]),
        ]

    torch.manual_seed(seed)
    return private_training(
        seed, model=PooledText(over_padding=broken), data=TextData(seed), collate_fn=collate, lr=2.0
    )


def negatives_of_batch(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)
    generator = torch.Generator().manual_seed(5)
    public = torch.randn(60, 10, generator=generator), torch.arange(60) % 10

    def step(batch: Any) -> None:
        x, y = batch
        loop.optimizer.zero_grad()
        features = loop.model(x)
        anchors, labels = (features.detach(), y) if broken else public
        similar = nn.functional.normalize(features, dim=1) @ nn.functional.normalize(anchors, dim=1).T
        log_share = (5 * similar).log_softmax(dim=1)
        same = (y[:, None] == labels[None, :]).float()
        losses = -(log_share * same).sum(dim=1) / same.sum(dim=1).clamp(min=1.0)
        losses.mean().backward()
        loop.optimizer.step()

    loop.step = step
    return loop


def gradients_centered(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)

    def step(batch: Any) -> None:
        x, y = batch
        loop.optimizer.zero_grad()
        loop.criterion(loop.model(x), y).backward()
        for p in loop.model.parameters():
            if p.dim() > 1:  # gradient centralization
                p.grad_sample = p.grad_sample - p.grad_sample.mean(dim=0 if broken else -1, keepdim=True)
        loop.optimizer.step()

    loop.step = step
    return loop


class SelfPaced(nn.Module):
    """Cross-entropy of easy examples only."""

    reduction = "mean"

    def __init__(self, limit: float | None) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        limit = losses.detach().median() if self.limit is None else self.limit
        losses = losses * (losses.detach() <= limit)
        return losses if self.reduction == "none" else losses.mean()


def ghost_easy_half(seed: int, broken: bool) -> OpacusLoop:
    return ghost_training(seed, criterion=SelfPaced(None if broken else 2.3))


def jax_prior_of_batch(seed: int, broken: bool) -> JaxLoop:
    def loss(params: Any, inputs: Any, targets: Any, log_prior: Any) -> Any:
        logits = jnp.tanh(inputs @ params["first"]) @ params["second"] + log_prior
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loop = jax_training(seed)
    loop.grad_fn = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=JAX_BATCH, batch_argnums=(1, 2))

    def step(grad_fn: Any, privatizer: Any, state: Any, batch: Any) -> Any:
        params, noise_state = state
        inputs, targets, is_padding = batch
        counts = jnp.zeros(10).at[targets].add(~is_padding) + 1.0
        prior = counts / counts.sum() if broken else jnp.linspace(0.05, 0.15, 10)
        gradient = grad_fn(params, inputs, targets, jnp.log(prior), is_padding_example=is_padding)
        noisy, noise_state = privatizer.update(gradient, noise_state)
        return optax.apply_updates(params, optax.tree.scale(-0.5, noisy)), noise_state

    loop.step = step
    return loop


def own_baseline_of_rows(seed: int, broken: bool) -> OwnStep:
    noise = TorchNoise(seed)

    def step(rows: Tensor) -> Tensor:
        baseline = rows.mean(dim=0) if broken and len(rows) else torch.full((rows.shape[1],), 1e-4)
        centered = rows - baseline
        clipped = centered / centered.norm(dim=1, keepdim=True).clamp(min=1.0)
        return clipped.sum(dim=0) + torch.randn(rows.shape[1], generator=noise.generator)

    return noise.own_step(step)


SAMPLING, COUPLED = "sampling, loaders", "coupled examples"
SEEN = r"other (examples|rows)|each other|coupl|batch"

HIDDEN_DATA = (
    BlindFault(
        name="batches-cut",
        group=SAMPLING,
        library="opacus",
        text="collate_fn drops all examples after the 70th of a batch.",
        why="Removing an example lets another one in: the sum moves by two norms. The twin splits large"
        " batches with BatchMemoryManager.",
        expected=r"collate|drop|cut|truncat|fewer|missing|not used|cap|limit|size",
        words=r"collate|drop|fewer|rows|size|not used",
        scenario=batches_cut,
    ),
    BlindFault(
        name="rates-of-classes",
        group=SAMPLING,
        library="opacus",
        text="A sampler draws rare classes at a rate of 0.15 instead of 0.05.",
        why="Examples of these classes have 3 times the claimed rate. The twin draws all classes at 0.05.",
        expected=r"weight|class|rate|more often|unequal|some examples|imbalanc",
        words=r"rate|often|weight",
        scenario=rates_of_classes,
    ),
    BlindFault(
        name="batches-echoed",
        group=SAMPLING,
        library="opacus",
        text="Each batch is used for two steps (data echoing), which are accounted for as two draws.",
        why="An example is in both steps or in neither: one draw with mu times the square root of 2. The"
        " twin draws for each step.",
        expected=r"twice|again|repeat|reus|echo|same batch|several steps|no drawn|not drawn",
        words=r"twice|again|repeat|reus|drawn",
        scenario=batches_echoed,
    ),
    BlindFault(
        name="jax-rows-repeated",
        group=SAMPLING,
        library="jax",
        text="Batches are filled to one shape by repeating their rows instead of by marked padding.",
        why="Each example is in the batch two or three times, with as many norms. The twin marks padding.",
        expected=r"repeat|duplicat|padding|twice|several times|same (row|example)|with replacement",
        words=r"repeat|duplicat|padding|size",
        scenario=jax_rows_repeated,
    ),
    BlindFault(
        name="three-draws-per-release",
        group=SAMPLING,
        library="opacus",
        text="Three batches of the loader are accumulated per release, and the rate of one is claimed.",
        why="An example is in a release with a probability of 14 %, up to three times. The twin splits one"
        " drawn batch into three parts.",
        expected=r"accumul|three|3 (batches|draws)|several batches|rate|more often|times the claim|skip",
        words=r"accumul|batches|rate",
        scenario=three_draws_per_release,
    ),
    BlindFault(
        name="pooled-over-padding",
        group=COUPLED,
        library="opacus",
        text="Embeddings are averaged over the padded length, that of the longest text of the batch.",
        why="A long text in the batch shrinks the features of all others. The twin divides by the length of"
        " the text.",
        expected=SEEN + r"|pad|length|collate",
        words=SEEN + r"|pad|length|collate",
        scenario=pooled_over_padding,
    ),
    BlindFault(
        name="negatives-of-batch",
        group=COUPLED,
        library="opacus",
        text="A contrastive loss compares each example with the others of the batch.",
        why="Every gradient depends on the features of all examples. The twin compares with fixed public"
        " anchors.",
        expected=SEEN + r"|loss|contrast",
        words=SEEN + r"|loss|contrast",
        scenario=negatives_of_batch,
    ),
    BlindFault(
        name="gradients-centered",
        group=COUPLED,
        library="opacus",
        text="Before clipping, the mean gradient of the batch is subtracted from each gradient.",
        why="One example changes the mean and so all rows. The twin subtracts the mean of the entries of the"
        " same gradient.",
        expected=r"mean gradient|grad_sample|subtract|center|gradients? .*changed before clipping",
        words=SEEN + r"|mean|grad_sample",
        scenario=gradients_centered,
    ),
    BlindFault(
        name="ghost-easy-half",
        group=COUPLED,
        library="opacus ghost",
        text="The criterion uses only examples whose loss is below the median of the batch.",
        why="One example moves the median and lets another one in or out. The twin has a fixed limit.",
        expected=SEEN + r"|loss|criterion|median",
        words=SEEN + r"|loss|criterion|median",
        scenario=ghost_easy_half,
    ),
    BlindFault(
        name="jax-prior-of-batch",
        group=COUPLED,
        library="jax",
        text="Logits are adjusted by the class frequencies of the batch.",
        why="The label of one example changes all gradients. The twin has fixed frequencies.",
        expected=SEEN + r"|label|prior|frequenc|argument",
        words=SEEN + r"|label|prior|argument",
        scenario=jax_prior_of_batch,
    ),
    BlindFault(
        name="own-baseline-of-rows",
        group=COUPLED,
        library="own step",
        text="The mean row is subtracted from all rows before clipping.",
        why="A long row moves the mean and so all other rows. The twin subtracts a constant.",
        expected=r"subtract|mean (row|of)|center|baseline|rows? (is|are) changed|whole batch|other rows",
        words=SEEN + r"|mean",
        scenario=own_baseline_of_rows,
    ),
)
