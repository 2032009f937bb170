"""Intervals of a median that assume no distribution, and ratios of things timed in turns."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labsupport.measure import PairedRatio, median_interval
from labsupport.measure.statistics import LEAST_SAMPLES

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
