"""Verdicts, and measurements that were made apart."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import CPU

from labsupport.measure import Comparison, Measurement, compare_apart
from labsupport.measure.comparison import judge, verdict_of
from labsupport.measure.statistics import Warmup

STEADY = Warmup(0, "the first was like the rest")


def measurement(label, samples_s, **machine):
    return Measurement(label, tuple(samples_s), (), (), STEADY, 0.0, replace(CPU, **machine))


def interleaved(rounds, *, margin=0.01, seconds=10.0, **machine):
    a_s, b_s = zip(*rounds, strict=True)
    return Comparison(
        measurement("A", a_s, **machine), measurement("B", b_s, **machine), tuple(rounds), margin, seconds
    )


@pytest.mark.parametrize(
    "interval, verdict",
    [
        ((1.2, 1.3), "faster"),
        ((1.125, 1.3), "cannot tell"),  # on the border is not beyond it
        ((1.13, 1.3), "faster"),
        ((0.7, 0.8), "slower"),
        ((0.7, 0.875), "cannot tell"),
        ((0.7, 0.87), "slower"),
        ((0.9, 1.1), "same"),
        ((0.875, 1.1), "cannot tell"),
        ((0.9, 1.125), "cannot tell"),
        ((0.88, 1.12), "same"),
        ((0.8, 1.2), "cannot tell"),
        ((1.0, 1.0), "same"),
    ],
)
def test_the_verdict_of_an_interval(interval, verdict):
    assert verdict_of(interval, margin=0.125) == verdict


@pytest.mark.parametrize(
    "interval, total, verdict",
    [
        ((1.2, 1.3), (1.2, 1.3), "faster"),
        ((1.2, 1.3), (0.5, 1.125), "faster"),  # a total that reaches the border contradicts nothing
        ((1.2, 1.3), (0.5, 1.12), "cannot tell"),
        ((0.7, 0.8), (0.875, 2.0), "slower"),
        ((0.7, 0.8), (0.88, 2.0), "cannot tell"),
        ((0.9, 1.1), (0.5, 0.87), "cannot tell"),
        ((0.9, 1.1), (1.13, 2.0), "cannot tell"),
        ((0.9, 1.1), (0.5, 2.0), "same"),
        ((0.8, 1.2), (1.2, 1.3), "cannot tell"),
    ],
)
def test_a_total_wholly_elsewhere_takes_the_verdict_back(interval, total, verdict):
    assert judge(interval, total, margin=0.125) == verdict


INTERVALS = st.tuples(st.floats(0.01, 3), st.floats(0.01, 3)).map(sorted).map(tuple)


@given(INTERVALS, INTERVALS)
def test_the_other_way_round_faster_is_slower(interval, total):
    """Up to the margins, which as ratios are not each other's inverse: with none they are."""
    turned = {"faster": "slower", "slower": "faster"}
    inverse = [(1 / high, 1 / low) for low, high in (interval, total)]
    there, back = judge(interval, total, 1e-12), judge(*inverse, 1e-12)
    assert there == turned.get(back, back)


def test_figures_of_rounds_by_hand():
    compared = interleaved([(2.0, 1.0), (3.0, 1.0), (4.0, 1.0), (5.0, 1.0), (6.0, 1.0), (70.0, 3.0)])
    assert compared.ratios == (2.0, 3.0, 4.0, 5.0, 6.0, 70 / 3)
    assert (compared.ratio, compared.value, compared.unit, compared.n) == (4.5, 4.5, "x", 6)
    assert compared.total_ratio == 90 / 8
    assert compared.spread == pytest.approx((5.75 - 3.25) / 4.5)
    assert compared.names == ("A", "B") and compared.interleaved


@pytest.mark.parametrize(
    "a_s, verdict, sentence",
    [
        (
            2.0,
            "faster",
            "B is faster than A: time of A / time of B = 2.000x [2.000, 2.000], margin 1.0%, 30 rounds in 10.0 s",
        ),
        (0.5, "slower", "B is slower than A: time of A / time of B = 0.500x"),
        (1.0, "same", "B is as fast as A: time of A / time of B = 1.000x"),
    ],
)
def test_the_first_line_is_the_verdict(a_s, verdict, sentence):
    compared = interleaved([(a_s, 1.0)] * 30)
    assert compared.verdict == verdict and compared.warnings == ()
    assert repr(compared).startswith(sentence)


def test_the_repr_has_both_sides_and_the_machine_once():
    lines = repr(interleaved([(2.0, 1.0)] * 30)).splitlines()
    assert [line.split(",")[0].strip() for line in lines[1:]] == [
        "A: median 2.00 s", "B: median 1.00 s", "warnings: none (measured)", "AMD EPYC 9V74 (avx512_bf16)"
    ]  # fmt: skip
    assert all(line.endswith(" (measured)") and line.count("(measured)") == 1 for line in lines)


def test_a_notebook_shows_the_repr():
    compared = interleaved([(2.0, 1.0)] * 6)
    shown = compared._repr_mimebundle_(include=None)
    assert shown["text/plain"] == repr(compared)
    assert shown["application/vnd.labsupport.comparison+json"] == {"names": ["A", "B"]}


def test_stalls_that_turn_the_total_are_told():
    """Nineteen times in twenty B is twice as fast, and the twentieth time it takes a hundred times as long."""
    compared = interleaved([(2.0, 100.0 if i % 20 == 10 else 1.0) for i in range(200)])
    assert compared.ratio == 2.0 and compared.total_ratio < 0.5
    assert compared.verdict == "cannot tell"
    assert repr(compared).startswith("cannot tell whether B is faster or slower than A")
    (total,) = [warning for warning in compared.warnings if warning.startswith("by the median step")]
    assert total.startswith("by the median step B is faster, but over all time the ratio is 0.33")


def test_warnings_name_the_side():
    rounds = [(1.0 + 0.5 * (i % 2), 1.0) for i in range(40)]
    assert any(warning.startswith("A: the middle half") for warning in interleaved(rounds).warnings)
    assert not any(warning.startswith("B: ") for warning in interleaved(rounds).warnings)


def between(low, high, n=40):
    return [(ratio, 1.0) for ratio in np.random.default_rng(0).permutation(np.linspace(low, high, n))]


def advice(rounds, **options):
    compared = interleaved(rounds, **options)
    assert compared.verdict == "cannot tell"
    (found,) = [warning for warning in compared.warnings if warning.startswith("the interval crosses")]
    return found


@pytest.mark.parametrize("threads, profile, fewer", [(2, "cpu", True), (1, "cpu", False), (2, "cuda", False)])
def test_the_advice_when_it_cannot_tell(threads, profile, fewer):
    found = advice(between(0.99, 1.025), threads=threads, profile=profile)
    assert found.startswith("the interval crosses the margin; quieten the machine")
    assert ("use one thread" in found) is fewer


def test_half_the_interval_takes_four_times_as_long():
    """The upper end is 0.008 from the median, the margin 0.004."""
    rounds = [(ratio, 1.0) for ratio in (1.0, 1.004, 1.006, 1.006, 1.008, 1.014)]
    assert advice(rounds, seconds=10.0).endswith("; max_time_s=40 might tell")


def test_what_lies_on_the_margin_takes_forever():
    assert advice(between(1.0, 1.02)).endswith("; more time will hardly tell")


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.97, 1.04), min_size=6, max_size=25))
def test_the_time_advised_is_longer_than_the_time_taken(ratios):
    compared = interleaved([(ratio, 1.0) for ratio in ratios], seconds=8.0)
    found = [warning for warning in compared.warnings if "max_time_s=" in warning]
    for warning in found:
        assert float(warning.split("max_time_s=")[1].split()[0]) >= 8.0


def test_a_skewed_interval_advises_no_shorter_time():
    """The median lies near the lower end, the border near the upper one: the half-width knows neither."""
    assert float(advice([(r, 1.0) for r in (1.0, 1.0, 1.001, 1.001, 1.002, 1.011)]).split("=")[1].split()[0]) >= 10.0


RANDOM = np.random.default_rng(0)


def test_apart_the_ratio_is_that_of_the_medians_and_of_all_time():
    compared = compare_apart(measurement("before", [3.0] * 9 + [6.0]), measurement("after", [2.0] * 9 + [2.5]))
    assert (compared.ratio, compared.total_ratio) == (1.5, pytest.approx(33 / 20.5))
    assert (compared.verdict, compared.n, compared.interleaved, compared.margin) == ("faster", 10, False, 0.05)


def test_apart_is_said_wherever_it_is_printed():
    compared = compare_apart(measurement("before", [3.0] * 9), measurement("after", [2.0] * 9))
    assert "margin 5.0%, NOT INTERLEAVED" in repr(compared).splitlines()[0]
    assert "not interleaved: all that changed between the two runs is in the ratio" in compared.warnings[0]


def test_apart_what_scatters_more_has_a_wider_interval():
    calm, wild = (measurement(str(s), RANDOM.normal(1, s, 200)) for s in (0.001, 0.05))
    narrow, wide = compare_apart(calm, calm).interval, compare_apart(calm, wild).interval
    assert wide[1] - wide[0] > 5 * (narrow[1] - narrow[0])


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=30), st.lists(st.floats(0.1, 10), min_size=6, max_size=30))
def test_apart_the_interval_holds_the_ratio(a_s, b_s):
    compared = compare_apart(measurement("a", a_s), measurement("b", b_s))
    low, high = compared.interval
    assert low <= compared.ratio * (1 + 1e-9) and compared.ratio <= high * (1 + 1e-9)


def test_apart_a_quotients_interval_by_hand():
    """As logarithms, A reaches 0.3 down and 0.8 up, B 0.6 down and 0.4 up; B's top is the quotient's bottom."""
    a_s = [math.exp(x) for x in (-0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.8)]
    b_s = [math.exp(x) for x in (-0.6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.4)]
    low, high = compare_apart(measurement("a", a_s), measurement("b", b_s)).interval
    assert (math.log(low), math.log(high)) == (pytest.approx(-0.5), pytest.approx(1.0))


UNLIKE = {
    "device": "NVIDIA H200",
    "compute_capability": "9.0",
    "cpu_model": "Intel",
    "isa": "avx2",
    "cores": 4.0,
    "threads": 1,
}


@pytest.mark.parametrize("name", UNLIKE)
def test_apart_unlike_machines_are_refused_by_what_differs(name):
    after = measurement("after", [1.0] * 9, **{name: UNLIKE[name]})
    change = f"{name} {getattr(CPU, name)} -> {UNLIKE[name]}"
    with pytest.raises(ValueError, match="on unlike machines .*: measure both on one machine") as refused:
        compare_apart(measurement("before", [1.0] * 9), after)
    assert f"({change})" in str(refused.value)


@pytest.mark.parametrize(
    "name, new", [("torch", "2.15.0"), ("driver", "570"), ("tf32", "tf32"), ("os", "Linux 6.2 x86_64")]
)
def test_apart_other_changes_are_warned_of(name, new):
    compared = compare_apart(measurement("before", [1.0] * 9), measurement("after", [1.0] * 9, **{name: new}))
    assert f"between the runs, {name} {getattr(CPU, name)} -> {new}" in compared.warnings


def test_apart_equal_labels_get_told_apart():
    same = measurement("step", [1.0] * 9)
    assert compare_apart(same, same).names == ("step before", "step after")
    assert compare_apart(same, replace(same, label="new")).names == ("step", "new")


@pytest.mark.parametrize("margin", [0, -0.1, 1, 5.0, math.nan, None])
def test_apart_a_margin_between_0_and_1_is_expected(margin):
    with pytest.raises(ValueError, match="margin"):
        compare_apart(measurement("before", [1.0] * 9), measurement("after", [1.0] * 9), margin=margin)
