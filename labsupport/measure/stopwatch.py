"""Timing groups of steps on a device that may work while the host goes on, and waiting until they are steady."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from numbers import Real
from typing import Any

import numpy as np
import psutil
import torch

from labsupport.machine import Machine, fingerprint
from labsupport.measure.statistics import LEAST_SAMPLES, Warmup, find_warmup
from labsupport.units import format_seconds

Clock = Callable[[], float]
Step = Callable[[], Any]
# A step must be this many times as long as what the clock itself takes, so that the clock is at most 1 % of it.
CLOCKS_A_STEP = 100
MOST_AT_ONCE = 1000
# So few steps show no warm-up of several steps, unless they are unlike.
FEW = 10


def name_of(step: Step) -> str:
    while isinstance(step, functools.partial):
        step = step.func
    return getattr(step, "__name__", type(step).__name__)


def check_positive(**given: float) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}; a positive number is expected")


def check_callable(*steps: Step) -> None:
    for step in steps:
        if not callable(step):
            raise TypeError(f"a step is called again and again: give the function, step and not step(); got {step!r}")


class Stopwatch:
    """Times groups of steps on whatever device they use. `event` makes a timing event; by default CUDA's."""

    def __init__(
        self,
        synchronize: Callable[[], Any] | None = None,
        clock: Clock = time.perf_counter,
        event: Callable[[], Any] | None = None,
    ) -> None:
        self.clock = clock
        self._wait = synchronize
        self._event = event

    @property
    def uses_events(self) -> bool:
        """Whether CUDA is in use: known only once a step has run, so that asking creates no context."""
        return self._event is not None or (self._wait is None and torch.cuda.is_initialized())

    def machine(self) -> Machine:
        return fingerprint("cuda" if torch.cuda.is_initialized() else "cpu")

    def turn(self, step: Step, count: int) -> tuple[list[float], float]:
        """The seconds of each of `count` steps, and the wall clock's a step, to the end of the device's work."""
        if self.uses_events:
            return self._by_events(step, count)
        wait, clock, samples = self._waiter(), self.clock, []
        wait()
        begun = start = clock()
        for _ in range(count):
            step()
            wait()
            now = clock()
            samples.append(now - start)
            start = now
        return samples, (start - begun) / count

    def _by_events(self, step: Step, count: int) -> tuple[list[float], float]:
        # No waiting between the steps: the host may run ahead, as it does in training.
        make = self._event or (lambda: torch.cuda.Event(enable_timing=True))
        events = [make() for _ in range(count + 1)]
        wait = self._wait or torch.cuda.synchronize
        wait()
        start = self.clock()
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        wait()
        wall = (self.clock() - start) / count
        # elapsed_time is in milliseconds, with a resolution of about half a microsecond
        return [1e-3 * a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)], wall

    def _waiter(self) -> Callable[[], Any]:
        if self._wait is not None:
            return self._wait
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        # An idle CUDA that no step has touched needs no waiting, and asking it would create a context.
        return torch.accelerator.synchronize if here and here.type != "cuda" else _nothing

    def shortest_s(self) -> float:
        """The shortest step that can be timed alone: the clock, read twice, is 1 % of it."""
        readings = [self.clock() for _ in range(101)]
        return CLOCKS_A_STEP * float(np.median(np.diff(readings)))


def _nothing() -> None:
    pass


def run_until_steady(watch: Stopwatch, step: Step, min_time_s: float) -> tuple[list[float], list[float], Warmup]:
    """Samples, wall seconds a step (with events only), and how many of the samples are warm-up.

    It gives up waiting for a steady part once the later half of the steps has taken twice `min_time_s`. Raises
    ValueError for a step too short to time, and for a clock that goes backwards.
    """
    samples, wall = watch.turn(step, 1)[0], []
    count, check_at, ends = 1, min_time_s, list(samples)
    while True:
        more, wall_s = watch.turn(step, count)
        if not all(0 <= sample < math.inf for sample in (*samples[:1], *more)):
            raise ValueError(f"the clock went backwards, or gave no number: a step took {min(more)} s by it")
        samples += more
        ends += list(accumulate(more, initial=ends[-1]))[1:]
        wall += [wall_s] if watch.uses_events else []
        if count == MOST_AT_ONCE and len(samples) < 2 * MOST_AT_ONCE:
            refuse_too_short(watch, step, samples)
        typical = float(np.median(samples[-10:]))
        # Groups of 50 ms: long enough that what happens between them costs nothing, short enough to stop in time.
        count = min(MOST_AT_ONCE, max(1, int(0.05 / typical))) if typical > 0 else MOST_AT_ONCE
        # The later half, doubled: some slow first steps (compiled twice, three times run before a graph is replayed)
        # are no time spent on steady ones.
        spent = 2 * (ends[-1] - ends[len(samples) // 2 - 1])
        unlike = len(samples) < FEW and max(samples[1:]) > 1.5 * min(samples[1:])
        if spent < check_at or len(samples) <= LEAST_SAMPLES or unlike:
            continue
        warmup = find_warmup(samples)
        enough = sum(samples[warmup.dropped :]) >= min_time_s and len(samples) - warmup.dropped >= LEAST_SAMPLES
        if (enough and warmup.steady) or spent >= 4 * min_time_s:
            break
        check_at = 1.25 * spent
    refuse_too_short(watch, step, samples)
    return samples, wall, find_warmup(samples)


def refuse_too_short(watch: Stopwatch, step: Step, samples: Sequence[float]) -> None:
    """Raises ValueError if the clock takes more than 1 % of the median step."""
    median, shortest = float(np.median(samples)), watch.shortest_s()
    if median <= shortest:
        # What the step itself takes is that without the clock's own time, of which there will be less.
        alone = max(median - shortest / CLOCKS_A_STEP, shortest / 1000)
        times = 2 ** math.ceil(math.log2(2 * shortest / alone)) if shortest > 0 else 1000
        raise ValueError(
            f"{name_of(step)} takes {format_seconds(median)}: too short to time alone, the clock is more than 1 % of "
            f"a step below {format_seconds(shortest)}. Time many at once: def many(): [step() for _ in range({times})]"
        )


class OtherProcesses:
    """Cores that other processes keep busy, from now on."""

    def __init__(self) -> None:
        self._start = self._read()

    def _read(self) -> tuple[float, float, float]:
        of_all = psutil.cpu_times()
        idle = of_all.idle + getattr(of_all, "iowait", 0.0)
        own = 0.0
        me = psutil.Process()
        for process in [me, *me.children(recursive=True)]:
            try:
                own += sum(process.cpu_times()[:4])  # with the children that ended: workers come and go
            except psutil.Error:
                continue
        return time.monotonic(), sum(of_all[:8]) - idle, own

    def cores(self) -> float:
        """On average since this was made; 0 for less than a tenth of a second, which the system cannot resolve."""
        then, busy, own = self._start
        now, busy_now, own_now = self._read()
        return max(0.0, (busy_now - busy) - (own_now - own)) / (now - then) if now - then > 0.1 else 0.0
