"""The search for the largest batch that fits: whole numbers, and trials that say of one size whether it does."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from labsupport.units import format_bytes, format_seconds

PROBES = (2, 8)  # without a plan; not 1, which BatchNorm refuses
FAR = 16  # a prediction further away than this many times the largest tested size gets a point on the way
FLAT = 1024  # samples up to which memory is seen not to rise, before that is believed
NEAR = 0.95  # of a size: others nearer than this tell no slope where bytes are rounded, if there is a smaller one
SAFETY = 0.8  # of the time limit is what a trial may be expected to take


@dataclass(frozen=True)
class Trial:
    """Some steps at one batch size. `peak_bytes` is their peak; of a trial that did not fit, what was live and asked
    for when memory ran out. `levels` are what a prediction goes by: live bytes after each allocation and release, or
    the peaks of phases. `timed_out`: it was ended by the time limit, and says nothing of memory."""

    size: int
    fits: bool
    peak_bytes: int
    seconds: float
    why: str = ""
    timed_out: bool = False
    levels: np.ndarray | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        found = "fits" if self.fits else "not within the time limit" if self.timed_out else "does not fit"
        return (
            f"{self.size} {'sample' if self.size == 1 else 'samples'} ({self.why}): "
            f"{found}, {'' if self.fits else 'at least '}"
            f"{format_bytes(self.peak_bytes)}, {format_seconds(self.seconds)}"
        )


class NothingFits(Exception):
    """Not even the smallest size."""


class _Stopped(Exception):
    """Carries what ended the search."""


class Search:
    """Looks for the largest size that fits, by `run(size, why)`, which makes a trial.

    `predict(trials)` estimates it from the trials so far: None if memory does not rise. Sizes are multiples of
    `multiple_of`, up to `at_most` (`limit` is the name of that limit). Where memory is fragmented, a size may
    fail that is smaller than one that fits: `low` is the largest that was seen to fit, and the search ends when a
    larger one fails that is the next, or at most `tolerance` (a share of it) away.
    """

    def __init__(
        self,
        run: Callable[[int, str], Trial],
        predict: Callable[[Sequence[Trial]], float | None],
        *,
        at_most: int | None = None,
        limit: str = "max_batch",
        multiple_of: int = 1,
        tolerance: float = 0.0,
        max_trials: int = 30,
        trial_limit_s: float = math.inf,
    ) -> None:
        self._run, self._predict = run, predict
        self._unit, self._tolerance = multiple_of, tolerance
        self._max_trials, self._limit_s = max_trials, trial_limit_s
        self._most = None if at_most is None else at_most // multiple_of
        self._limit = limit
        self.trials: list[Trial] = []
        self._missed, self._on_the_way, self._stride = False, False, 1

    # All below counts in units of `multiple_of`.

    @property
    def low(self) -> int:
        """The largest that was seen to fit; 0 so far."""
        return max((trial.size for trial in self.trials if trial.fits), default=0) // self._unit

    @property
    def high(self) -> int | None:
        """The smallest above it that was seen to fail."""
        failed = [trial.size // self._unit for trial in self.trials if not trial.fits and not trial.timed_out]
        return min((size for size in failed if size > self.low), default=None)

    def find(self, planned: int | None = None) -> str:
        """Run trials until one of the limits, and return which. Raises NothingFits. `planned` is where the largest
        should be."""
        try:
            if planned is not None and planned >= self._unit:
                self._try(planned // self._unit, "the plan's largest")
                if self.low:
                    self._try(self.low + 1, "one more")
            self._probe()
            while True:
                self._narrow()
        except _Stopped as stopped:
            return str(stopped)

    def _probe(self) -> None:
        """Two small sizes that fit, to predict from; smaller ones if those do not."""
        for size in PROBES:
            if self.low < size and (self.high is None or size < self.high):
                self._try(size, "a first probe")
        if not self.low:
            self._try(1, "the smallest")
            if not self.low:
                raise NothingFits

    def _narrow(self) -> None:
        """One more trial, where it says most."""
        low, high, guess = self.low, self.high, self._guess()
        if guess is None:
            self._rises_not()
        elif self._missed and high is not None:  # what predicted too much gets a point from nearer by
            self._missed = not self._try((low + high) // 2, "halfway").fits
        elif guess <= low:  # it should be the largest: gallop on from it, until one fails
            self._missed = not self._try(low + self._stride, "one more").fits
            self._stride *= 2
        elif guess > FAR * low and not self._on_the_way:
            self._on_the_way = True
            self._try(max(low + 1, guess // 4), "on the way")
        else:
            self._missed = not self._try(guess, "predicted").fits

    def _guess(self) -> int | None:
        predicted = self._predict(self.trials)
        if predicted is None or (math.isinf(predicted) and self.high is None):
            return None
        return int(min(predicted // self._unit, self.high - 1 if self.high is not None else math.inf))

    def _rises_not(self) -> None:
        """Nothing to predict from: go to the limit if there is one, else look a little further."""
        if self._most is not None:
            self._try(self._most, self._limit)
        elif self.high is None and self.low * self._unit < FLAT:
            self._try(FAR * self.low, "does it rise at all?")
        elif self.high is not None:
            self._try((self.low + self.high) // 2, "halfway")
        else:
            raise _Stopped("memory does not rise")

    def _try(self, size: int, why: str) -> Trial:
        """One trial, of a size that the limits allow. Raises _Stopped before or after it where that is the end."""
        if self._most is not None and size > self._most:
            size, why = self._most, self._limit
        allowed = self._in_time()
        if size > allowed:
            if allowed <= 1.1 * self.low:
                raise _Stopped("time limit")
            size, why = int(allowed), "time limit"
        if len(self.trials) >= self._max_trials:
            if not self.low:
                raise NothingFits
            raise _Stopped("trial limit")
        trial = self._run(max(1, size) * self._unit, why)
        self.trials.append(trial)
        self._end(trial)
        return trial

    def _in_time(self) -> float:
        """The largest size whose trial should stay within the time limit, by the smallest and the largest that fit."""
        fitting = sorted((trial.size, trial.seconds) for trial in self.trials if trial.fits)
        if len(fitting) < 2 or math.isinf(self._limit_s):
            return math.inf
        (first, first_s), (size, seconds) = fitting[0], fitting[-1]
        rise = (seconds - first_s) / max(1, size - first)
        if rise <= 0:
            return math.inf
        return max(self.low, int(size + (SAFETY * self._limit_s - seconds) / rise) // self._unit)

    def _end(self, trial: Trial) -> None:
        low, high, size = self.low, self.high, trial.size // self._unit
        if trial.timed_out:
            self._most, self._limit = (low + size) // 2, "time limit"  # nearer ones would be late too
        if self._most is not None and low >= self._most > 0:
            raise _Stopped(self._limit)
        if self._most == 0 or high == 1:
            raise NothingFits
        if low and high is not None and high - low == 1:
            raise _Stopped("memory")
        if low and high is not None and high - low - 1 <= self._tolerance * low:
            raise _Stopped("tolerance")


def largest_by_levels(trials: Sequence[Trial], ceiling: int) -> float | None:
    """The largest size that should fit: a line through the two largest that fit, for each of their levels.

    Where both made the same allocations, that is each moment of the step; else each phase. None if nothing rises;
    the largest tested size if there is but one, or only others too near to tell a slope.
    """
    fitting = sorted((trial for trial in trials if trial.fits), key=lambda trial: trial.size)
    if not fitting:
        return 0
    b = fitting[-1]
    a = next((each for each in reversed(fitting) if each.size <= NEAR * b.size), None)
    rises, room = _slopes(a or fitting[0], b, ceiling)
    if rises.size:
        return b.size + int((room // rises).min())
    return b.size if a is None else None


def _slopes(a: Trial, b: Trial, ceiling: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the levels that rise from a to b: by how much, and the bytes up to the ceiling times the samples between."""
    here, there = (a.levels, b.levels) if a.levels is not None and b.levels is not None else (None, None)
    if here is None or there is None or len(here) != len(there):
        here, there = np.array([a.peak_bytes]), np.array([b.peak_bytes])
    up = there > here
    return (there - here)[up], (ceiling - there[up]) * (b.size - a.size)
