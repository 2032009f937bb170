"""How the times of two steps compare: a ratio with its interval, and a verdict that may be "cannot tell"."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from labsupport.machine import Machine
from labsupport.measure.measurement import Measurement, warnings_line
from labsupport.measure.statistics import block_interval, paired_interval, spread
from labsupport.measure.stopwatch import check_positive

Verdict = Literal["faster", "slower", "same", "cannot tell"]
Interval = tuple[float, float]
Rounds = Sequence[tuple[float, float]]
# What makes two machines unlike: their times are no measure of a change in the step.
SAME_MACHINE = ("device", "compute_capability", "cpu_model", "isa", "cores", "threads")


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two measurements and how their times compare; `ratio` is the time of A over the time of B.

    `rounds` has the seconds a step of A and of B, in turns that followed each other; it is empty for two
    measurements that were made apart, which is then said wherever the result is printed.
    """

    a: Measurement
    b: Measurement
    rounds: tuple[tuple[float, float], ...]
    margin: float
    seconds: float  # that the whole comparison took; 0 for measurements made apart

    @property
    def interleaved(self) -> bool:
        return bool(self.rounds)

    @property
    def names(self) -> tuple[str, str]:
        return self.a.label, self.b.label

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(a / b for a, b in self.rounds)

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios; of measurements made apart, the ratio of the medians."""
        return float(np.median(self.ratios)) if self.interleaved else self.a.median_s / self.b.median_s

    @property
    def total_ratio(self) -> float:
        """The same for all time spent, in which stalls count."""
        if not self.interleaved:
            return self.b.steps_per_s / self.a.steps_per_s
        a, b = np.sum(self.rounds, axis=0)
        return float(a / b)

    @cached_property
    def interval(self) -> Interval:
        """A 95 % interval of the ratio, by block bootstrap and by order statistics, whichever is wider."""
        if self.interleaved:
            return paired_interval(self.ratios)
        return _quotient(self.a.median_s, self.a.interval, self.b.median_s, self.b.interval)

    @cached_property
    def total_interval(self) -> Interval:
        """A 95 % interval of the total ratio."""
        if self.interleaved:
            return total_interval_of(self.rounds)
        a, b = (block_interval([each.samples_s], lambda x: x.mean(axis=-1)) for each in (self.a, self.b))
        return _quotient(1 / self.a.steps_per_s, a, 1 / self.b.steps_per_s, b)

    @property
    def verdict(self) -> Verdict:
        """What B is: "faster" or "slower" if the interval lies wholly beyond 1 ± margin, "same" if wholly inside,
        else "cannot tell"; that too if the time of all steps together clearly says something else."""
        return judge(self.interval, self.total_interval, self.margin)

    @property
    def n(self) -> int:
        return len(self.rounds) or min(self.a.n, self.b.n)

    @property
    def spread(self) -> float:
        """Interquartile range over the median, of the rounds' ratios or of the quotient of two steps."""
        return spread(self.ratios) if self.interleaved else math.hypot(self.a.spread, self.b.spread)

    @property
    def value(self) -> float:
        """`lab.record` takes a comparison for its ratio."""
        return self.ratio

    @property
    def unit(self) -> str:
        return "x"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the verdict has to know; empty if nothing."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        for each in (self.a, self.b):
            yield from (f"{each.label}: {warning}" for warning in each.warnings)
        typical = verdict_of(self.interval, self.margin)
        if typical != self.verdict:
            total = _text(self.total_ratio, self.total_interval)
            yield f"by the median step B is {typical}, but over all time the ratio is {total}: look at the stalls"
        elif self.interleaved and self.verdict == "cannot tell":
            yield self._advice()
        if not self.interleaved:
            yield "not interleaved: all that changed between the two runs is in the ratio, not only the step"
            yield from (f"between the runs, {change}" for change in _changes(self.a.machine, self.b.machine))

    def _advice(self) -> str:
        width = max(self.interval[1] - self.ratio, self.ratio - self.interval[0])
        # The interval shrinks with the root of the time; a ratio at the margin itself is beyond any time's reach.
        gap = max(abs(abs(self.ratio - 1) - self.margin), 1e-9)
        needed = self.seconds * (width / gap) ** 2
        more = f"max_time_s={needed:.2g} might tell" if needed < 600 else "more time will hardly tell"
        alone = self.a.machine.threads == 1 or self.a.machine.profile != "cpu"
        fewer = "" if alone else " and use one thread (torch.set_num_threads(1))"
        return f"the interval crosses the margin; quieten the machine{fewer}; {more}"

    @property
    def lines(self) -> list[str]:
        """What it says, always in five lines: the verdict, both timings, the warnings, the machine."""
        a, b = self.names
        sentence = {
            "faster": f"{b} is faster than {a}",
            "slower": f"{b} is slower than {a}",
            "same": f"{b} is as fast as {a}",
            "cannot tell": f"cannot tell whether {b} is faster or slower than {a}",
        }[self.verdict]
        how = f"{self.n} rounds in {self.seconds:.1f} s" if self.interleaved else "NOT INTERLEAVED"
        ratio = _text(self.ratio, self.interval)
        return [
            f"{sentence}: time of {a} / time of {b} = {ratio}, margin {self.margin:.1%}, {how}",
            *(each.lines[0] for each in (self.a, self.b)),
            warnings_line(self.warnings),
            self.b.lines[-1],
        ]

    def __str__(self) -> str:
        return "\n  ".join(self.lines)

    def __repr__(self) -> str:
        """For notebooks: each line with the mark of what differs from run to run."""
        return "\n  ".join(f"{line} (measured)" for line in self.lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"application/vnd.labsupport.comparison+json": {"names": list(self.names)}, "text/plain": repr(self)}


def verdict_of(interval: Interval, margin: float) -> Verdict:
    """The verdict of an interval of time A / time B, against 1 ± margin."""
    low, high = interval
    if low > 1 + margin:
        return "faster"
    if high < 1 - margin:
        return "slower"
    return "same" if 1 - margin < low and high < 1 + margin else "cannot tell"


def judge(interval: Interval, total: Interval, margin: float) -> Verdict:
    """The verdict of the median, unless the total's interval lies wholly outside of what it says.

    With one or two stalls in the run the total's interval is too narrow, and with none it cannot object: it guards
    against what happened in the run, not against what might.
    """
    verdict = verdict_of(interval, margin)
    low = {"faster": 1 + margin, "same": 1 - margin}.get(verdict, 0.0)
    high = {"slower": 1 - margin, "same": 1 + margin}.get(verdict, math.inf)
    return verdict if total[1] >= low and total[0] <= high else "cannot tell"


def total_interval_of(rounds: Rounds) -> Interval:
    return block_interval(list(zip(*rounds, strict=True)), lambda a, b: a.sum(axis=-1) / b.sum(axis=-1))


def _quotient(a: float, of_a: Interval, b: float, of_b: Interval) -> Interval:
    """The interval of a quotient of independent quantities: the distances to their ends, as logarithms, add as squares.

    Each side has its own, as times lie skew (MOVER: Zou and Donner, 2008).
    """
    down = math.hypot(math.log(a / of_a[0]), math.log(of_b[1] / b))
    up = math.hypot(math.log(of_a[1] / a), math.log(b / of_b[0]))
    return a / b * math.exp(-down), a / b * math.exp(up)


def _text(ratio: float, interval: Interval) -> str:
    return f"{ratio:.3f}x [{interval[0]:.3f}, {interval[1]:.3f}]"


def compare_apart(before: Measurement, after: Measurement, *, margin: float = 0.05) -> Comparison:
    """Compare two measurements that were made apart, on the same machine: not interleaved, and said so.

    The margin is wide, because what changed on the machine meanwhile is in the ratio and in no interval. Raises
    ValueError for unlike machines, naming what differs.
    """
    check_positive(margin=margin)
    if margin >= 1:
        raise ValueError(f"a margin below 1 is expected, got {margin}")
    unlike = [change for change in _changes(before.machine, after.machine) if change.split(" ")[0] in SAME_MACHINE]
    if unlike:
        raise ValueError(
            f"{before.label!r} and {after.label!r} were measured on unlike machines ({'; '.join(unlike)}): "
            "measure both on one machine, best with compare()"
        )
    if before.label == after.label:
        before, after = replace(before, label=f"{before.label} before"), replace(after, label=f"{after.label} after")
    return Comparison(before, after, (), margin, 0.0)


def _changes(a: Machine, b: Machine) -> list[str]:
    pairs = ((field.name, getattr(a, field.name), getattr(b, field.name)) for field in fields(Machine))
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
