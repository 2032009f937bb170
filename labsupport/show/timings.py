"""Pictures of timings: the steps of a measurement, the rounds of a comparison."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from labsupport.measure import Comparison, Measurement
from labsupport.show.plots import BUSY, OTHER, WAITING, finished, plot
from labsupport.units import format_seconds, format_value


@plot.register
def plot_measurement(measurement: Measurement) -> Figure:
    """Each step in the order it ran, dropped ones hollow; beside it the steady ones sorted, on the same time axis.

    The axis belongs to the steady steps: what lies far from them stands at its edge, and the legend says how far.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 1), sharey=True, layout="constrained")
    _time_axis(left, [measurement])
    _in_order(left, measurement, "steady step", BUSY)
    _sorted(right, measurement, color=BUSY)
    p99_s = measurement.percentile_s(99)
    for axes in (left, right):
        axes.axhline(measurement.median_s, color="black", label=f"median {format_seconds(measurement.median_s)}")
        axes.axhline(p99_s, color="black", linestyle="--", label=f"p99 {format_seconds(p99_s)}")
    return _told(figure, measurement)


@plot.register
def plot_comparison(comparison: Comparison) -> Figure:
    """Each round's ratio in order, with the intervals that decide and the region that counts as the same.

    Measurements made apart have no rounds: there it draws the steps of each in order, and both sorted.
    """
    if not comparison.interleaved:
        return _apart(comparison)
    n, margin, ratios = comparison.n, comparison.margin, comparison.ratios
    total = (comparison.total_interval[0], comparison.total_ratio, comparison.total_interval[1])
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    low, high = np.quantile(ratios, [0.25, 0.75])
    reach = 1.5 * (high - low)  # Tukey's fences: beside one stalled round, margin and interval would be hairlines
    shown = [low - reach, high + reach, 1 - 1.5 * margin, 1 + 1.5 * margin, *comparison.interval, *total]
    _limit(axes, min(shown), max(shown), ratios, "x")
    axes.axhspan(*comparison.interval, color=BUSY, alpha=0.4, label="95 % interval of the median")
    _same(axes, 1 - margin, 1 + margin, f"counts as the same: 1 ± {margin:.3g}")
    axes.axhline(1, color="black", linestyle=":", label=f"above 1, {_short(comparison.b)} is faster")
    _points(axes, np.arange(1, n + 1), np.array(ratios), label="round", color=OTHER)
    axes.axhline(comparison.ratio, color=BUSY, label=f"median {comparison.ratio:.3f}x")
    label = f"over all time {comparison.total_ratio:.3f}x, 95 % interval"
    axes.plot([1.03 * n + 1] * 3, total, "-_", color=WAITING, linewidth=3, markersize=12, label=label)
    axes.set_xlabel("round, in the order they ran")
    axes.set_ylabel("ratio of times (x)")
    return _told(figure, comparison)


def _apart(comparison: Comparison) -> Figure:
    a, b, margin = comparison.a, comparison.b, comparison.margin
    figure, panels = plt.subplots(1, 3, figsize=(12, 4.4), sharey=True, layout="constrained")
    _time_axis(panels[0], [a, b])
    for axes in panels:
        _same(axes, a.median_s / (1 + margin), a.median_s / (1 - margin), f"counts as the same as {_short(a)}")
    for axes, each, color, line in zip(panels, (a, b), (OTHER, BUSY), ("--", "-"), strict=False):
        _in_order(axes, each, None, color)
        axes.axhline(each.median_s, color="black", label="median")
        title = textwrap.fill(f"{each.label}: median {format_seconds(each.median_s)}, n = {each.n}", 45)
        axes.set_title(title, loc="left", fontsize="medium", parse_math=False)
        _sorted(panels[2], each, color=color, linestyle=line, label=f"time of {_short(each)}")
    return _told(figure, comparison)


def _time_axis(axes: Any, shown: Sequence[Measurement]) -> None:
    """An axis of step times, of which the steady steps up to the 99th percentile take at least half."""
    steps = [time for each in shown for time in each.samples_s]
    medians = [each.median_s for each in shown]
    # At least 5 % of the median to either side: else the grain of the clock would look like noise.
    low = min([*steps, 0.95 * min(medians)])
    high = max([1.05 * max(medians), *(each.percentile_s(99) for each in shown)])
    dropped = [time for each in shown for time in each.dropped_s]
    _limit(axes, low, min(max([high, *steps]), high + (high - low)), [*dropped, *steps], "s")
    unit, per_s = next((pair for pair in (("s", 1.0), ("ms", 1e3)) if pair[1] * min(medians) >= 1), ("µs", 1e6))
    axes.yaxis.set_major_formatter(lambda seconds, _: f"{per_s * seconds:g}")
    axes.set_ylabel(f"step time ({unit})")


def _limit(axes: Any, low: float, high: float, values: Sequence[float], unit: str) -> None:
    """The axis from low to high, with some room; the legend tells how far values go beyond it."""
    bottom, top = low - 0.05 * (high - low), high + 0.05 * (high - low)
    axes.set_ylim(bottom, top)
    if beyond := [value for value in values if not bottom <= value <= top]:
        ends = dict.fromkeys(format_value(end, unit) for end in (min(beyond), max(beyond)))
        label = f"{len(beyond)} beyond the axis: {' to '.join(ends)}"
        axes.plot([], [], "^", color="black", fillstyle="none", markersize=5, label=label)


def _in_order(axes: Any, measurement: Measurement, label: str | None, color: str) -> None:
    """The dropped steps, the steady ones, and among these the stalled."""
    dropped, steps = np.array(measurement.dropped_s), np.array(measurement.samples_s)
    stalled = np.zeros(len(steps), dtype=bool)
    stalled[list(measurement.stalls.steps) if measurement.stalls else []] = True
    order = np.arange(1, len(dropped) + len(steps) + 1)
    before, after = order[: len(dropped)], order[len(dropped) :]
    _points(axes, before, dropped, label="dropped: warm-up", color=OTHER, fillstyle="none")
    _points(axes, after[~stalled], steps[~stalled], label=label, color=color)
    _points(axes, after[stalled], steps[stalled], label="stalled", color=WAITING, marker="D")
    axes.set_xlabel("step, in the order they ran")


def _points(axes: Any, order: np.ndarray, values: np.ndarray, *, marker: str = "o", **style: Any) -> None:
    """A dot a value; for each value beyond the axis a triangle at its edge."""
    bottom, top = axes.get_ylim()
    inside = (bottom <= values) & (values <= top)
    size = 5 if len(values) < 300 else 2.5 if len(values) < 3000 else 1
    if len(values):
        axes.plot(order[inside], values[inside], marker, markersize=size, **style)
    for where, edge, triangle in ((values > top, top, "^"), (values < bottom, bottom, "v")):
        if where.any():  # an unclipped line without points would spoil the layout
            edges = np.full(where.sum(), edge)
            axes.plot(order[where], edges, triangle, markersize=5, clip_on=False, **{**style, "label": None})


def _sorted(axes: Any, measurement: Measurement, **style: Any) -> None:
    """The share of the steps that took at most so long: the median cuts it at one half."""
    axes.ecdf(np.minimum(measurement.samples_s, axes.get_ylim()[1]), orientation="horizontal", **style)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("steps, sorted by time")


def _same(axes: Any, low: float, high: float, label: str) -> None:
    axes.axhspan(low, high, facecolor="none", edgecolor="#aaaaaa", hatch="//", label=label)


def _short(measurement: Measurement) -> str:
    """Its label, as the legend has room for it: names that begin alike often end differently."""
    return measurement.label if len(measurement.label) <= 20 else f"{measurement.label[:9]}…{measurement.label[-10:]}"


def _told(figure: Figure, result: Measurement | Comparison) -> Figure:
    """With the first and the last line of its text, which name all of it and the machine, and one legend."""
    lines = result.lines
    length, widest = len(lines[0]), int(12 * figure.get_figwidth())
    head = textwrap.fill(lines[0], min(widest, length // math.ceil(length / widest) + 20))  # rows about alike
    figure.suptitle(f"{head}\n{lines[-1]}", x=0.01, ha="left", fontsize="medium", parse_math=False)
    handles = {}
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    return finished(figure)
