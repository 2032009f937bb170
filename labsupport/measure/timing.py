"""Timings that say how sure they are: ratios from interleaved rounds, with an interval that assumes no distribution."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Below six samples not even smallest-to-largest covers the median 95 % of the time: 1 - 2 * 0.5**5 is 0.9375.
LEAST_SAMPLES = 6


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval that covers the samples' true median with at least this confidence, whatever their distribution.

    Each sample is above the median with probability 1/2, so the order statistics k and n+1-k enclose it except
    with twice the binomial tail below k (the sign test, inverted). Raises ValueError when there are too few.
    """
    if not all(math.isfinite(sample) for sample in samples):
        raise ValueError(f"finite samples are expected, got {list(samples)}")
    n, ordered = len(samples), sorted(samples)
    tails = [2 * sum(math.comb(n, i) for i in range(k)) / 2**n for k in range(1, n // 2 + 1)]
    possible = [k for k, tail in enumerate(tails, start=1) if tail <= 1 - confidence]
    if not possible:
        raise ValueError(f"{n} samples give no {confidence:.0%} interval of the median; 95 % needs at least 6")
    return ordered[possible[-1] - 1], ordered[n - possible[-1]]


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
