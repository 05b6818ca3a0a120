"""All findings that dpaudit can have: what each tests, why it matters, what to ask, and what explains it.

A test names its finding, and everything that depends on the name is declared here, once. The order of
findings, their likely causes and the page ``docs/findings.md`` are made from these declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from dpaudit.diagnostics._facts import PREPARED, REPLAYED, UPDATED

Topic = Literal["noise", "clipping", "batches", "updates", "replay", "settings"]
_ADVICE: Mapping[Topic, str] = {
    "noise": "Draw fresh Gaussian noise of the claimed standard deviation for every coordinate and step.",
    "clipping": "Clip the whole gradient of each example to the claimed norm, and sum nothing else.",
    "batches": "Draw batches by Poisson sampling at the claimed rate, or account for your sampling.",
    "updates": "Change weights by the private update alone, and compute it from its noisy release.",
    "replay": "Compute everything that a step publishes or keeps from its noisy release alone.",
    "settings": "Change the setting before you train, or claim what the setting provides.",
}


@dataclass(frozen=True, kw_only=True)
class FindingKind:
    """What a finding means, whatever training run has it."""

    name: str
    topic: Topic
    tests: str
    """What is tested."""
    matters: str
    """Why it matters."""
    question: str = ""
    """The likely cause, as a question to the developer; empty if it depends on the amount of noise."""
    decided_by: str = ""
    """The call that decides a fact that a correct run may have, which is then *to check*."""
    rank: float = 1000.0
    """The place among findings of equal certainty: causes come before their consequences."""
    groups: frozenset[str] = frozenset()
    """Words for what it has in common with others: ``located`` (where noise is missing or repeated),
    ``shared`` (noise used twice), ``tails`` and ``sampling``."""
    follows: frozenset[str] = frozenset()
    """Names or groups of findings that explain it, even if they are less certain."""
    may_follow: frozenset[str] = frozenset()
    """Names or groups of findings that explain it if they are more certain."""
    explains: frozenset[str] = frozenset()
    """Names or groups of findings that follow from it if its test names the cause itself."""

    @property
    def advice(self) -> str:
        """What to do, in one sentence."""
        return _ADVICE[self.topic]

    @property
    def verdict(self) -> str:
        """What it means for the verdict if it is to check, in one sentence; empty for all others."""
        if not self.decided_by:
            return ""
        return f"To check: a correct run may have it, so it is no violation; {self.decided_by} decides."

    def is_among(self, names: Iterable[str]) -> bool:
        """Return whether one of these names or groups is its own."""
        return any(name == self.name or name in self.groups for name in names)


def _declared(topic: Topic, name: str, *texts: str, **names: str) -> FindingKind:
    """Return a finding: what it tests, why it matters, its question, and what decides it if it is to check.

    ``names`` are its groups, and names or groups of other findings.
    """
    sentences: dict[str, Any] = dict(zip(("tests", "matters", "question", "decided_by"), texts, strict=False))
    words: dict[str, Any] = {field: frozenset(text.split()) for field, text in names.items()}
    return FindingKind(name=name, topic=topic, **sentences, **words)


_noise, _clipping, _batches = (partial(_declared, topic) for topic in ("noise", "clipping", "batches"))

# Among findings of equal certainty, causes come before their consequences.
_IN_ORDER = (
    _noise(
        "repeated-noise",
        "whether two steps have the same noise, or a multiple of it",
        "The difference of two releases with the same noise has none.",
        "is the generator reseeded during training, with a constant or one of a few seeds?",
        groups="located shared",
        may_follow="low-rank-noise",
    ),
    _noise(
        "leaf-correlation",
        "whether two parameter tensors have the same noise",
        "The difference of two parameters with the same noise has none.",
        "does every parameter get the same PRNG key or seed?",
        groups="shared",
    ),
    _noise(
        "noise-by-batch",
        "whether the amount of noise follows the batch: its size, its sum or its longest gradient",
        "Noise that depends on the data reveals it by its amount.",
        "is the standard deviation of the noise computed from the batch?",
    ),
    _noise(
        "noise-by-sum",
        "whether the release contains a part of this sum or an earlier one besides the sum and the noise",
        "An example then contributes to more than the sum of its own step.",
        "is a sum or gradient left over from another step, or added again after the noise?",
        follows="clipping",
    ),
    _clipping(
        "clipping",
        "whether more of a canary arrives in the release than the clipping norm",
        "The noise is scaled for contributions of at most the clipping norm.",
        "is the whole gradient of each example clipped by its L2 norm, before the sum?",
    ),
    _noise(
        "noise-by-canaries",
        "whether steps without canaries, or with short ones only, have other noise",
        "Noise that depends on gradients reveals them by its amount.",
        "is the noise scaled by the gradients of the batch, such as their largest norm?",
        follows="clipping",
    ),
    _noise(
        "step-correlation",
        "whether the noise of steps up to 16 apart is correlated",
        "Correlated noise cancels partly in differences of releases.",
        "is noise from earlier steps reused, or is the subtracted sum not the one that was released?",
        groups="shared",
        may_follow="low-rank-noise noise-by-sum",
        explains="low-rank-noise common-noise repeated-noise balanced-noise noise-shape shifted-noise "
        "noise-by-batch noise-by-canaries noise-by-sum missing-direction step-noise",
    ),
    _noise(
        "shifted-noise",
        "whether coordinates at an offset share noise, in the same step or in steps up to 16 apart",
        "The difference of coordinates with the same noise has none.",
        "is one stream of random numbers read twice, at different places, or is noise rolled?",
        groups="shared",
        may_follow="low-rank-noise noise-by-sum",
    ),
    _noise(
        "coordinate-correlation",
        "whether coordinates share noise, or its mean is not zero",
        "Noise that coordinates share cancels in their differences.",
        "is noise of a smaller shape broadcast, is its mean nonzero, or is the subtracted sum not the "
        "one that was released?",
        explains="common-noise low-rank-noise noise-by-sum shared",
    ),
    _noise(
        "tied-noise",
        "whether the same numbers recur in the noise, whatever their places and signs",
        "The low bits of a release whose noise is on a lattice reveal the sum.",
        "is the noise drawn in half precision, in fixed point or from a table, or used twice?",
        follows="shared",
    ),
    _noise(
        "tied-pairs",
        "whether pairs of numbers have the same radius or angle again and again",
        "Noise that is computed from few random numbers can be searched for.",
        "is the noise computed from few random numbers, such as uniform numbers of few bits in a Box-"
        "Muller transformation, or a pool of numbers that is scaled or permuted?",
        follows="shared tied-noise",
    ),
    _noise(
        "low-rank-noise",
        "whether the noise of different steps shares directions",
        "In directions that the noise lacks, the release is the sum.",
        "is the noise drawn in a smaller space and then projected to all parameters?",
        may_follow="noise-by-sum shared",
    ),
    _noise(
        "common-noise",
        "whether the noise of all steps has one direction in common",
        "What steps share is not new noise.",
        "do all steps share a part of their noise, or is something else added to the release?",
        follows="coordinate-noise leaf-noise",
        may_follow="low-rank-noise noise-by-sum shared",
    ),
    _noise(
        "coordinate-noise",
        "the coordinate with the least noise",
        "A coordinate that is released without noise reveals a part of the gradient.",
        "are some coordinates, such as a mask or a sparse update, released without noise?",
        groups="located",
        may_follow="low-rank-noise tails",
    ),
    _noise(
        "leaf-noise",
        "the parameter tensor with the least noise",
        "A parameter that is released without noise reveals its gradient.",
        "is a parameter skipped when noise is added, or scaled separately?",
        groups="located",
    ),
    _noise(
        "step-noise",
        "the step with the least noise",
        "A step that is released without noise reveals its sum.",
        "is a step released without noise, such as one with an empty batch, or a micro-step?",
        groups="located",
        may_follow="low-rank-noise noise-by-batch",
    ),
    _noise(
        "balanced-noise",
        "whether sums of the noise are always near zero",
        "The mean of a centered release is the mean of the sum, without any noise.",
        "is the noise centered, as by subtracting its mean, or stratified, as in a Latin hypercube or a "
        "quasi-random sequence?",
        follows="located",
        may_follow="low-rank-noise noise-variance shared",
    ),
    _noise(
        "missing-direction",
        "the noise in the direction of the sum and of earlier releases",
        "In a direction without noise, the release is the sum.",
        "is the noise projected, so that a direction has none, such as that of the sum or of an earlier "
        "release?",
        follows="balanced-noise located low-rank-noise noise-by-batch shared",
        may_follow="noise-variance",
    ),
    _noise(
        "missing-tail",
        "the largest numbers of the noise",
        "Noise that is cut off reveals that some sums are impossible.",
        "is the noise truncated, clamped, or a sum of a few uniform numbers?",
        groups="tails",
        follows="step-noise",
        may_follow="low-rank-noise noise-by-batch noise-by-sum shared tied-noise",
    ),
    _noise(
        "noise-tails",
        "how many numbers of the noise are large",
        "Epsilon is computed for the tails of normal noise.",
        "is the noise truncated, or drawn from another distribution?",
        groups="tails",
        follows="step-noise",
        may_follow="low-rank-noise missing-tail noise-by-batch noise-by-sum shared tied-noise",
    ),
    _noise(
        "noise-shape",
        "whether the noise is normal, by ratios in which all scales cancel",
        "Epsilon is computed for normal noise.",
        "is the noise drawn from another distribution, or truncated?",
        groups="tails",
        may_follow="low-rank-noise missing-tail noise-by-batch noise-by-sum noise-tails shared tied-noise",
    ),
    _noise(
        "constant-norm",
        "whether norms of the noise are always the same",
        "Noise on a sphere reveals that some sums are impossible.",
        "is the noise normalized to a fixed norm, or stratified?",
        may_follow="balanced-noise low-rank-noise shared tails",
    ),
    _noise(
        "noise-variance",
        "the amount of noise over all steps and coordinates",
        "Less noise than claimed makes epsilon larger than claimed.",
    ),
    _batches(
        "participation-counts",
        "how much the number of batches varies that contain an example",
        "Amplification holds for Poisson sampling, in which every draw is independent.",
        "are shuffled epochs or weighted draws accounted for as Poisson sampling?",
        groups="sampling",
    ),
    _batches(
        "batch-overlap",
        "how many examples consecutive batches share",
        "Amplification holds for Poisson sampling, in which every draw is independent.",
        "are shuffled epochs or weighted draws accounted for as Poisson sampling?",
        groups="sampling",
    ),
    _batches(
        "batch-sizes",
        "how much the sizes of batches vary",
        "Amplification holds for Poisson sampling, whose batches vary in size.",
        "are batches of a fixed size accounted for as Poisson sampling?",
        groups="sampling",
    ),
)

_OTHERS = (
    _noise(
        "earlier-noise",
        "whether noise is that of an earlier phase of the same training run",
        "The difference of two releases with the same noise has none.",
        "are random numbers seeded in the same way at the start of each phase, or when training is resumed?",
    ),
    _batches(
        "sample-rate",
        "how often examples are drawn",
        "Examples that are drawn more often than claimed lose more privacy.",
        "does the sampling rate or the data set size differ from the one in the accounting?",
        groups="sampling",
        follows="duplicate-examples",
    ),
    _batches(
        "repeated-batches",
        "whether two batches share too many examples",
        "Batches that repeat are not independent draws.",
        "is the sampler reseeded in every epoch, or is the data never shuffled?",
        explains="sampling",
    ),
    _batches(
        "favoured-example",
        "the example that is in most batches",
        "An example that is drawn more often than claimed loses more privacy.",
        "is an example in the data more than once, or drawn with a larger weight?",
    ),
    _batches(
        "duplicate-examples",
        "whether a batch contains an example several times",
        "Each copy is clipped for itself, so that the example contributes more than the norm.",
        "are examples drawn with replacement, or several batches for one step?",
    ),
    _batches(
        "loader-used",
        "whether steps train on the batches that the loader draws",
        "The accounting describes the batches of that loader; those of another are drawn in another way.",
        "does the loop use another loader, a batch that it keeps, or batches that it forms itself?",
        explains="rows-drawn sampling",
    ),
    _batches(
        "unused-batches",
        "whether each drawn batch has a step, also an empty one",
        "A batch that is left out because of its examples reveals something about them, without noise.",
        "does the loop skip a batch because of its loss, its size or its examples?",
        "the reason in the loop",
    ),
    _clipping(
        "rows-drawn",
        "whether as many rows are clipped as examples were drawn",
        "Rows beyond the drawn examples, or rows left out, are not what the accounting describes.",
        "does the loop bypass the private loss, or clip several rows per example, padding, or a batch again?",
    ),
    _clipping(
        "ghost-norm",
        "whether ghost clipping clips an example by the norm of its gradient",
        "An example whose gradient is longer than its norm contributes more than the clipping norm.",
        "is a weight used outside of its layer, as in a functional call, is a norm sampler registered for "
        "another kind of layer, or does a checkpoint draw other dropout masks?",
    ),
    _clipping(
        "row-gradient",
        "whether the per-example gradients of a batch add up to its gradient",
        "Rows that are not the gradients of examples may mix them; otherwise, only the training suffers.",
        "is a weight used outside of its layer, or a grad sampler registered for another kind of layer?",
        "recorder.replay(train_step)",
    ),
    _clipping(
        "outputs-by-batch",
        "whether outputs of an example change with its place in the batch or the size of the batch",
        "Without another example of its batch, an example then has another gradient.",
        "is a position encoded along the batch, is the batch mixed at random, or is its size an input?",
        "recorder.replay(train_step)",
    ),
    _clipping(
        "sum-norm",
        "whether the sum is longer than its clipped rows allow",
        "The noise is scaled for rows of at most the clipping norm.",
        "are rows added to the sum that are not clipped, or clipped to another norm?",
        follows="clipping",
    ),
    _clipping(
        "sum-rebuilt",
        "whether the sum starts at zero and stays the same between clipping and noise",
        "What is added after clipping, or left from an earlier step, is not clipped.",
        "is the sum of an earlier step kept, or is something added to the sum after clipping?",
    ),
)


FINDINGS: Mapping[str, FindingKind] = MappingProxyType(
    {kind.name: replace(kind, rank=rank) for rank, kind in enumerate(_IN_ORDER)}
    | {kind.name: kind for kind in _OTHERS}
    | {name: _declared("updates", name, *texts) for name, texts in UPDATED.items()}
    | {name: _declared("replay", name, *texts) for name, texts in REPLAYED.items()}
    | {name: _declared("settings", name, *texts) for name, texts in PREPARED.items()}
)


def finding_kinds() -> Mapping[str, FindingKind]:
    """Return all findings that dpaudit can have, by name.

    >>> import dpaudit.diagnostics
    >>> print(dpaudit.diagnostics.finding_kinds()["leaf-correlation"].question)
    does every parameter get the same PRNG key or seed?
    """
    return FINDINGS
