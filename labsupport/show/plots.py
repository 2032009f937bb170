"""Pictures of what was measured, with matplotlib. Colours come from the Okabe-Ito set, and hatching says the same."""

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from labsupport.machine import Accelerator
from labsupport.measure.roofline import Ceilings
from labsupport.units import format_value

BUSY, WAITING, OTHER = "#0072B2", "#E69F00", "#999999"


@singledispatch
def plot(result: Any, **options: Any) -> Figure:
    """The picture of a result. Raises TypeError for one that has none."""
    raise TypeError(f"no picture for {type(result).__name__}; there are pictures for {', '.join(_drawn())}")


def _drawn() -> list[str]:
    return [kind.__name__ for kind in plot.registry if kind is not object]


def timeline(lanes: Mapping[str, Sequence[tuple[float, float]]], *, window_s: float | None = None) -> Figure:
    """Steps on a time axis, a lane a loop: each step is (seconds waited for data, seconds of compute).

    `window_s` cuts all lanes at the same moment (default: where the shortest ends), so that the eye compares work
    done in the same time. Raises ValueError when a lane has no step.
    """
    if not lanes or not all(lanes.values()):
        raise ValueError("each lane needs at least one (waited_s, computed_s) step")
    window_s = window_s or min(sum(wait + work for wait, work in steps) for steps in lanes.values())
    figure, axes = plt.subplots(figsize=(8, 0.8 * len(lanes) + 1.2), layout="constrained")
    for row, steps in enumerate(lanes.values()):
        waits, works, now = [], [], 0.0
        for wait, work in steps:
            waits.append((now, min(wait, max(0.0, window_s - now))))
            works.append((now + wait, max(0.0, min(work, window_s - now - wait))))
            now += wait + work
            if now >= window_s:
                break
        axes.broken_barh(
            [(1e3 * t, 1e3 * d) for t, d in waits],
            (row - 0.35, 0.7),
            facecolor=WAITING,
            hatch="///",
            edgecolor="white",
            label="waiting for data" if row == 0 else None,
        )
        axes.broken_barh(
            [(1e3 * t, 1e3 * d) for t, d in works],
            (row - 0.35, 0.7),
            facecolor=BUSY,
            label="computing" if row == 0 else None,
        )
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * window_s)
    axes.set_xlabel("milliseconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.28), ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return finished(figure)


@plot.register
def plot_ceilings(ceilings: Ceilings, *, beside: Mapping[str, Accelerator] | None = None) -> Figure:
    """Measured matmul rates and memory bandwidth, beside the vendors' peaks of some accelerators.

    Logarithmic axes: the distance between a laptop and a data-centre card is a factor, not a difference.
    """
    rates = ("fp32", "tf32", "fp16", "bf16")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
    measured = {r.name: r for r in ceilings.readings}
    dots = [(f"measured {key}", measured[f"matmul_{key}"].value, BUSY) for key in rates if f"matmul_{key}" in measured]
    for name, card in (beside or {}).items():
        peaks = [(f"{name} {key} (sheet)", card.flops_per_s(key)) for key in rates]
        dots += [(label, peak, OTHER) for label, peak in peaks if peak]
    _dots(left, dots, "FLOP/s", "Matrix product")
    on_cpu = ceilings.machine.profile == "cpu"  # there the device's memory is the host's
    names = [r.name for r in ceilings.readings if r.unit == "B/s" and not (on_cpu and r.name == "device_copy")]
    copies = [(f"measured {name}", measured[name].value, BUSY) for name in names]
    copies += [(f"{name} memory (sheet)", 1e9 * card.bandwidth_gbs, OTHER) for name, card in (beside or {}).items()]
    _dots(right, copies, "B/s", "Bytes")
    return finished(figure)


def _dots(axes: Any, dots: list[tuple[str, float, str]], unit: str, title: str) -> None:
    """A dot a value: on a logarithmic axis a bar has no zero to start from. Rings are from sheets."""
    for row, (_, value, color) in enumerate(dots):
        axes.plot(value, row, "o", color=color, fillstyle="none" if color == OTHER else "full", markersize=8)
        axes.annotate(format_value(value, unit), (value, row), xytext=(9, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(dots)), [label for label, _, _ in dots])
    axes.invert_yaxis()
    axes.set_xscale("log")
    low, high = min(value for _, value, _ in dots), max(value for _, value, _ in dots)
    axes.set_xlim(low / 3, high * 400)  # room for the text beside the last dot
    axes.xaxis.set_major_locator(LogLocator(base=10, numticks=20))
    axes.minorticks_off()
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def finished(figure: Figure) -> Figure:
    """Closed for pyplot, so that a notebook shows it once: as the value of its cell."""
    plt.close(figure)
    return figure
