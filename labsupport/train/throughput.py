"""Samples a second against the batch size, and the knee from which on larger batches gain little."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from labsupport.devices import choose_device
from labsupport.measure.statistics import PairedRatio
from labsupport.measure.stopwatch import Stopwatch
from labsupport.train.any_size import WorkloadStep
from labsupport.train.recipe import Recipe
from labsupport.train.trials import Trials
from labsupport.train.workload import Workload
from labsupport.units import format_bytes, format_seconds, parse_bytes

SHARE = 0.9  # of the throughput that no batch size passes is what the knee reaches
LEAST_ROUNDS, MOST_ROUNDS = 6, 200
TURN_S = 0.02  # a turn is one step, or as many as fill this
SETTLE_BELOW_S = 0.1  # a shorter step is run once, untimed, after each switch to another size
MOST_SIZES = 8
LONGEST_STEP_S = 1.0  # larger sizes are left out of the fit, if two stay


@dataclass(frozen=True)
class Timing:
    """Steps of one size: the median, the interquartile range over it, how many, and the peak of memory. `rounds_s` are
    the medians of the rounds; empty if it was not timed in turns with the others."""

    size: int
    seconds: float
    spread: float
    n: int
    peak_bytes: int
    rounds_s: tuple[float, ...] = ()

    @property
    def samples_per_s(self) -> float:
        return self.size / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.size} samples: {format_seconds(self.seconds)} a step, {self.samples_per_s:.0f} samples/s, "
            f"peak {format_bytes(self.peak_bytes)}"
        )


@dataclass(frozen=True)
class Throughput:
    """A step takes `fixed_s + per_sample_s * size` seconds, by a fit to the timings.

    So throughput rises towards 1 / per_sample_s, the `asymptote`, and reaches 90 % of it at the `knee`, 9 times as many
    samples as would take as long as the fixed part. `interval` has the knee in 95 % of the cases, by what the rounds
    of timing differ in; that a straight line describes the steps is taken for granted.
    """

    timings: tuple[Timing, ...]
    fixed_s: float
    per_sample_s: float
    interval: tuple[float, float]

    @property
    def knee(self) -> float:
        return SHARE / (1 - SHARE) * self.fixed_s / self.per_sample_s

    @property
    def asymptote(self) -> float:
        """Samples a second."""
        return 1 / self.per_sample_s

    def samples_per_s(self, size: float) -> float:
        """By the fit."""
        return size / (self.fixed_s + self.per_sample_s * size)

    def gain(self, size: int, larger: int) -> PairedRatio:
        """Samples a second with the larger size over those with the other, round by round. Raises ValueError for a size
        that was not timed in turns."""
        rounds = {each.size: each.rounds_s for each in self.timings if each.rounds_s}
        if missing := [each for each in (size, larger) if each not in rounds]:
            raise ValueError(f"{missing[0]} samples were not timed in turns; those that were: {list(rounds)}")
        a, b = ([seconds / each for seconds in rounds[each]] for each in (size, larger))
        return PairedRatio.of(a, b)

    def also(self, other: "Throughput") -> "Throughput":
        """The same fit, with the other's timings beside those it was made from."""
        apart = [replace(each, rounds_s=()) for each in other.timings]
        return replace(self, timings=tuple(sorted((*self.timings, *apart), key=lambda each: each.size)))


def sizes_to_time(largest: int, step_s: float, multiple_of: int = 1) -> list[int]:
    """Sizes from 2 samples to the largest, evenly spaced on a logarithmic scale; where a step of the largest takes
    longer than a second, up to what takes one. `step_s` is the largest one's."""
    upper = max(min(largest, 8 * multiple_of), int(largest * min(1.0, LONGEST_STEP_S / step_s)))
    spaced = np.geomspace(min(2, upper), upper, MOST_SIZES)
    units = {max(1, round(size / multiple_of)) for size in spaced} | {upper // multiple_of}
    return sorted({unit * multiple_of for unit in units if unit * multiple_of <= largest})


def time_sizes(
    step: Callable[[int], object],
    sizes: Sequence[int],
    *,
    seconds: float,
    peak_of: Callable[[int], int],
    prepare: Callable[[int], object],
    agree: Callable[[Any], Any] = lambda mine: mine,
    clock: Callable[[], float] = time.perf_counter,
) -> Throughput:
    """Time `step(size)` for each size in turns, up and down, for about so many seconds (six rounds at least), and fit.

    `peak_of(size)` runs one step and returns its peak in bytes, `prepare(size)` makes its batch; neither is timed.
    Ranks that step together have to do the same: `agree(mine)` returns what all of them take.
    """
    watch = Stopwatch(clock=clock)
    peaks = {size: peak_of(size) for size in sizes}
    samples: dict[int, list[list[float]]] = {size: [] for size in sizes}
    counts: dict[int, int] = {}
    begun, rounds = clock(), 0
    while agree(rounds < LEAST_ROUNDS or (clock() - begun < seconds and rounds < MOST_ROUNDS)):
        for size in sizes if rounds % 2 == 0 else sizes[::-1]:
            prepare(size)
            here = partial(step, size)
            if size not in counts:
                step_s = watch.turn(here, 1)[0][0]
                counts[size] = agree(max(1, math.ceil(TURN_S / step_s)) if step_s < SETTLE_BELOW_S else 0)
            elif counts[size]:  # short: the caches are another size's, and the first step is not timed
                here()
            samples[size].append(watch.turn(here, max(1, counts[size]))[0])
        rounds += 1
    return fitted(sizes, [samples[size] for size in sizes], [peaks[size] for size in sizes])


def fitted(sizes: Sequence[int], samples: Sequence[Sequence[Sequence[float]]], peaks: Sequence[int]) -> Throughput:
    """The fit through the median step of each size, and the knee's interval by resampling the rounds. `samples` are
    seconds, by size and round."""
    every = [np.concatenate([np.asarray(turn) for turn in turns]) for turns in samples]
    middles = np.array([float(np.median(each)) for each in every])
    spreads = [
        float(np.subtract(*np.percentile(each, [75, 25]))) / middle for each, middle in zip(every, middles, strict=True)
    ]
    timings = [
        Timing(size, float(middle), spread, len(each), peak, tuple(float(np.median(turn)) for turn in turns))
        for size, middle, spread, each, peak, turns in zip(sizes, middles, spreads, every, peaks, samples, strict=True)
    ]
    fixed_s, per_sample_s = _line(np.array(sizes), middles)
    of_rounds = np.array([[float(np.median(turn)) for turn in turns] for turns in samples])
    draws = np.random.default_rng(0).integers(0, of_rounds.shape[1], (500, of_rounds.shape[1]))
    lines = [_line(np.array(sizes), np.median(of_rounds[:, draw], axis=1)) for draw in draws]
    knees = [SHARE / (1 - SHARE) * fixed / per_sample for fixed, per_sample in lines]
    low, high = np.percentile(knees, [2.5, 97.5])
    return Throughput(tuple(timings), fixed_s, per_sample_s, (float(low), float(high)))


def _line(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Seconds that are fixed, and those a sample: the least squares of the relative errors, neither below 0."""
    ones, slopes = 1 / seconds, sizes / seconds
    if len(sizes) > 1:
        (fixed, per_sample), *_ = np.linalg.lstsq(np.stack([ones, slopes], axis=1), np.ones(len(sizes)), rcond=None)
        if fixed >= 0 and per_sample > 0:
            return float(fixed), float(per_sample)
    return 0.0, float(slopes.sum() / (slopes**2).sum())


def measure_throughput(
    workload: Workload,
    recipe: Recipe | None,
    sizes: Sequence[int],
    *,
    budget: int | str,
    device: torch.device | str | None = None,
    seconds: float = 5.0,
) -> Throughput:
    """Time a workload's steps at some batch sizes, each once under a budget of memory. Its live objects are as before
    afterwards. Raises torch.OutOfMemoryError for a size that does not fit."""
    at = torch.device(device) if device is not None else choose_device().device
    step = WorkloadStep(workload, recipe or Recipe(), None, at, min(sizes))
    trials = Trials(step, step.things, at, parse_bytes(budget), math.inf, step.release)
    trials.lend()
    try:
        return time_sizes(step, sorted(sizes), seconds=seconds, peak_of=trials.peak_of, prepare=step.prepare)
    finally:
        trials.put_back()
