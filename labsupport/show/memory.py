"""Pictures of memory: where the bytes were at the peak and over a loop, and what a plan predicts."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from labsupport.measure.categories import CATEGORIES
from labsupport.measure.live import Timeline
from labsupport.measure.memory import MemoryLedger
from labsupport.show.plots import finished, plot
from labsupport.train.plan import MemoryPlan
from labsupport.units import format_bytes, parse_bytes

# Okabe and Ito's eight, and white for what no tensor shows; the hatching says the same without colour.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#999999", "#56B4E9", "#D55E00", "#F0E442", "#CC79A7", "#FFFFFF")
HATCHES = ("", "//", "\\\\", "xx", "..", "", "--", "++", "")
STYLES = {name: (color, hatch) for name, color, hatch in zip(CATEGORIES, COLORS, HATCHES, strict=True)}


@plot.register
def plot_ledger(ledger: MemoryLedger, *, by_module: bool = False) -> Figure:
    """Live bytes by category: at the peak, and over all allocations and releases, with the phases of the steps.
    With `by_module` a bar for each module at the peak instead."""
    if not ledger.peak_bytes:
        return _nothing()
    if by_module:
        return _modules(ledger)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 3), layout="constrained")
    timeline, parts = ledger.timeline(), ledger.at_peak()
    least = ledger.peak_bytes / 1000  # the four bytes of a loss need no colour
    shown = [name for name in CATEGORIES if max(parts[name], timeline.bytes_of[name].max()) > least]
    _bars(left, {name: parts[name] for name in shown})
    left.set_title(f"At the peak: {format_bytes(ledger.peak_bytes)}", loc="left")
    _areas(right, timeline, shown)
    right.set_title("Allocations and releases, in order", loc="left")
    return finished(figure)


def _nothing() -> Figure:
    figure, axes = plt.subplots(figsize=(5, 1))
    axes.text(0.5, 0.5, "no tensor was seen", ha="center")
    axes.axis("off")
    return finished(figure)


def _bars(axes: Any, parts: dict[str, int]) -> None:
    for row, (name, nbytes) in enumerate(parts.items()):
        color, hatch = STYLES[name]
        axes.barh(row, nbytes, color=color, hatch=hatch, edgecolor="white" if color != "#FFFFFF" else "black")
        axes.annotate(format_bytes(nbytes), (nbytes, row), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(parts)), list(parts))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(parts.values(), default=1))
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _modules(ledger: MemoryLedger) -> Figure:
    table = ledger.by_module()
    figure, axes = plt.subplots(figsize=(9, 0.3 * len(table) + 1.2), layout="constrained")
    left = np.zeros(len(table))
    for name in CATEGORIES:
        widths = np.array([parts.get(name, 0) for parts in table.values()])
        if widths.any():
            color, hatch = STYLES[name]
            axes.barh(range(len(table)), widths, left=left, color=color, hatch=hatch, edgecolor="white", label=name)
            left += widths
    for row, total in enumerate(left):
        axes.annotate(format_bytes(total), (total, row), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(table)), [module or "outside of modules" for module in table])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(left, default=1))
    axes.xaxis.set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title("At the peak, by the module that made it", loc="left")
    return finished(figure)


def _areas(axes: Any, timeline: Timeline, names: list[str]) -> None:
    total = timeline.total
    areas = axes.stackplot(
        np.arange(len(total)), *(timeline.bytes_of[name] for name in names), step="post", labels=names
    )
    for area, name in zip(areas, names, strict=True):
        color, hatch = STYLES[name]
        area.set(facecolor=color, hatch=hatch, edgecolor="white", linewidth=0)
    axes.plot(timeline.peak, total[timeline.peak], "v", color="black", label="peak")
    _phases(axes, timeline)
    axes.set_xlim(timeline.phases[0][0] if timeline.phases else 0, len(total) - 1)  # before it, what was there is told
    axes.set_ylim(0, 1.15 * total.max())
    _bytes_axis(axes)
    axes.set_xlabel("allocations and releases")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, reverse=True)
    axes.spines[["top", "right"]].set_visible(False)


def _phases(axes: Any, timeline: Timeline) -> None:
    """A line where a phase begins, and its name where there is room for one."""
    ends = [start for start, _ in timeline.phases[1:]] + [len(timeline.total) - 1]
    for (start, phase), end in zip(timeline.phases, ends, strict=True):
        axes.axvline(start, color="black", linewidth=0.6, linestyle=":")
        if end - start > 0.07 * len(timeline.total):
            axes.annotate(phase, ((start + end) / 2, 0.97), xycoords=("data", "axes fraction"), ha="center", fontsize=7)


@plot.register
def plot_plan(plan: MemoryPlan, *, up_to: int = 256, budget: int | str | None = None) -> Figure:
    """The predicted peak for 2 samples to `up_to`, the lines it is the maximum of, and a ceiling ("512MiB")."""
    if up_to < 2:
        raise ValueError(f"up_to: 2 samples or more are expected, got {up_to}")
    ceiling = None if budget is None else parse_bytes(budget)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    batches = np.arange(2, up_to + 1)
    for index, moment in enumerate(plan.moments):
        label = None if index else "a moment of the step"
        axes.plot(batches, moment.fixed + moment.per_sample * batches, color="#999999", linewidth=0.8, label=label)
    axes.plot(batches, [plan.peak_bytes(int(batch)) for batch in batches], color="#0072B2", linewidth=2.5, label="peak")
    if ceiling is not None:
        axes.axhline(ceiling, color="#D55E00", linestyle="--", label=f"ceiling {format_bytes(ceiling)}")
    axes.set_xlim(0, up_to)
    axes.set_ylim(0, 1.1 * max(plan.peak_bytes(up_to), ceiling or 0))
    _bytes_axis(axes)
    axes.set_xlabel("samples in a batch")
    axes.set_title(f"{plan.workload}: {'estimate for CUDA' if plan.target == 'cuda' else 'on a CPU'}", loc="left")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return finished(figure)


def _bytes_axis(axes: Any) -> None:
    """Ticks at round numbers of KiB, MiB or GiB: powers of two, about five of them."""
    step = 2.0 ** round(np.log2(max(axes.get_ylim()[1], 8) / 5))
    axes.yaxis.set_major_locator(MultipleLocator(step))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
