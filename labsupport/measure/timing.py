"""`measure` a step, `compare` two: warmed up, waited for, in turns, and everything put back afterwards."""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from labsupport.machine import Machine
from labsupport.measure.comparison import Comparison, judge, total_interval_of
from labsupport.measure.measurement import Measurement
from labsupport.measure.state import KeptState, found_in, share_state
from labsupport.measure.statistics import LEAST_SAMPLES, paired_interval
from labsupport.measure.stopwatch import (
    Clock,
    OtherProcesses,
    Step,
    Stopwatch,
    check_callable,
    check_positive,
    name_of,
    run_until_steady,
)

# The shortest turns are the best: what disturbs a machine comes in bursts of about ten milliseconds, and only a
# disturbance that both steps of a round see leaves their ratio alone (benchmarks/README.md has the noise by length
# of turn).
TURN_S = 0.002
# Steps shorter than this are run once or twice, untimed, after each switch: the other step left the caches and the
# allocator in its own state, and who pays for that is no matter of chance. In the benchmark's trials it made no false
# verdict, but took longer to reach one. How often is drawn by lot, the same for both: else a step that stalls
# every twentieth time would stall in timed steps twice as often as it should, or never.
SETTLE_BELOW_S = 0.1
SETTLE_STEPS = (1, 2)
# Every look is a chance to see a difference that is none: about seven of them, each this sure, are together as sure as
# one at 95 %. "Same" needs no such care: no interval fits into the margin by chance while the noise is large.
LOOK_CONFIDENCE = 0.99
LEAST_ROUNDS = 8  # of six or seven not even the smallest and the largest enclose the median so surely
# On CUDA a turn begins with an empty queue; only a longer one shows the host running ahead, as it does in training.
CUDA_TURN_S = 0.05


def measure(
    step: Step,
    *,
    label: str | None = None,
    min_time_s: float = 1.0,
    synchronize: Callable[[], Any] | None = None,
    state: Iterable[Any] | None = None,
    clock: Clock = time.perf_counter,
) -> Measurement:
    """Run a step until it is steady and `min_time_s` seconds of steady steps are timed, at least six of them.

    A step that uses CUDA is timed by events, and by the wall clock around groups of steps; `synchronize` waits for
    any other device that works while the host goes on (for MPS and XPU PyTorch's own is used). The modules
    and optimizers that the step names (or `state`, anything with a `state_dict`) are put back afterwards, after an
    error too: measuring trains nothing. Raises ValueError for a step too short to time, TypeError for one that cannot
    be called.
    """
    check_callable(step)
    check_positive(min_time_s=min_time_s)
    kept = KeptState(found_in(step) if state is None else state)
    try:
        watch = Stopwatch(synchronize, clock)
        others = OtherProcesses()
        samples, wall, warmup = run_until_steady(watch, step, min_time_s)
        busy = others.cores()
    finally:
        kept.put_back()
    return Measurement(
        label=label or name_of(step),
        samples_s=tuple(samples[warmup.dropped :]),
        dropped_s=tuple(samples[: warmup.dropped]),
        wall_s=tuple(wall),
        warmup=warmup,
        others_cores=busy,
        machine=watch.machine(),
    )


class _Side:
    """One of the two steps: warmed up, and timed in turns from the state in which its warm-up ended."""

    def __init__(self, watch: Stopwatch, step: Step, shared: list[Any], warm_s: float) -> None:
        self.watch, self.step = watch, step
        self.warm_samples, _, self.warmup = run_until_steady(watch, step, warm_s)
        self.samples_s: list[float] = []
        self.wall_s: list[float] = []
        self.typical_s = float(np.median(self.warm_samples[self.warmup.dropped :]))
        # Without the random state: a step whose length is drawn would be timed on one draw again and again.
        self._kept = KeptState(shared, randomness=False) if shared else None
        start = watch.clock()
        self._put_back()
        self.put_back_s = watch.clock() - start

    def _put_back(self) -> None:
        if self._kept:
            self._kept.put_back()

    def turn(self, settle: int, count: int) -> None:
        self._put_back()
        if settle:
            self.watch.turn(self.step, settle)
        samples, wall = self.watch.turn(self.step, count)
        self.samples_s += samples
        self.wall_s.append(wall)

    def measurement(self, label: str, others_cores: float, machine: Machine) -> Measurement:
        return Measurement(
            label=label,
            samples_s=tuple(self.samples_s),
            dropped_s=tuple(self.warm_samples),
            wall_s=tuple(self.wall_s) if self.watch.uses_events else (),
            warmup=replace(self.warmup, dropped=len(self.warm_samples)),
            others_cores=others_cores,
            machine=machine,
        )


def compare(
    a: Step,
    b: Step,
    *,
    names: tuple[str, str] = ("A", "B"),
    margin: float = 0.01,
    min_time_s: float = 1.0,
    max_time_s: float = 10.0,
    synchronize: Callable[[], Any] | None = None,
    state: Iterable[Any] | None = None,
    clock: Clock = time.perf_counter,
) -> Comparison:
    """Time two steps in turns until the verdict is clear, for at most about `max_time_s` seconds (six rounds at least).

    Each step is warmed up until it is steady. Rounds follow: A and B, then B and A, each a turn of some
    milliseconds. `state`, by default the modules and optimizers that the steps name, is put back between the turns
    if the steps share any of it (each goes on from where its own warm-up ended), and in any case at the end, after
    an error too. A difference within `margin` counts as none. It stops early when the verdict is clear (a difference:
    at 99 %); benchmarks/README.md counts how often that is wrong. A difference found early is a little overstated;
    where its size matters, give more `min_time_s`. Raises ValueError for a step too short to time.
    """
    check_callable(a, b)
    check_positive(margin=margin, min_time_s=min_time_s, max_time_s=max_time_s)
    if margin >= 1 or not len(names) == len(set(names)) == 2 or max_time_s < min_time_s:
        raise ValueError(
            "a margin below 1, two different names and max_time_s of at least min_time_s are expected: "
            f"got margin={margin}, names={names}, min_time_s={min_time_s}, max_time_s={max_time_s}"
        )
    of_a, of_b = (found_in(a), found_in(b)) if state is None else (list(state),) * 2
    things = [*of_a, *of_b]
    watch, others, began = Stopwatch(synchronize, clock), OtherProcesses(), clock()
    before = KeptState(things)
    # Steps that share nothing cannot disturb each other, and putting back costs more noise than it saves; nor may A's
    # optimizer be cold again, once B is warm. Both warm up on the same random numbers in any case.
    shared = things if share_state(of_a, of_b) else []
    start = before if shared else KeptState([])
    sides: list[_Side] = []
    try:
        for step in (a, b):
            start.put_back()
            sides.append(_Side(watch, step, shared, warm_s=min_time_s / 4))
        seconds = _run_rounds(sides, margin, began, min_time_s, max_time_s)
    finally:
        before.put_back()
    busy, machine = others.cores(), watch.machine()
    measured = [side.measurement(name, busy, machine) for side, name in zip(sides, names, strict=True)]
    return Comparison(measured[0], measured[1], _rounds(sides), margin, seconds)


def _rounds(sides: Sequence[_Side]) -> tuple[tuple[float, float], ...]:
    return tuple(zip(sides[0].wall_s, sides[1].wall_s, strict=True))


def _run_rounds(sides: list[_Side], margin: float, began: float, min_time_s: float, max_time_s: float) -> float:
    """Rounds until the verdict is clear or time is up; the seconds since `began`. It looks for a verdict each time
    that the time since the first round has grown by a third."""
    clock = sides[0].watch.clock
    # One rule for both: turns of unlike length, or only one side settling, would be a difference of our own making.
    quicker_s = min(side.typical_s for side in sides)
    turn_s = max(CUDA_TURN_S if sides[0].watch.uses_events else TURN_S, *(side.put_back_s for side in sides))
    count, draws = max(1, math.ceil(turn_s / quicker_s)), random.Random(0)
    first, look_after_s = clock(), min_time_s
    while True:
        order = sides if len(sides[0].wall_s) % 2 == 0 else sides[::-1]
        settle = draws.choice(SETTLE_STEPS) if quicker_s < SETTLE_BELOW_S else 0
        for side in order:
            side.turn(settle, count)
        now = clock()
        if len(sides[0].wall_s) < LEAST_SAMPLES:
            continue
        if now - began >= max_time_s:
            return now - began
        if now - first >= look_after_s and len(sides[0].wall_s) >= LEAST_ROUNDS:
            look_after_s = (now - first) * 4 / 3
            rounds = _rounds(sides)
            ratios, total = [a / b for a, b in rounds], total_interval_of(rounds)
            verdicts = [judge(paired_interval(ratios, sure), total, margin) for sure in (0.95, LOOK_CONFIDENCE)]
            if verdicts[0] == "same" or verdicts[1] != "cannot tell":
                return now - began
