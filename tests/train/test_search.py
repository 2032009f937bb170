"""The search over whole numbers: exact wherever memory rises with the size, and few trials."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labsupport.train.search import NothingFits, Search, Trial, largest_by_levels

CEILING = 1 << 20


class Memory:
    """Trials of a step whose live bytes at each moment are `fixed + per_sample * size`."""

    def __init__(self, moments, ceiling=CEILING, *, levels=True, seconds=lambda size: 1e-3):
        self.moments, self.ceiling, self.levels, self.seconds = moments, ceiling, levels, seconds

    def __call__(self, size, why):
        live = np.array([fixed + per_sample * size for fixed, per_sample in self.moments])
        peak = int(live.max())
        return Trial(size, peak <= self.ceiling, peak, self.seconds(size), why, levels=live if self.levels else None)

    @property
    def largest(self):
        return min((self.ceiling - fixed) // per_sample for fixed, per_sample in self.moments if per_sample)


def searched(memory, planned=None, **options):
    search = Search(memory, lambda trials: largest_by_levels(trials, memory.ceiling), **options)
    return search, search.find(planned)


def sizes(search):
    return [trial.size for trial in search.trials]


some_moments = st.lists(st.tuples(st.integers(0, 1 << 19), st.integers(0, 1000)), min_size=1, max_size=8)


@given(some_moments, st.integers(104, 100_000))
@settings(max_examples=300, deadline=None)
def test_exact_in_six_trials_where_trials_make_the_same_allocations(others, per_sample):
    memory = Memory([(0, per_sample), *others])
    search, by = searched(memory)
    assert by == "memory" and search.low == memory.largest
    assert len(search.trials) <= 6


@given(some_moments, st.integers(512, 100_000))  # so that it rises before 1024 samples
@settings(max_examples=300, deadline=None)
def test_exact_from_peaks_alone(others, per_sample):
    memory = Memory([(0, per_sample), *others], levels=False)
    search, by = searched(memory)
    assert by == "memory" and search.low == memory.largest
    assert len(search.trials) <= 30


@given(st.integers(0, 10_000), st.integers(1, 5000))
@settings(max_examples=200, deadline=None)
def test_a_plan_that_is_wrong_costs_trials_and_no_exactness(planned, per_sample):
    memory = Memory([(1000, per_sample)])
    search, by = searched(memory, planned)
    assert by == "memory" and search.low == memory.largest
    assert len(search.trials) <= 6


@pytest.mark.parametrize("per_sample", [104, 1000, 5000, 100_000])
def test_a_plan_that_is_right_costs_two_trials(per_sample):
    memory = Memory([(0, per_sample)])
    search, by = searched(memory, memory.largest)
    assert by == "memory" and sizes(search) == [memory.largest, memory.largest + 1]


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 128, 129, 9999, 10_000])
@pytest.mark.parametrize("plan", [True, False])
def test_small_and_large_maxima(largest, plan):
    memory = Memory([(0, 1000)], 1000 * largest + 999)
    search, by = searched(memory, largest if plan else None)
    assert (search.low, by) == (largest, "memory")
    assert len(search.trials) <= (2 if plan else 6)


def test_not_even_one():
    with pytest.raises(NothingFits):
        searched(Memory([(0, CEILING + 1)]))
    with pytest.raises(NothingFits):
        searched(Memory([(0, CEILING + 1)]), 0)
    with pytest.raises(NothingFits):
        searched(Memory([(0, CEILING + 1)]), 700)


def test_the_limit_is_tested_and_named():
    search, by = searched(Memory([(0, 100)]), at_most=50, limit="samples")
    assert (search.low, by) == (50, "samples") and 50 in sizes(search)
    search, by = searched(Memory([(0, 100)]), 10_485, at_most=50, limit="samples")
    assert (sizes(search), by) == ([50], "samples")
    assert searched(Memory([(0, 100)]), at_most=1)[0].low == 1


@pytest.mark.parametrize("multiple", [3, 8, 64, 1000])
@pytest.mark.parametrize("plan", [True, False])
def test_multiples(multiple, plan):
    memory = Memory([(5, 104)])
    search, by = searched(memory, memory.largest if plan else None, multiple_of=multiple)
    assert search.low * multiple == memory.largest // multiple * multiple and by == "memory"
    assert all(size % multiple == 0 for size in sizes(search))
    assert search.low * multiple + multiple in sizes(search)  # the next one was seen to fail


def test_all_fit_within_the_limit_of_trials():
    search, by = searched(Memory([(0, 1)], levels=False), max_trials=3)
    assert by == "trial limit" and len(search.trials) == 3
    assert search.low == max(sizes(search))


def test_memory_that_does_not_rise_ends_the_search():
    search, by = searched(Memory([(1000, 0)]))
    assert by == "memory does not rise" and search.low == max(sizes(search)) >= 1000
    search, by = searched(Memory([(1000, 0)]), at_most=200_000)
    assert (search.low, by) == (200_000, "max_batch")


def test_memory_that_rises_late_is_found():
    """The parameters' part of the step hides that of the batch, until it is large."""
    memory = Memory([(1 << 18, 0), (0, 400)], levels=False)
    search, by = searched(memory)
    assert (search.low, by) == (memory.largest, "memory")


def test_a_tolerance_ends_it_early():
    memory = Memory([(0, 30), (-(1 << 20), 400)], levels=False)
    exact, _ = searched(memory)
    near, by = searched(memory, tolerance=0.05)
    assert by == "tolerance" and len(near.trials) < len(exact.trials)
    assert near.low <= exact.low < near.high <= 1.05 * near.low + 1


def test_sizes_that_fail_below_one_that_fits_do_not_end_it():
    """Fragmented memory: at 60 % and more of the ceiling every seventh size fails."""
    memory = Memory([(0, 1000)])

    def fragmented(size, why):
        trial = memory(size, why)
        broken = trial.fits and trial.peak_bytes > 0.6 * CEILING and size % 7 == 0
        return Trial(size, trial.fits and not broken, trial.peak_bytes, 1e-3, why, levels=trial.levels)

    fragmented.ceiling = CEILING
    search, by = searched(fragmented)
    assert by == "memory" and search.low in sizes(search)
    assert search.low + 1 in sizes(search)
    assert search.low > 0.6 * CEILING / 1000 - 7


def test_a_trial_that_would_take_too_long_is_not_made():
    memory = Memory([(0, 10)], seconds=lambda size: 0.01 * size)
    search, by = searched(memory, trial_limit_s=10)
    assert by == "time limit" and search.low == max(sizes(search))
    assert 500 <= search.low <= 1000 and max(trial.seconds for trial in search.trials) <= 10


def test_a_trial_that_took_too_long_is_no_question_of_memory():
    def slow(size, why):
        late = size > 300
        return Trial(size, not late, 0 if late else 1000 * size, 0.01, why, timed_out=late)

    slow.ceiling = CEILING
    search, by = searched(slow, 1048, trial_limit_s=60)
    assert by == "time limit" and 8 <= search.low <= 300
    assert search.high is None


def test_a_line_through_the_two_largest_that_fit():
    trials = [Memory([(100, 10), (300, 2)])(size, "") for size in (2, 8)]
    assert largest_by_levels(trials, 1000) == 90
    assert largest_by_levels(trials[:1], 1000) == 2
    assert largest_by_levels([], 1000) == 0
    near = [Memory([(100, 10)])(size, "") for size in (99, 100)]
    assert largest_by_levels(near, 2000) == 190  # better than nothing
    assert largest_by_levels([Trial(99, True, 50, 1), Trial(100, True, 50, 1)], 1000) == 100
    assert largest_by_levels([Trial(2, True, 50, 1), Trial(4, True, 50, 1)], 1000) is None


def test_one_line_a_trial():
    assert str(Trial(8, True, 1 << 20, 0.5, "predicted")) == "8 samples (predicted): fits, 1.00 MiB, 500 ms"
    assert "does not fit, at least 1.00 MiB" in str(Trial(8, False, 1 << 20, 0.5, "predicted"))
    assert "not within the time limit" in str(Trial(8, False, 0, 0.5, "predicted", timed_out=True))
    assert math.isfinite(Trial(8, True, 1, 0.5).seconds)
