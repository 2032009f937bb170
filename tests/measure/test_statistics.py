"""Intervals that assume no distribution, ratios of things timed in turns, warm-ups and stalls planted and found."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labsupport.measure import PairedRatio, find_stalls, find_warmup, median_interval, throughput
from labsupport.measure import statistics as ours
from labsupport.measure.statistics import LEAST_SAMPLES, Stalls, block_interval, paired_interval

SECONDS = st.floats(1e-6, 1e3)


@pytest.mark.parametrize(
    "n, first, last",
    [(6, 1, 6), (7, 1, 7), (8, 1, 8), (9, 2, 8), (10, 2, 9), (12, 3, 10), (15, 4, 12), (20, 6, 15), (25, 8, 18)],
)
def test_the_bounds_are_the_sign_tests_order_statistics(n, first, last):
    """First and last as in the published tables of 95 % intervals for a median."""
    samples = np.random.default_rng(0).permutation(np.arange(1, n + 1)).tolist()
    assert median_interval(samples) == (first, last)


@pytest.mark.parametrize("confidence, first, last", [(0.5, 6, 10), (0.95, 4, 12), (0.99, 3, 13)])
def test_more_confidence_takes_a_wider_interval(confidence, first, last):
    assert median_interval(range(1, 16), confidence) == (first, last)


@pytest.mark.parametrize("n, confidence", [(0, 0.95), (1, 0.95), (LEAST_SAMPLES - 1, 0.95), (6, 0.99), (15, 1.0)])
def test_too_few_samples_give_no_interval(n, confidence):
    with pytest.raises(ValueError, match=f"{n} samples give no {confidence:.0%} interval of the median"):
        median_interval([1.0] * n, confidence)


@pytest.mark.parametrize("place", [0, 3, 8])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf], ids=str)
def test_samples_that_are_not_finite_give_no_interval(odd, place):
    samples = [1.0] * 9
    samples[place] = odd
    with pytest.raises(ValueError, match="finite samples are expected"):
        median_interval(samples)


@settings(deadline=None)
@given(st.lists(SECONDS, min_size=LEAST_SAMPLES, max_size=40), st.randoms())
def test_the_interval_holds_the_median_and_is_blind_to_order(samples, random):
    low, high = median_interval(samples)
    assert low <= statistics.median(samples) <= high
    assert {low, high} <= set(samples)
    random.shuffle(samples)
    assert median_interval(samples) == (low, high)


@settings(deadline=None)
@given(st.lists(SECONDS, min_size=LEAST_SAMPLES, max_size=40))
def test_a_scale_of_ones_own_changes_nothing(samples):
    """No distribution is assumed: whatever keeps the order keeps the interval."""
    low, high = median_interval(samples)
    assert median_interval([math.log(s) for s in samples]) == (math.log(low), math.log(high))


DRAWS = {
    "normal": (lambda random, shape: random.normal(size=shape), 0.0),
    "lognormal": (lambda random, shape: random.lognormal(0.0, 2.0, shape), 1.0),
    "cauchy": (lambda random, shape: random.standard_cauchy(shape), 0.0),
    "two humps": (lambda random, shape: random.normal(size=shape) + 9 * random.choice([-1, 1], shape), 0.0),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("n", [6, 9, 15, 24])
def test_the_interval_covers_the_true_median_as_often_as_it_says(name, n):
    draw, median = DRAWS[name]
    rounds = 2000
    intervals = [median_interval(samples.tolist()) for samples in draw(np.random.default_rng(n), (rounds, n))]
    covered = sum(low <= median <= high for low, high in intervals) / rounds
    assert covered >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / rounds)  # three standard errors of the simulation


def test_a_ratio_is_the_median_of_the_rounds():
    ratio = PairedRatio.of([2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 70.0], [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 7.0])
    assert ratio.ratios == (2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 10.0)
    assert (ratio.value, ratio.interval, ratio.n, ratio.unit) == (4.0, (2.0, 10.0), 7, "x")
    assert ratio.spread == (6.0 - 2.0) / 4.0


def test_rounds_that_agree_have_no_spread():
    ratio = PairedRatio((2.0,) * LEAST_SAMPLES)
    assert (ratio.value, ratio.interval, ratio.spread) == (2.0, (2.0, 2.0), 0.0)


@settings(deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=7, max_size=15).filter(lambda pairs: len(pairs) % 2))
def test_the_other_way_round_the_ratio_is_inverted(pairs):
    a_s, b_s = zip(*pairs, strict=True)
    one, other = PairedRatio.of(a_s, b_s), PairedRatio.of(b_s, a_s)
    assert other.value == pytest.approx(1 / one.value)
    assert other.interval == pytest.approx((1 / one.interval[1], 1 / one.interval[0]))


@settings(deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS, st.floats(0.1, 10)), min_size=6, max_size=15))
def test_what_slows_a_whole_round_leaves_the_ratio_alone(rounds):
    calm = PairedRatio.of([a for a, _, _ in rounds], [b for _, b, _ in rounds])
    disturbed = PairedRatio.of([a * slow for a, _, slow in rounds], [b * slow for _, b, slow in rounds])
    assert disturbed.ratios == pytest.approx(calm.ratios)


@pytest.mark.parametrize(
    "ratios",
    [(), (1.0,) * 5, (1.0,) * 5 + (0.0,), (1.0,) * 6 + (-1.0,), (1.0,) * 6 + (math.nan,)],
    ids=["none", "five", "zero", "negative", "nan"],
)
def test_at_least_six_positive_ratios_are_expected(ratios):
    with pytest.raises(ValueError, match="at least 6 rounds with positive ratios are expected"):
        PairedRatio(ratios)


@pytest.mark.parametrize(
    "a_s, b_s",
    [([1.0] * 7, [1.0] * 6), ([1.0] * 6, []), ([1.0] * 5 + [-1.0], [1.0] * 6), ([-1.0] * 6, [-1.0] * 6)],
    ids=["unequal", "one side only", "negative", "both negative"],
)
def test_every_round_has_seconds_of_both_sides(a_s, b_s):
    with pytest.raises(ValueError, match="each round has seconds of A and of B: got"):
        PairedRatio.of(a_s, b_s)


@pytest.mark.parametrize("b_s", [0.0, 5e-324])
def test_a_round_that_took_no_time_is_a_value_error(b_s):
    with pytest.raises(ValueError, match="positive"):
        PairedRatio.of([1.0] * 6, [1.0] * 5 + [b_s])


def mean(drawn):
    return drawn.mean(axis=-1)


def like_their_neighbours(seed, runs, n, tie=0.6):
    """Rows of samples around 0, each `tie` of the one before and the rest its own."""
    rows = np.random.default_rng(seed).normal(size=(runs, n))
    for i in range(1, n):
        rows[:, i] += tie * rows[:, i - 1]
    return rows


def share_covered(intervals, value):
    return np.mean([low <= value <= high for low, high in intervals])


def test_the_block_interval_covers_the_mean_of_samples_that_depend_on_their_neighbours():
    """Drawn one by one, such samples look surer than they are: 0.65 of the intervals hold the mean, not 0.95."""
    rows = like_their_neighbours(seed=1, runs=200, n=300)
    assert share_covered([block_interval([row], mean) for row in rows], 0.0) >= 0.84


def test_the_block_interval_of_independent_samples_covers_as_often_as_it_says():
    rows = np.random.default_rng(2).normal(3.0, 1.0, (200, 300))
    assert 0.9 <= share_covered([block_interval([row], mean) for row in rows], 3.0) <= 0.99


def test_less_confidence_takes_a_narrower_block_interval():
    row = like_their_neighbours(seed=3, runs=1, n=200)[0]
    low, high = block_interval([row], mean, confidence=0.5)
    lowest, highest = block_interval([row], mean)
    assert lowest < low < row.mean() < high < highest


def test_the_block_interval_is_the_same_every_time_and_leaves_numpys_draws_alone():
    row, before = like_their_neighbours(seed=4, runs=1, n=50)[0], np.random.get_state()[1].tolist()
    assert block_interval([row], mean) == block_interval([row], mean)
    assert np.random.get_state()[1].tolist() == before


@settings(deadline=None, max_examples=20)
@given(st.lists(SECONDS, min_size=1, max_size=40))
def test_columns_are_drawn_together(column):
    """If they were not, the ratio of a column to itself would vary."""
    assert block_interval([column, column], lambda a, b: a.sum(axis=-1) / b.sum(axis=-1)) == (1.0, 1.0)


def test_many_samples_are_drawn_in_parts(monkeypatch):
    sizes, row = [], like_their_neighbours(seed=5, runs=1, n=100)[0]
    whole = block_interval([row], mean)
    monkeypatch.setattr(ours, "DRAWN_AT_ONCE", 5000)
    assert block_interval([row], lambda drawn: sizes.append(drawn.size) or mean(drawn)) == whole
    assert sum(sizes) == 2000 * 100 and max(sizes) <= 5000


@pytest.mark.parametrize(
    "rounds, wider",
    [
        (np.random.default_rng(1).normal(1, 0.1, 7), "few rounds"),
        (1 + like_their_neighbours(seed=6, runs=1, n=400, tie=0.95)[0] / 100, "like their neighbours"),
    ],
    ids=["few", "alike"],
)
def test_the_interval_of_paired_rounds_is_the_hull_of_both_kinds(rounds, wider):
    exact, blocks = median_interval(rounds), block_interval([rounds], lambda drawn: np.median(drawn, axis=-1))
    assert paired_interval(rounds) == (min(exact[0], blocks[0]), max(exact[1], blocks[1]))
    assert paired_interval(rounds) != (blocks if wider == "few rounds" else exact)


def test_a_quick_first_step_does_not_hide_the_slow_ones_after_it():
    assert find_warmup([1.0] + [9.0] * 4 + [1.0] * 20).dropped == 5


NOISE = st.floats(0.99, 1.01)


@settings(deadline=None)
@given(st.sampled_from([1, 3, 10]), st.data())
def test_a_planted_warmup_is_dropped_exactly(slow, data):
    first = data.draw(st.lists(st.floats(1.5, 1e4), min_size=slow, max_size=slow))
    rest = data.draw(st.lists(NOISE, min_size=30, max_size=60))
    found = find_warmup([*first, *rest])
    assert (found.dropped, found.steady) == (slow, True)


@pytest.mark.parametrize(
    "first, reason",
    [
        ([], "the first was like the rest"),
        ([5.0], "took 5x of a steady one"),
        ([5.0, 2.5, 1.5], "took 5x, 2.5x, 1.5x of a steady one"),
        ([300.0, 5.0, 2.5, 1.5], "took 300x, 5x, 2.5x, ... of a steady one"),
    ],
)
def test_the_reason_says_what_the_first_steps_took(first, reason):
    assert find_warmup([*first, *[1.0] * 20]).reason == reason


@pytest.mark.parametrize("last, change", [(2.0, "1.26x"), (0.5, "0.757x")])
def test_drift_is_not_steady(last, change):
    """From 1 to 2, the 76 steps after those dropped have halves with the medians 1.435 and 1.815."""
    found = find_warmup(np.linspace(1.0, last, 101))
    assert (found.dropped, found.steady) == (25, False)
    assert found.reason.endswith(f"; not steady yet: the last steps took {change} of those before")


def test_steps_that_get_slow_in_the_end_are_not_steady():
    reason = "the first was like the rest; not steady yet: the last steps took 1.5x of those before"
    assert find_warmup([1.0] * 20 + [1.5] * 10) == ours.Warmup(0, reason, steady=False)


@pytest.mark.parametrize("slow", [20, 25, 30])
def test_a_warmup_of_half_the_steps_is_not_steady(slow):
    found = find_warmup([2.0] * slow + [1.0] * 20)
    assert (found.dropped, found.steady) == ((slow + 20) // 2, False)
    assert found.reason == "took 2x, 2x, 2x, ... of a steady one; half of the steps were over before it was steady"


def test_noise_is_no_drift():
    assert find_warmup(np.random.default_rng(0).lognormal(0, 0.3, 200)) == ours.Warmup(0, "the first was like the rest")


@pytest.mark.parametrize(
    "n, dropped, steady", [(0, 0, False), (1, 1, False), (5, 1, False), (6, 1, True), (9, 1, True)]
)
def test_few_steps_lose_their_first(n, dropped, steady):
    found = find_warmup([1.0] * n)
    assert (found.dropped, found.steady) == (dropped, steady)
    assert "too few steps to see a warm-up" in found.reason


@given(st.floats(0, 1e3), st.integers(10, 50))
def test_steps_that_are_all_alike_lose_none(seconds, n):
    found = find_warmup([seconds] * n)
    assert (found.dropped, found.steady) == (0, True)


def with_stalls(places, n=200, stall=1.0):
    return [stall if i in places else 0.1 for i in range(n)]


def test_a_burst_has_no_period():
    """Every second step of thirty stalls, and none of the other two hundred."""
    assert find_stalls(with_stalls(range(100, 130, 2), n=230)).period is None


def test_a_stall_every_twentieth_step():
    """Ten stalls of 1.0 s where 0.1 s is typical: 9.0 s of the 29.0 s."""
    stalls = find_stalls(with_stalls(range(19, 200, 20)))
    assert stalls == Stalls(
        steps=tuple(range(19, 200, 20)), count=10, period=20.0, share=pytest.approx(9 / 29), worst=pytest.approx(10.0)
    )
    assert str(stalls) == (
        "about every 20 steps one stalls (up to 10x the median), 31.0% of the time, and the median hides it"
    )


@pytest.mark.parametrize(
    "places, period",
    [([10, 15, 21, 25, 30, 36], 5.0), ([10, 50, 93, 131, 171], 40.0), ([10, 20, 30, 40, 50, 75], 10.0)],
    ids=["by a step", "by a tenth", "once by much"],
)
def test_a_period_may_be_off(places, period):
    assert find_stalls(with_stalls(places, n=places[-1] + 9)).period == period


@pytest.mark.parametrize(
    "places", [[3, 50, 61, 150, 199], [10, 20, 30]], ids=["no two gaps alike", "three are too few to tell"]
)
def test_irregular_stalls_have_no_period(places):
    stalls = find_stalls(with_stalls(places))
    assert (stalls.count, stalls.period) == (len(places), None)
    assert str(stalls).startswith(f"{len(places)} steps stall (up to 10x the median)")


def test_four_stalls_are_enough_for_a_period():
    assert find_stalls(with_stalls([10, 40, 70, 100])).period == 30.0


def test_neighbours_are_one_stall_and_all_their_time_counts():
    stalls = find_stalls(with_stalls([10, 11, 12, 100]))
    assert stalls.count == 2
    assert stalls.share == pytest.approx(4 * 0.9 / (4 * 1.0 + 196 * 0.1))


def test_one_stall_is_spoken_of_as_one():
    assert str(find_stalls(with_stalls([50]))).startswith("1 step stalls")


@pytest.mark.parametrize(
    "samples",
    [[], [1.0], [1.0] * 50, [1.0, 2.0] * 50, with_stalls([50], stall=0.15), np.linspace(1, 2, 50)],
    ids=["none", "one", "alike", "two kinds of step", "less than 1.5 medians more", "a drift"],
)
def test_no_stalls(samples):
    assert find_stalls(samples) is None


@pytest.mark.parametrize(
    "samples, seconds, right",
    [
        ([32] * 3, [0.32, 0.33, 0.36], 96 / 1.01),  # 95.0495; the mean of the rates is 95.2862
        ([32] * 10, [0.1] * 9 + [1.1], 160.0),  # the mean of the rates is 290.9; the median's 320
        ([128] * 7 + [104], [0.1] * 8, 1250.0),  # 1280 with the last batch counted as full
    ],
)
def test_c61_throughput_is_all_samples_over_all_time(samples, seconds, right):
    assert throughput(samples, seconds) == pytest.approx(right, rel=1e-12)
    assert throughput(samples, seconds) <= np.mean(np.divide(samples, seconds)) + 1e-9


def test_c61_batches_counted_as_full_are_seven_percent_too_many():
    assert throughput([128] * 3, [1.0] * 3) / throughput([125, 112, 121], [1.0] * 3) - 1 == pytest.approx(
        0.0726, abs=5e-5
    )


@pytest.mark.parametrize(
    "samples, seconds",
    [
        ([], []),
        ([1, 2], [1.0]),
        ([1], [0.0]),
        ([1, 1], [-1.0, 2.0]),
        ([-1], [1.0]),
        ([math.nan], [1.0]),
        ([1], [math.nan]),
    ],
    ids=["none", "unequal", "no time", "negative time", "negative samples", "nan samples", "nan time"],
)
def test_throughput_takes_samples_and_seconds_of_each_step(samples, seconds):
    with pytest.raises(ValueError, match="a number of samples and seconds a step are expected"):
        throughput(samples, seconds)
