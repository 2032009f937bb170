"""What samples say, and how surely: intervals, paired ratios, the steady part of a run, its stalls. No torch."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Below six samples not even smallest-to-largest covers the median 95 % of the time: 1 - 2 * 0.5**5 is 0.9375.
LEAST_SAMPLES = 6
# A million steps would be drawn 200 times over: gigabytes, if not in parts.
DRAWN_AT_ONCE = 2_000_000


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval that covers the samples' true median with at least this confidence, whatever their distribution.

    Each sample is above the median with probability 1/2, so the order statistics k and n+1-k enclose it except
    with twice the binomial tail below k (the sign test, inverted). It takes the samples for independent. Raises
    ValueError when there are too few.
    """
    if not all(math.isfinite(sample) for sample in samples):
        raise ValueError(f"finite samples are expected, got {list(samples)}")
    n, ordered = len(samples), sorted(samples)
    tail, k = 2 * 0.5**n, 0
    while k < n // 2 and tail <= 1 - confidence:
        k += 1
        tail += 2 * math.comb(n, k) / 2**n
    if not k:
        raise ValueError(f"{n} samples give no {confidence:.0%} interval of the median; 95 % needs at least 6")
    return ordered[k - 1], ordered[n - k]


def block_interval(
    columns: Sequence[Sequence[float]],
    statistic: Callable[..., np.ndarray],
    confidence: float = 0.95,
) -> tuple[float, float]:
    """The percentile interval of a statistic of samples that depend on their neighbours in time.

    `columns` are equally long; `statistic` takes one array of shape (resamples, n) for each and reduces its last
    axis. Blocks of about the cube root of n neighbours are drawn together, around the end to the start (the
    circular block bootstrap: Politis and Romano, 1992; the length: Hall, Horowitz and Jing, 1995). The draws are
    seeded: the same samples give the same interval.
    """
    data = [np.asarray(column, dtype=float) for column in columns]
    n = len(data[0])
    length = max(1, round(n ** (1 / 3)))
    resamples = int(min(2000, max(200, 20_000_000 // n)))
    starts = np.random.default_rng(0).integers(0, n, (resamples, -(-n // length)))
    found = []
    for some in np.array_split(starts, max(1, resamples * n // DRAWN_AT_ONCE)):
        drawn = (some[:, :, None] + np.arange(length)).reshape(len(some), -1)[:, :n] % n
        found.append(statistic(*(column[drawn] for column in data)))
    low, high = np.quantile(np.concatenate(found), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_interval(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval of the median of rounds in time order: the wider end of two kinds.

    The block bootstrap knows that neighbouring rounds are alike, but is too sure of itself when there are few;
    the order statistics are right for few, but take rounds for independent.
    """
    blocks = block_interval([ratios], lambda drawn: np.median(drawn, axis=-1), confidence)
    exact = median_interval(ratios, confidence)
    return min(blocks[0], exact[0]), max(blocks[1], exact[1])


def spread(samples: Sequence[float] | np.ndarray) -> float:
    """Interquartile range over the median."""
    low, middle, high = np.quantile(samples, [0.25, 0.5, 0.75])
    return float((high - low) / middle) if middle else math.inf


@dataclass(frozen=True)
class PairedRatio:
    """The time of A over the time of B, from rounds that measured both, one right after the other.

    What disturbs the machine for longer than a round disturbs both sides, and leaves the round's ratio alone.
    """

    ratios: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.ratios) < LEAST_SAMPLES or not all(0 < ratio < math.inf for ratio in self.ratios):
            raise ValueError(f"at least {LEAST_SAMPLES} rounds with positive ratios are expected, got {self.ratios}")

    @classmethod
    def of(cls, a_s: Sequence[float], b_s: Sequence[float]) -> "PairedRatio":
        """From the seconds of A and of B in each round. Raises ValueError for unequal numbers of rounds, or none."""
        if len(a_s) != len(b_s) or min([*a_s, *b_s], default=0) < 0:
            raise ValueError(f"each round has seconds of A and of B: got {list(a_s)} and {list(b_s)}")
        return cls(tuple(a / b if b else math.inf for a, b in zip(a_s, b_s, strict=True)))

    @property
    def value(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """A 95 % interval of that median."""
        return median_interval(self.ratios)

    @property
    def n(self) -> int:
        return len(self.ratios)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return (high - low) / self.value

    @property
    def unit(self) -> str:
        return "x"


def throughput(samples: Sequence[float], seconds: Sequence[float]) -> float:
    """Samples per second of a run: all samples over all the time, each step with its own size and its own duration.

    The mean of the steps' rates is another number, for steps of one size never the smaller one: a slow step is one
    bad rate among many there, and much time here. Raises ValueError for columns of unequal length, negative numbers,
    or no time.
    """
    sound = all(0 <= each < math.inf for each in (*samples, *seconds))
    if len(samples) != len(seconds) or not sound or not sum(seconds) > 0:
        raise ValueError(f"a number of samples and seconds a step are expected: got {samples} and {seconds}")
    return sum(samples) / sum(seconds)


@dataclass(frozen=True)
class Warmup:
    """The first `dropped` samples are not like the rest; `reason` says how they differ. `steady` is False where
    no steady part was found: the later samples still drift."""

    dropped: int
    reason: str
    steady: bool = True


def find_warmup(samples: Sequence[float], *, window: int = 5, drift: float = 0.05) -> Warmup:
    """How many samples to drop until a run is steady.

    The second half says what steady looks like: within its quartiles, widened by 1.5 interquartile ranges (Tukey's
    fences) and by at least 2 % of the median. The run is steady from the first sample that lies inside, and whose
    `window` following ones have their median inside. It is not steady if that takes more than half of it, or if the
    medians of the two halves of what is left differ by more than `drift` and more than half their spread.
    """
    n = len(samples)
    if n < 2 * window:
        return Warmup(min(1, n), "too few steps to see a warm-up: the first was dropped", steady=n > window)
    data = np.asarray(samples, dtype=float)
    low, middle, high = np.quantile(data[n // 2 :], [0.25, 0.5, 0.75])
    reach = max(1.5 * (high - low), 0.02 * middle)

    def inside(value: float) -> bool:
        return bool(low - reach <= value <= high + reach)

    start = next(
        (i for i in range(n // 2 + 1) if inside(data[i]) and inside(float(np.median(data[i : i + window])))), n // 2
    )
    first = ", ".join(f"{value / middle:.3g}x" for value in data[: min(start, 3)])
    more = ", ..." if start > 3 else ""
    reason = f"took {first}{more} of a steady one" if start else "the first was like the rest"
    kept = data[start:]
    halves = [float(np.median(half)) for half in np.array_split(kept, 2)]
    change = halves[1] / halves[0] - 1 if halves[0] else math.inf
    if abs(change) > max(drift, spread(kept) / 2):
        return Warmup(start, f"{reason}; not steady yet: the last steps took {1 + change:.3g}x of those before", False)
    if start >= n // 2:
        return Warmup(start, f"{reason}; half of the steps were over before it was steady", False)
    return Warmup(start, reason)


@dataclass(frozen=True)
class Stalls:
    """Steps that took far longer than the median one: how many, how often, and what share of all time they cost."""

    steps: tuple[int, ...]  # their places among the samples, from 0; neighbours are one stall
    count: int
    period: float | None  # steps from one to the next, where they come regularly
    share: float  # of the run's time, beyond what as many median steps take
    worst: float  # the longest, over the median

    def __str__(self) -> str:
        some = "1 step stalls" if self.count == 1 else f"{self.count} steps stall"
        every = f"about every {self.period:.3g} steps one stalls" if self.period else some
        return f"{every} (up to {self.worst:.3g}x the median), {self.share:.1%} of the time, and the median hides it"


def find_stalls(samples: Sequence[float]) -> Stalls | None:
    """The stalls of a run, or None.

    A step stalls if it takes 1.5 medians and lies 3 interquartile ranges above the upper quartile; neighbours count
    once. Stalls are periodic if there are four, spread over a quarter of the run, and three in five of the gaps between
    them are within a tenth (or one step) of the median gap.
    """
    data = np.asarray(samples, dtype=float)
    if not len(data):
        return None
    low, middle, high = np.quantile(data, [0.25, 0.5, 0.75])
    slow = np.flatnonzero((data > 1.5 * middle) & (data > high + 3 * (high - low)))
    if not len(slow):
        return None
    events = slow[np.insert(np.diff(slow) > 1, 0, True)]
    gaps = np.diff(events)
    period = float(np.median(gaps)) if len(gaps) >= 3 else 0.0
    spread_out = events[-1] - events[0] >= len(data) / 4  # else it is a burst
    regular = len(gaps) >= 3 and spread_out and np.mean(np.abs(gaps - period) <= max(1.0, period / 10)) >= 0.6
    share = float((data[slow] - middle).sum() / data.sum())
    return Stalls(tuple(map(int, slow)), len(events), period if regular else None, share, float(data.max() / middle))
