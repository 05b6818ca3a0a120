"""Which canaries were present: the check of the coins that decided it, and the identifiers of canaries.

Scores and presence that come from different places are joined by identifiers: a permuted array does not look
wrong, but audits as "no leak".

Fair coins cannot be predicted. :class:`CoinCheck` lets simple predictors bet on the coins of every step: on
the same canaries again, on canaries that are present too often, on exactly half of a step, on repeated steps
or canaries. Each starts with a share of one unit of wealth. Under independent fair coins the total is a
non-negative martingale, so the probability that it ever exceeds 1/p is at most p (Ville 1939), however often
it is checked. Wealth is in bits: its logarithm to base 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from dpaudit._types import ArrayLike, BoolArray, FloatArray, IdArray, IntArray
from dpaudit.errors import InputError

FAIR = "the presence of each canary was decided by an independent fair coin"  # listed as an assumption
_SHARES = 1.0, 1 / 8  # of the steps or canaries that a predictor takes for predictable; others are fair
# All bets together refuse fair coins with a probability below 2 ** -6 for up to 144 coins, and 2 ** -30 from
# 720 on; two of them have limits of their own, below.
_LEAST_BITS, _MOST_BITS, _COINS_PER_BIT = 6.0, 30.0, 24
# Below 1 in 8,000 if hardly any error rate could be refuted in so few steps, or while a run is going on.
_CAUTIOUS_BITS, _FEW_STEPS = 13.0, 5
# Exactly half in every step, as with opposite pairs that each step draws: below 1 in 8,000. Without this, 3
# steps of 4,096 or 6 of 1,024 such canaries passed, and refuted a correct claim in 20 of 20 simulations.
_HALF_BITS = 13.0
# A constant canary with scores far from those of others is enough for a false alarm, by bets on far scores.
_CONSTANT_BITS = 10.0
_AT_ONCE = 64  # steps that are hashed together
_FEW, _LONGEST = 3, 60  # identifiers quoted in one message, and their length


class _Predictor(NamedTuple):
    share: float  # of the initial wealth
    bits: float  # the logarithm of the factor by which the share has grown
    prediction: str


class CoinCheck:
    """Bets against independent fair coins, accumulated over steps.

    >>> check = CoinCheck()
    >>> check.add(np.tile([False, True], (20, 1)))
    >>> check.require_fair()
    Traceback (most recent call last):
    ...
    dpaudit.errors.InputError: An independent fair coin must decide the presence of each canary in each \
step; here: the same canaries in every one of 20 steps...
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_canaries = 0
        self._seen: dict[bytes, int] = {}  # how often each step, or its opposite, was seen
        self._first = self._last = np.zeros(0, np.bool_)
        self._per_canary, self._changes = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._hashes = np.zeros(0, np.uint64)
        self._repeats = 0  # steps that equal the previous one
        self._dictionary = 0.0
        self._halves = np.zeros(2)
        self._steps = np.zeros(len(_SHARES) + 1)
        self._extreme = (0.0, "")

    def add(self, present: BoolArray) -> None:
        """Add the coins of one or more steps, steps x canaries."""
        if not len(present):
            return
        if not self.num_steps:
            self._start(present[0])
        before = np.concatenate([self._last[None], present[:-1]])
        changed = present ^ before
        if not self.num_steps:
            changed = changed[1:]
        self._last = present[-1].copy()
        self._per_canary += np.count_nonzero(present, axis=0)
        self._changes += np.count_nonzero(changed, axis=0)
        self._repeats += int(np.count_nonzero(~changed.any(axis=1)))
        weights = _hash_weights(self.num_steps, len(present))
        for start in range(0, len(present), _AT_ONCE):  # new memory takes more time than arithmetic
            steps = slice(start, start + _AT_ONCE)
            self._hashes += weights[steps] @ (present[steps] ^ self._first).astype(np.uint64)
        self._add_counts(np.count_nonzero(present, axis=1))
        self._look_up(present)
        self.num_steps += len(present)

    def _start(self, first: BoolArray) -> None:
        size = self._num_canaries = first.size
        self._first = self._last = first.copy()
        self._per_canary, self._changes = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._hashes = np.zeros(size, np.uint64)

    def _add_counts(self, counts: IntArray) -> None:
        """Bet on the number of canaries present in each step."""
        size = self._num_canaries
        bits = _frequency_bits(counts, size)
        index = self.num_steps + 1 + np.arange(counts.size)
        for i, share in enumerate(_SHARES):
            self._steps[i] += _mixed(bits, share).sum()
        self._steps[-1] += _mixed(bits, 1 / (index + 1)).sum()  # for a single step
        worst = int(bits.argmax())
        self._extreme = max(self._extreme, (float(bits[worst]), f"{counts[worst]:,} of {size:,}"))
        half = np.abs(2 * counts - size) <= size % 2
        gain = size - size % 2 - _log2_binomial(size, size // 2)
        for i, share in enumerate((1.0, 0.9)):
            self._halves[i] += _mixed(np.where(half, gain, -np.inf), share).sum()

    def _look_up(self, present: BoolArray) -> None:
        """Bet that a step equals an earlier one, or has the other canaries instead."""
        free = self._num_canaries - 1  # coins that are free once the first is given
        packed = np.packbits(present ^ present[:, :1], axis=1)
        for index, row in enumerate(map(bytes, packed), start=self.num_steps):
            times = self._seen.get(row, 0)
            if times:
                self._dictionary += float(np.logaddexp2(free + math.log2(times / index), 0.0))
            self._dictionary -= index > 0
            self._seen[row] = times + 1

    def require_fair(self, *, ask: str = "", is_over: bool = True) -> None:
        """Raise an ``InputError`` if the coins are very unlikely to be fair; ``ask`` says what to do then.

        Before a run is over, this is less likely to happen by chance.
        """
        least = 0.0 if is_over and self.num_steps >= _FEW_STEPS else _CAUTIOUS_BITS
        required = max(_required_bits(self.num_steps * self._num_canaries), least)
        is_constant = self._constant_bits() >= max(_CONSTANT_BITS, least)
        if self.wealth() < required and not is_constant and self._halves[0] < _HALF_BITS:
            return
        best = max(self._predictors(), key=lambda one: math.log2(one.share) + one.bits)
        raise InputError(
            "An independent fair coin must decide the presence of each canary in each step; here: "
            f"{best.prediction}.{ask and ' '}{ask}"
        )

    def wealth(self) -> float:
        """Return the wealth of all predictors, in bits."""
        if not self.num_steps:
            return 0.0
        bits = [math.log2(predictor.share) + predictor.bits for predictor in self._predictors()]
        return float(np.logaddexp2.reduce(bits))

    def _predictors(self) -> Iterator[_Predictor]:
        steps, size = self.num_steps, self._num_canaries
        changes = int(self._changes.sum())
        fixed = (steps - 1) * size  # coins after the first step
        every = f"in every one of {steps:,} steps"
        yield _Predictor(1 / 4, fixed if changes == 0 else -math.inf, f"the same canaries {every}")
        yield _Predictor(1 / 4, fixed if changes == fixed else -math.inf, "the others in every other step")
        columns = _frequency_bits(self._per_canary, steps)
        worst = f"{self._per_canary[columns.argmax()]:,} of {steps:,} present for one canary"
        yield _Predictor(1 / 4, self._constant_bits(), worst)
        yield from _shared(1 / 64, [(_mixed(columns, w).sum(), worst) for w in (*_SHARES, 1 / size)])
        yield _Predictor(1 / 8, self._halves[0], f"exactly half of the canaries {every}")
        yield _Predictor(1 / 64, self._halves[1], "exactly half of the canaries in nearly every step")
        total = int(self._per_canary.sum())
        overall = float(_frequency_bits(np.array([total]), steps * size)[0])
        yield _Predictor(1 / 64, overall, f"{total:,} of {steps * size:,} present overall")
        worst = f"{self._extreme[1]} present in one step"
        yield from _shared(1 / 64, [(bits, worst) for bits in self._steps])
        yield from _shared(1 / 32, [*self._change_bits(changes, fixed)])
        yield _Predictor(1 / 64, self._dictionary, "steps that repeat earlier ones")
        yield _Predictor(1 / 64, self._column_dictionary(), "canaries that share their coins")

    def _constant_bits(self) -> float:
        """Bet that one canary, or each of them with some probability, is always present or always absent."""
        constant = int(np.count_nonzero((self._per_canary == 0) | (self._per_canary == self.num_steps)))
        won, others = self.num_steps - 1, self._num_canaries - constant
        bits = [won + math.log2(constant / self._num_canaries) if constant else -math.inf]
        # shares of the canaries that may be constant
        for share in (1 / 2, 1 / 8, 1 / 32):
            both = constant * np.logaddexp2(math.log2(share) + won, math.log2(1 - share))
            bits.append(float(both) + others * math.log2(1 - share))
        return float(np.logaddexp2.reduce(bits)) - math.log2(len(bits))

    def _change_bits(self, changes: int, number: int) -> Iterator[tuple[float, str]]:
        """Bet that coins stay the same, or change, from one step to the next."""
        steps, size = self.num_steps - 1, self._num_canaries
        text = f"{changes:,} changes of {number:,} from one step to the next"
        yield float(_frequency_bits(np.array([changes]), number)[0]), text
        columns = _frequency_bits(self._changes, steps)
        for share in (1.0, 1 / size):
            yield float(_mixed(columns, share).sum()), "coins of a canary that depend on the step before"
        # a Beta(1, 1) mixture over the probability of a repeated step; other steps are equally likely
        others = (steps - self._repeats) * -math.log2(-math.expm1(-size * math.log(2)))
        repeats = self._repeats * size + others - math.log2(steps + 1)
        repeats -= float(_log2_binomial(steps, self._repeats))
        yield repeats, f"{self._repeats:,} of {steps:,} steps equal to the one before"

    def _column_dictionary(self) -> float:
        """Bet that a canary has the coins of an earlier canary, or their opposites."""
        values, inverse = np.unique(self._hashes, return_inverse=True)
        if values.size == inverse.size:
            return 1.0 - inverse.size
        order = np.argsort(inverse, kind="stable")
        starts = np.flatnonzero(np.diff(inverse[order], prepend=-1))
        times = np.empty(inverse.size, np.int64)  # how many earlier canaries have the same coins
        times[order] = np.arange(inverse.size) - np.repeat(starts, np.diff([*starts, inverse.size]))
        with np.errstate(divide="ignore"):
            likely = self.num_steps - 1 + np.log2(times[1:] / np.arange(1, inverse.size))
        return float((np.logaddexp2(likely, 0.0) - 1).sum())


def require_fair_share(num_present: int, num_canaries: int) -> None:
    """Raise an ``InputError`` if this share of present canaries is very unlikely under fair coins.

    >>> require_fair_share(530, 1000)
    """
    if _frequency_bits(np.array([num_present]), num_canaries)[0] >= _required_bits(num_canaries):
        raise InputError(
            f"An independent fair coin must decide the presence of each canary, but {num_present:,} of "
            f"{num_canaries:,} are present: bounds from guesses would not hold."
        )


def _required_bits(num_coins: int) -> float:
    """Return the wealth, in bits, from which on coins are refused."""
    return min(max(num_coins / _COINS_PER_BIT, _LEAST_BITS), _MOST_BITS)


def _shared(share: float, bets: Sequence[tuple[float, str]]) -> Iterator[_Predictor]:
    """Yield predictors with equal parts of this share."""
    for bits, text in bets:
        yield _Predictor(share / len(bets), float(bits), text)


def _frequency_bits(counts: IntArray, number: int) -> FloatArray:
    """Return the bits won on ``number`` coins each by a uniform frequency, or by one of 0 or 1."""
    spread = number - math.log2(number + 1) - _log2_binomial(number, counts)
    constant = np.where((counts == 0) | (counts == number), max(number - 1.0, 0.0), -np.inf)
    bits: FloatArray = np.logaddexp2(spread, constant) - 1
    return bits


def _mixed(bits: FloatArray, share: float | FloatArray) -> FloatArray:
    """Return the bits won if only this share of the wealth is bet, each time."""
    if isinstance(share, float) and share == 1:
        return bits
    mixed: FloatArray = np.logaddexp2(np.log2(share) + bits, np.log2(1 - share))
    return mixed


def _log2_binomial(number: int, counts: IntArray | int) -> FloatArray:
    chosen = np.asarray(counts)
    nats: FloatArray = gammaln(number + 1) - gammaln(chosen + 1) - gammaln(number - chosen + 1)
    return nats / math.log(2)


def _hash_weights(start: int, count: int) -> npt.NDArray[np.uint64]:
    """Return well-mixed 64-bit numbers (SplitMix64), one per step."""
    # multiples of an odd number, mixed
    mixed = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def as_ids(name: str, ids: ArrayLike, size: int) -> IdArray:
    """Return identifiers, integers or strings, as an array of this size."""
    if isinstance(ids, np.ma.MaskedArray):
        raise InputError(f"{name} must not be a masked array.")
    words: set[bool] = set()
    try:
        array = np.asarray(ids)
        if not isinstance(ids, np.ndarray) or array.dtype == object:  # numpy turns 1 and "a" into "1" and "a"
            words = {isinstance(identifier, str) for identifier in np.asarray(ids, dtype=object).flat}
            array = np.asarray(array.tolist())
    except ValueError:  # rows of different lengths
        raise InputError(f"{name} must be a one-dimensional array of integers or strings.") from None
    if len(words) > 1:
        raise InputError(f"{name} must be all integers or all strings, got both.")
    if array.ndim != 1 or array.dtype.kind not in "iuUS":
        raise InputError(
            f"{name} must be a one-dimensional array of integers or strings, got shape {array.shape} of "
            f"type {array.dtype}."
        )
    if array.size != size:
        raise InputError(f"{name} must have {size:,} identifiers, one per canary, got {array.size:,}.")
    return array


def joined_presence(
    present: ArrayLike, ids: IdArray | None, present_ids: ArrayLike | None, *, paired: bool = False
) -> ArrayLike:
    """Return ``present`` in the order of ``ids``; missing, unknown and duplicate ones raise."""
    if ids is not None and not paired:
        _require_once("ids", ids)
    if present_ids is None:
        return present
    if ids is None or paired:
        raise InputError("present_ids= needs ids=, and cannot be used with paired=True.")
    flags = np.asarray(present)  # checked by the caller
    names = as_ids("present_ids", present_ids, flags.shape[-1] if flags.ndim else 0)
    _require_once("present_ids", names)
    if (names.dtype.kind in "iu") != (ids.dtype.kind in "iu"):
        raise InputError(f"ids and present_ids must have one type, got {ids.dtype} and {names.dtype}.")
    for missing, text in (
        (np.setdiff1d(ids, names), "Every canary with a score needs a presence flag; there is none for"),
        (np.setdiff1d(names, ids), "Every canary with a presence flag needs a score; there is none for"),
    ):
        if missing.size:
            raise InputError(f"{text} {_first(missing)}.")
    order = np.empty(ids.size, np.int64)
    order[np.argsort(ids, kind="stable")] = np.argsort(names, kind="stable")
    return flags[..., order]


def _require_once(name: str, ids: IdArray) -> None:
    values, times = np.unique(ids, return_counts=True)
    if (times > 1).any():
        raise InputError(f"{name} must have each identifier once, got {_first(values[times > 1])} again.")


def _first(ids: IdArray) -> str:
    """Return the first few identifiers, for an error message."""
    more = f" and {ids.size - _FEW:,} more" if ids.size > _FEW else ""
    return ", ".join(repr(identifier)[:_LONGEST] for identifier in ids[:_FEW].tolist()) + more


def require_twice(ids: IdArray) -> None:
    """Require sorted identifiers to come in pairs."""
    values, times = np.unique(ids, return_counts=True)
    if (times != 2).any():
        raise InputError(
            "paired=True needs each identifier twice, for one score with and one without the canary; "
            f"{_first(values[times != 2])} has another number."
        )
