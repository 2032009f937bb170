"""What is drawn of a measurement and of a comparison: where dots, lines and bands lie, and what they are called."""

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from samples import CPU

from labsupport.measure import Comparison, Measurement, compare_apart
from labsupport.measure.statistics import Warmup
from labsupport.show import plot

LONG = ("DataLoader(num_workers=0, pin_memory=False)", "DataLoader(num_workers=8, pin_memory=True)")
QUIET = (1.00e-3, 1.01e-3, 1.02e-3, 1.01e-3, 1.00e-3, 1.01e-3) * 10


def made(samples_s, dropped_s=(), label="step"):
    warmup = Warmup(len(dropped_s), "as in a test")
    return Measurement(label, tuple(samples_s), tuple(dropped_s), (), warmup, 0.0, CPU)


def compared(ratios, margin=0.01, b_s=1e-3, names=("A", "B")):
    a, b = (made(QUIET, label=name) for name in names)
    return Comparison(a, b, tuple((ratio * b_s, b_s) for ratio in ratios), margin, 2.0)


def lines(axes):
    """Label -> (xs, ys) of what is in the legend."""
    handles, labels = axes.get_legend_handles_labels()
    return {
        label: handle.get_data() for handle, label in zip(handles, labels, strict=True) if hasattr(handle, "get_data")
    }


def bands(axes):
    """Label -> (lower, upper) edge."""
    return {patch.get_label(): (patch.get_y(), patch.get_y() + patch.get_height()) for patch in axes.patches}


def at_the_edge(axes, marker):
    """The places of the triangles at the upper (^) or lower (v) edge."""
    found = [line for line in axes.lines if line.get_marker() == marker and len(line.get_xdata())]
    edge = axes.get_ylim()[marker == "^"]
    assert all((line.get_ydata() == edge).all() for line in found)
    return [int(x) for line in found for x in line.get_xdata()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def one_line(figure):
    return figure.get_suptitle().replace("\n", " ")


def test_steps_are_drawn_in_order_after_the_dropped_ones():
    left, right = plot(made(QUIET, [1.03e-3, 1.04e-3])).axes
    found = lines(left)
    assert [list(column) for column in found["dropped: warm-up"]] == [[1, 2], [1.03e-3, 1.04e-3]]
    assert list(found["steady step"][0]) == list(range(3, 63)) and tuple(found["steady step"][1]) == QUIET
    assert (left.get_xlabel(), left.get_ylabel()) == ("step, in the order they ran", "step time (ms)")


def test_dropped_steps_are_hollow():
    left, _ = plot(made(QUIET, [1.03e-3])).axes
    fills = {line.get_label(): line.get_fillstyle() for line in left.lines}
    assert (fills["dropped: warm-up"], fills["steady step"]) == ("none", "full")


def test_median_and_p99_cross_both_panels():
    measurement = made(QUIET)
    for axes in plot(measurement).axes:
        found = lines(axes)
        assert set(found["median 1.01 ms"][1]) == {measurement.median_s}
        assert set(found["p99 1.02 ms"][1]) == {measurement.percentile_s(99)}


def test_beside_them_the_steady_steps_are_sorted_on_the_same_axis():
    left, right = plot(made(QUIET, [0.5])).axes
    share, times = right.lines[0].get_data()
    assert left.get_ylim() == right.get_ylim() and share[-1] == 1
    assert times[share <= 0.5].max() == pytest.approx(1.01e-3)  # where the median cuts the curve
    assert times.max() == max(QUIET)


def test_a_long_warmup_stands_at_the_edge_and_the_steady_steps_fill_the_axis():
    figure = plot(made(QUIET, [0.8, 0.4, 1.02e-3]))
    left, _ = figure.axes
    assert left.get_ylim() == pytest.approx((0.95e-3, 1.07e-3), rel=0.01)  # 5 % of the median to either side
    assert at_the_edge(left, "^") == [1, 2]
    assert "2 beyond the axis: 400 ms to 800 ms" in legend(figure)


def test_steps_up_to_the_99th_percentile_fill_half_of_the_axis():
    steps = [*np.linspace(1e-3, 2e-3, 1000), 1.0]
    measurement = made(steps)
    bottom, top = plot(measurement).axes[0].get_ylim()
    assert (measurement.percentile_s(99) - min(steps)) / (top - bottom) > 0.45


def test_stalls_are_marked():
    steps = np.array(QUIET * 5)
    steps[20::50] = 5e-3
    measurement = made(steps)
    found = lines(plot(measurement).axes[0])
    assert list(found["stalled"][0]) == [21, 71, 121, 171, 221, 271] and set(found["stalled"][1]) == {5e-3}
    assert len(found["steady step"][0]) == 294 and measurement.stalls.count == 6


@pytest.mark.parametrize("longest, marked", [(2.4e-3, 0), (3.2e-3, 0), (3.3e-3, 1), (5e-3, 1)])
def test_a_step_is_marked_if_it_counts_as_a_stall(longest, marked):
    measurement = made([*np.linspace(1e-3, 2e-3, 1000), longest])  # upper quartile 1.75 ms, IQR 0.5 ms
    stalls = measurement.stalls
    assert (stalls.count if stalls else 0) == marked
    assert ("stalled" in legend(plot(measurement))) == bool(marked)


def test_rare_stalls_stand_at_the_edge():
    steps = np.array(QUIET * 5)
    steps[100] = 1.0
    figure = plot(made(steps))
    assert at_the_edge(figure.axes[0], "^") == [101] and "1 beyond the axis: 1.00 s" in legend(figure)


def test_what_is_not_there_is_not_in_the_legend():
    assert legend(plot(made(QUIET))) == ["steady step", "median 1.01 ms", "p99 1.02 ms"]


@pytest.mark.parametrize("scale, unit", [(1e-3, "µs"), (1, "ms"), (1e3, "s"), (1e6, "s")])
def test_the_axis_has_the_unit_of_the_median(scale, unit):
    left, _ = plot(made([scale * step for step in QUIET])).axes
    assert left.get_ylabel() == f"step time ({unit})"
    assert left.yaxis.get_major_formatter()(scale * 1e-3, 0) == ("1000" if scale == 1e6 else "1")


def test_the_title_is_the_text_of_the_measurement_with_its_machine():
    title = one_line(plot(made(QUIET, label="a step")))
    assert title.startswith("a step: median 1.01 ms, IQR") and "n = 60" in title
    assert title.endswith("AMD EPYC 9V74 (avx512_bf16), 2 threads, torch 2.14.1+cpu") and "(measured)" not in title


def test_rounds_are_drawn_in_order_with_what_decides():
    ratios = [1.19, 1.2, 1.21, 1.2, 1.19, 1.21] * 5
    comparison = compared(ratios)
    (axes,) = plot(comparison).axes
    found = lines(axes)
    assert list(found["round"][0]) == list(range(1, 31)) and list(found["round"][1]) == pytest.approx(ratios)
    assert set(found["median 1.200x"][1]) == {comparison.ratio} and set(found["above 1, B is faster"][1]) == {1}
    assert bands(axes)["95 % interval of the median"] == pytest.approx(comparison.interval)
    assert bands(axes)["counts as the same: 1 ± 0.01"] == pytest.approx((0.99, 1.01))
    low, high = comparison.total_interval
    assert tuple(found["over all time 1.200x, 95 % interval"][1]) == (low, comparison.total_ratio, high)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round, in the order they ran", "ratio of times (x)")


@pytest.mark.parametrize(
    "ratio, verdict",
    [
        (1.2, "B is faster than A"),
        (0.8, "B is slower than A"),
        (1.0, "B is as fast as A"),
        (1.01, "cannot tell whether"),
    ],
)
def test_the_title_of_a_comparison_is_its_verdict(ratio, verdict):
    title = one_line(plot(compared([ratio - 0.001, ratio, ratio + 0.001] * 4)))
    assert title.startswith(verdict) and "12 rounds" in title and title.endswith("torch 2.14.1+cpu")


def test_rounds_far_away_stand_at_the_edges():
    figure = plot(compared([1.0, 1.01, 0.99] * 8 + [9.0, 0.1]))
    (axes,) = figure.axes
    assert (at_the_edge(axes, "^"), at_the_edge(axes, "v")) == ([25], [26])
    assert "2 beyond the axis: 0.100x to 9.00x" in legend(figure)


def test_rounds_that_spread_evenly_are_all_inside():
    assert not [text for text in legend(plot(compared(np.linspace(0.9, 1.1, 50)))) if "beyond" in text]


def test_margin_and_both_intervals_are_always_in_the_picture():
    stalled = replace(compared([1.0] * 6), rounds=((1.05, 1.0),) * 24 + ((1.05, 15.0),))
    for comparison in (compared([3.0, 3.001, 3.002] * 4, margin=0.2), stalled):
        bottom, top = plot(comparison).axes[0].get_ylim()
        edges = [1 - comparison.margin, 1 + comparison.margin, *comparison.interval, *comparison.total_interval]
        assert bottom < min(edges) and max(edges) < top


def test_of_measurements_made_apart_the_steps_of_each_and_both_sorted():
    before, after = made(QUIET, [1.01e-3], "before"), made([2 * step for step in QUIET], (), "after")
    figure = plot(compare_apart(before, after, margin=0.1))
    first, second, both = figure.axes
    assert [axes.get_title(loc="left") for axes in (first, second)] == [
        "before: median 1.01 ms, n = 60",
        "after: median 2.02 ms, n = 60",
    ]
    assert [line.get_xdata()[-1] for line in both.lines] == [1, 1]
    assert [line.get_ydata().max() for line in both.lines] == [max(before.samples_s), max(after.samples_s)]
    assert {first.get_ylim(), second.get_ylim()} == {both.get_ylim()}
    assert "NOT INTERLEAVED" in one_line(figure)
    assert {"time of before", "time of after", "dropped: warm-up", "median"} <= set(legend(figure))


def test_apart_the_region_is_where_the_second_median_would_count_as_the_same():
    a = made(QUIET, label="A")
    for axes in plot(compare_apart(a, made(QUIET, label="B"), margin=0.1)).axes:
        low, high = bands(axes)["counts as the same as A"]
        assert (a.median_s / high, a.median_s / low) == pytest.approx((0.9, 1.1))


@pytest.mark.parametrize("length", [1, 130, 400])
def test_long_names_leave_the_title_inside_the_figure(length):
    names = ("a " * (length // 2) + "1", "b" * length + "2")
    figure = plot(compared([1.0, 1.01, 0.99] * 8, names=names))
    assert max(map(len, figure.get_suptitle().splitlines())) <= 120
    assert max(map(len, legend(figure))) < 50


def test_long_names_that_begin_alike_are_told_apart():
    found = legend(plot(compare_apart(*(made(QUIET, label=name) for name in LONG))))
    assert {"time of DataLoade…ory=False)", "time of DataLoade…mory=True)"} <= set(found)


def test_a_dollar_in_a_name_is_no_formula():
    assert not plot(compared([1.0] * 6, names=("$a", "$b")))._suptitle.get_parse_math()


def test_a_hundred_thousand_steps_are_all_drawn():
    left, right = plot(made(QUIET * 1700)).axes
    assert len(lines(left)["steady step"][0]) == 102_000 and right.lines[0].get_xdata()[-1] == 1


def test_six_equal_steps_can_be_drawn():
    left, _ = plot(made([1e-3] * 6)).axes
    assert left.get_ylim()[0] < 1e-3 < left.get_ylim()[1]


@pytest.mark.parametrize(
    "result",
    [
        made(QUIET, [0.8]),
        compared([1.0, 1.01, 0.99] * 8 + [9.0], names=LONG),
        compare_apart(made(QUIET, [0.8], LONG[0]), made(QUIET, [0.4], LONG[1])),
    ],
    ids=["measurement", "comparison", "apart"],
)
def test_title_panels_and_legend_lie_one_under_another(result):
    figure = plot(result)
    figure.draw_without_rendering()
    panels = [axes.get_tightbbox() for axes in figure.axes]
    title, below = figure._suptitle.get_window_extent(), figure.legends[0].get_window_extent()
    assert below.y0 >= 0 and below.y1 <= min(box.y0 for box in panels)
    assert max(box.y1 for box in panels) <= title.y0 and title.y1 <= figure.bbox.y1
    assert all(left.x1 <= right.x0 for left, right in zip(panels, panels[1:], strict=False))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in (*panels, title, below))
    assert min(axes.get_position().height for axes in figure.axes) > 0.4


@pytest.mark.parametrize("result", [made(QUIET), compared([1.0] * 6), replace(compared([1.0] * 6), rounds=())])
def test_pictures_are_closed_for_pyplot(result):
    plot(result)
    assert plt.get_fignums() == []
