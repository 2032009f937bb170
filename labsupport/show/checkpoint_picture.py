"""The picture of the checkpoint panel: the chain after the forward pass and at the peak; bytes and time by segments."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from labsupport.show.svg import BLUE, GREEN, GREY, RED, TEXT, line, pattern, rect, svg, text
from labsupport.units import format_bytes

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT = 24, 736  # of the chain
ROWS, ROW_HEIGHT = {"after the forward pass": 68, "at the peak": 124}, 26
TOP, BOTTOM = 226, 376  # of both curves
BYTES, TIMES = (64, 440), (520, 736)
KEPT, STORED, AGAIN, DONE = "kept input", "stored", "computed again", "gradients there"
FILLS = {STORED: "#9ecae1", AGAIN: "url(#again)", DONE: "#d9d9d9"}


@dataclass(frozen=True)
class Shown:
    """What there is to see. `blocks` are the segments' sizes and `worst` the one whose backward pass has the peak;
    `curves` are segments -> (kept, peak, compute) for every count, `measured` -> (kept, peak, time); `problem` stands
    in place of the chain."""

    depth: int
    segments: int
    blocks: Sequence[int]
    worst: int
    saved: int
    peak: int
    curves: Mapping[int, tuple[int, int, float]]
    measured: Mapping[int, tuple[int, int, float]]
    problem: str = ""

    @property
    def title(self) -> str:
        return (
            f"{self.depth} blocks in {self.segments} segments"
            if self.segments
            else f"{self.depth} blocks, no checkpoint"
        )

    @property
    def again(self) -> bool:
        """Whether the segment at the peak is one that is computed again: the last one never is."""
        return self.worst < len(self.blocks) - 1

    @property
    def event(self) -> str:
        if not self.segments:
            return "the backward pass begins"
        done = "has been computed again" if self.again else "was stored"
        return f"segment {self.worst + 1} of {self.segments} {done}"

    @property
    def inputs(self) -> int:
        """Kept inputs at the peak; the first segment's is the batch itself, and not counted."""
        return self.worst

    @property
    def behind(self) -> int:
        """Blocks whose gradients there are at the peak."""
        return sum(self.blocks[self.worst + 1 :])

    @property
    def best(self) -> tuple[int, int]:
        """The segments with the least kept, and those with the lowest peak."""
        least, lowest = (min(self.curves, key=lambda n: self.curves[n][which]) for which in (0, 1))
        return least, lowest


def picture(shown: Shown) -> str:
    """An SVG on a white ground, for light and dark pages."""
    title = shown.problem or (
        f"{shown.title}: {format_bytes(shown.saved)} kept, {format_bytes(shown.peak)} at the peak"
    )
    body = [text(LEFT, 28, title, size=16, weight="bold", fill=RED if shown.problem else TEXT)]
    if not shown.problem:
        body += _chain(shown)
    body += _bytes(shown) + _times(shown)
    again = pattern("again", "//", stroke=RED, ground="#fdd0a2")
    return svg(WIDTH, HEIGHT, title, [f"<defs>{again}</defs>", *body])


def _chain(shown: Shown) -> list[str]:
    """The blocks in two rows, from the batch on the left to the loss on the right."""
    last = len(shown.blocks) - 1
    states = {
        "after the forward pass": {last: STORED},
        "at the peak": dict.fromkeys(range(shown.worst + 1, last + 1), DONE)
        | {shown.worst: AGAIN if shown.again else STORED},
    }
    inputs = {"after the forward pass": last, "at the peak": shown.worst}
    step, out = (RIGHT - LEFT) / shown.depth, []
    for label, top in ROWS.items():
        out.append(text(LEFT, top - 6, label))
        start = 0
        for index, count in enumerate(shown.blocks):
            fill = FILLS.get(states[label].get(index, ""), "white")
            for block in range(start, start + count):
                out.append(rect(LEFT + block * step, top, step, ROW_HEIGHT, fill, stroke="#bbbbbb"))
            if 0 < index <= inputs[label]:
                out.append(rect(LEFT + start * step - 3, top - 4, 6, ROW_HEIGHT + 8, BLUE))
            start += count
    place = float(LEFT)
    for name, fill in {KEPT: BLUE, **FILLS}.items():
        out.append(rect(place, 165, 14, 13, fill, stroke=GREY))
        out.append(text(place + 19, 176, name))
        place += 42 + 7.3 * len(name)
    return out


def _bytes(shown: Shown) -> list[str]:
    """Kept and peak over the segments."""
    values = [value for each in (*shown.curves.values(), *shown.measured.values()) for value in each[:2]]
    high = max(values) * 1.06
    step = next(mib << 20 for mib in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**6) if high <= 5 * (mib << 20))
    out, x, y = _axes(shown, *BYTES, (0, high, step), lambda value: f"{value / (1 << 20):.0f} MiB")
    out.append(text(LEFT, TOP - 14, "kept after the forward pass", fill=BLUE))
    out.append(text(LEFT + 200, TOP - 14, "live at the peak", fill=RED))
    least, lowest = shown.best
    out += _curve(shown, 0, BLUE, x, y) + _curve(shown, 1, RED, x, y)
    for which, color, best, beside in ((0, BLUE, least, 20), (1, RED, lowest, -12)):
        place, at = x(best), y(shown.curves[best][which])
        out.append(f'<circle cx="{place:.1f}" cy="{at:.1f}" r="7" fill="none" stroke="{color}" stroke-width="1.5"/>')
        out.append(text(place, at + beside, f"least: {best}", anchor="middle", fill=color))
    return out


def _times(shown: Shown) -> list[str]:
    """Matrix products and measured time, over those without checkpoints."""
    values = [each[2] for each in (*shown.curves.values(), *shown.measured.values())]
    low, high = math.floor(10 * min(values) + 1e-9) / 10, max(1.4, *values) + 0.02
    step = next(each for each in (0.1, 0.2, 0.5, 1, 5, 1000) if high - low <= 5 * each)
    out, x, y = _axes(shown, *TIMES, (low, high, step), lambda value: f"{value:.1f}x")
    out.append(text(TIMES[0] - 52, TOP - 14, "products (line), measured time (diamonds)"))
    return out + _curve(shown, 2, GREEN, x, y)


Scale = Callable[[float], float]


def _axes(
    shown: Shown, left: int, right: int, values: tuple[float, float, float], label: Callable[[float], str]
) -> tuple[list[str], Scale, Scale]:
    """Axes with ticks, for values from low to high in steps; segments on a logarithmic one, "none" at its left end."""
    low, high, step = values
    most = max(shown.depth, 2)

    def x(segments: float) -> float:
        return left + 12 + (right - left - 24) * math.log2(max(segments, 1)) / math.log2(most)

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)

    out = [line(left, BOTTOM, right, BOTTOM, GREY)]
    for index in range(int((high - low) / step) + 1):
        value = low + index * step
        out.append(line(left, y(value), right, y(value), "#e4e4e4", width=1))
        out.append(text(left - 6, y(value) + 4, label(value), size=10, anchor="end"))
    for tick in [each for each in (1, 2, 4, 8, 16, 32) if each <= most]:
        out.append(text(x(tick), BOTTOM + 16, str(tick) if tick > 1 else "none", size=10, anchor="middle"))
    out.append(text((left + right) / 2, BOTTOM + 36, "segments", anchor="middle"))
    if not shown.problem:
        out.append(line(x(shown.segments), TOP, x(shown.segments), BOTTOM, TEXT, width=1.5, dash="4 4"))
    return out, x, y


def _curve(shown: Shown, which: int, color: str, x: Scale, y: Scale) -> list[str]:
    """The model's line, and what was measured as diamonds."""
    points = " ".join(f"{x(n):.1f},{y(each[which]):.1f}" for n, each in shown.curves.items())
    out = [f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>']
    for n, each in shown.measured.items():
        out.append(
            f'<path d="M{x(n):.1f} {y(each[which]) - 5:.1f} l5 5 l-5 5 l-5 -5 z" fill="{color}" class="measured"/>'
        )
    return out
