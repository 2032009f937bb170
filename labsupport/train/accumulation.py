"""Gradient accumulation, counted: which samples weigh how much in which update."""

from collections.abc import Sequence
from dataclasses import dataclass

# What a loop does with the micro-batches that are left when an epoch ends within a window.
DROPPED, STEPPED, WEIGHED, LEAKS = "dropped", "stepped", "weighed", "leaks"
ENDS = (DROPPED, STEPPED, WEIGHED, LEAKS)


@dataclass(frozen=True)
class Update:
    """One optimizer step: `sizes` are the samples of each micro-batch in it, `weights` what each sample of that
    micro-batch weighs in the sum of gradients. The first `carried` of them are from the epoch before."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    carried: int = 0

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    @property
    def factor(self) -> float:
        """What SGD makes of it: its step is that of a mean over samples with the learning rate times this."""
        return sum(size * weight for size, weight in zip(self.sizes, self.weights, strict=True))

    @property
    def shares(self) -> tuple[float, ...]:
        """Each weight over that in a mean of all samples of the update: 1 is fair."""
        return tuple(weight * self.samples for weight in self.weights)


@dataclass(frozen=True)
class Epoch:
    """The updates of an epoch, and the samples of each micro-batch that is left when it ends without a step."""

    updates: tuple[Update, ...]
    left: tuple[int, ...] = ()
    leaks: bool = False

    @property
    def lost(self) -> int:
        """Samples that no update ever sees."""
        return 0 if self.leaks and self.updates else sum(self.left)

    def off(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Those that weigh less than their share in a mean over their update, and those that weigh more: (samples,
        share) of each micro-batch."""
        pairs = [pair for each in self.updates for pair in zip(each.sizes, each.shares, strict=True)]
        return [pair for pair in pairs if pair[1] < 1 - 1e-9], [pair for pair in pairs if pair[1] > 1 + 1e-9]


def epoch_of(samples: int, micro_batch: int, window: int, *, end: str = WEIGHED, divided: bool = True) -> Epoch:
    """An epoch in micro-batches whose losses are means, `window` of them to an optimizer step.

    `end` says what becomes of a window that the epoch cuts short: "dropped" (its gradients are cleared), "stepped"
    (each loss was divided by `window` all the same), "weighed" (each loss by its share of the samples in its window,
    which also evens out a smaller last micro-batch), "leaks" (its gradients stay, and are in the first update of the
    next epoch, which begins to count anew: the epoch returned is any but the first). Without `divided` each loss is
    used as it is. Raises ValueError for another `end`, and for numbers below 1.
    """
    if min(samples, micro_batch, window) < 1 or end not in ENDS:
        raise ValueError(
            f"1 or more samples, micro-batches and windows, and one of {', '.join(ENDS)} are expected: got "
            f"samples={samples}, micro_batch={micro_batch}, window={window}, end={end!r}"
        )
    sizes = [micro_batch] * (samples // micro_batch) + [samples % micro_batch] * (samples % micro_batch > 0)
    windows = _cut(sizes, window)
    left = windows.pop() if end in (DROPPED, LEAKS) and len(windows[-1]) < window else ()
    updates = [Update(each, _weights(each, window, end, divided)) for each in windows]
    if end == LEAKS and left and updates:
        first = left + updates[0].sizes
        updates[0] = Update(first, _weights(first, window, end, divided), carried=len(left))
    return Epoch(tuple(updates), left, leaks=end == LEAKS and bool(left))


def _cut(sizes: Sequence[int], window: int) -> list[tuple[int, ...]]:
    return [tuple(sizes[start : start + window]) for start in range(0, len(sizes), window)]


def _weights(sizes: tuple[int, ...], window: int, end: str, divided: bool) -> tuple[float, ...]:
    if divided and end == WEIGHED:
        return (1 / sum(sizes),) * len(sizes)
    return tuple(1 / (size * (window if divided else 1)) for size in sizes)
