"""The picture of the batch panel: a bar of bytes against the ceiling, and samples a second against the batch."""

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass

from labsupport.show.memory import STYLES
from labsupport.train.throughput import SHARE, Throughput
from labsupport.units import format_bytes

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT = 64, 736  # of bar and curve
BAR_TOP, BAR_HEIGHT = 62, 34
CURVE_TOP, CURVE_BOTTOM = 196, 356
MOST = 4096  # samples on the axis
BLUE, RED, GREEN, GREY, TEXT = "#0072B2", "#B00020", "#00604A", "#888888", "#222222"
# Lines over a colour say the same to those who do not tell colours apart: the hatches of the other pictures.
LINES = {
    "//": "M0 8 L8 0",
    "\\\\": "M0 0 L8 8",
    "xx": "M0 8 L8 0 M0 0 L8 8",
    "..": "M3 4 h2",
    "--": "M0 4 h8",
    "++": "M0 4 h8 M4 0 v8",
}


@dataclass(frozen=True)
class Shown:
    """What there is to see. `parts` are bytes by category at the peak; `largest` is the largest batch, None if memory
    does not rise; `remark` ends the title, `why_no_curve` stands in place of a curve, `problem` in place of a bar."""

    batch: int
    parts: Mapping[str, int]
    ceiling: int
    place: str
    largest: int | None
    throughput: Throughput | None = None
    measured_bytes: int | None = None
    measured_rate: float | None = None
    remark: str = ""
    why_no_curve: str = ""
    problem: str = ""

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.ceiling


def picture(shown: Shown) -> str:
    """An SVG on a white ground, for light and dark pages."""
    verdict = shown.problem or (
        f"{shown.batch} {'sample' if shown.batch == 1 else 'samples'}: {format_bytes(shown.needed)} of "
        f"{format_bytes(shown.ceiling)}, "
        f"{'it fits' if shown.fits else 'it does not fit'}{shown.remark}"
    )
    body = [_patterns(), _text(LEFT - 40, 28, _short(verdict), size=16, weight="bold", fill=_ink(shown))]
    if not shown.problem:
        body += _bar(shown)
    body += _curve(shown)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" style="max-width:100%"><title>{html.escape(verdict)}</title>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(body)}</svg>'
    )


def _ink(shown: Shown) -> str:
    return TEXT if shown.fits and not shown.problem else RED


def _bar(shown: Shown) -> list[str]:
    """The parts side by side, the ceiling, what is beyond it, and what was measured."""
    top = max(shown.needed, shown.ceiling, shown.measured_bytes or 0) * 1.04

    def x(nbytes: float) -> float:
        return LEFT - 40 + (RIGHT - LEFT + 40) * nbytes / top

    room = _rect(x(0), BAR_TOP, x(shown.ceiling) - x(0), BAR_HEIGHT, "#f4f4f4", stroke="#c8c8c8")
    out, at = [room], 0
    for name, nbytes in shown.parts.items():
        if nbytes:
            color, _ = STYLES[name]
            out.append(_rect(x(at), BAR_TOP, x(at + nbytes) - x(at), BAR_HEIGHT, color))
            out.append(_rect(x(at), BAR_TOP, x(at + nbytes) - x(at), BAR_HEIGHT, f"url(#h-{_id(name)})"))
            at += nbytes
    if not shown.fits:
        out.append(_rect(x(shown.ceiling), BAR_TOP - 4, x(at) - x(shown.ceiling), BAR_HEIGHT + 8, "url(#beyond)"))
    over = "" if shown.fits else f", {format_bytes(shown.needed - shown.ceiling)} too much"
    where = x(shown.ceiling)
    out.append(_line(where, BAR_TOP - 10, where, BAR_TOP + BAR_HEIGHT + 8, RED, width=2.5))
    anchor = "end" if where > WIDTH / 2 else "start"
    out.append(_text(where, BAR_TOP - 14, f"ceiling {format_bytes(shown.ceiling)}{over}", anchor=anchor, fill=RED))
    if shown.measured_bytes is not None:
        place, y = x(shown.measured_bytes), BAR_TOP + BAR_HEIGHT
        out.append(f'<path d="M{place:.1f} {y} l-7 12 h14 z" fill="{TEXT}" class="measured"/>')
        anchor = "end" if place > WIDTH / 2 else "start"
        out.append(
            _text(
                place + (-11 if anchor == "end" else 11),
                y + 14,
                f"measured {format_bytes(shown.measured_bytes)}",
                anchor=anchor,
            )
        )
    return out + _legend(shown)


def _legend(shown: Shown) -> list[str]:
    out, place, row = [], float(LEFT - 40), BAR_TOP + BAR_HEIGHT + 32
    for name, nbytes in shown.parts.items():
        if nbytes > shown.needed / 1000:
            label = f"{name} {format_bytes(nbytes)}"
            width = 24 + 7.3 * len(label)
            if place + width > RIGHT:
                place, row = float(LEFT - 40), row + 20
            color, _ = STYLES[name]
            out.append(_rect(place, row - 11, 14, 13, color, stroke=GREY))
            out.append(_rect(place, row - 11, 14, 13, f"url(#h-{_id(name)})"))
            out.append(_text(place + 19, row, label))
            place += width
    return out


def _curve(shown: Shown) -> list[str]:
    """Samples a second, on a logarithmic axis of samples."""
    out = [_line(LEFT, CURVE_BOTTOM, RIGHT, CURVE_BOTTOM, GREY)]
    for power in range(0, 13, 2):
        place = _x(2**power)
        out.append(_line(place, CURVE_BOTTOM, place, CURVE_BOTTOM + 5, GREY))
        out.append(_text(place, CURVE_BOTTOM + 19, str(2**power), anchor="middle"))
    out.append(_text((LEFT + RIGHT) / 2, HEIGHT - 8, "samples in a batch", anchor="middle"))
    if shown.largest is not None and shown.largest < MOST:
        place = _x(max(shown.largest, 1))
        out.append(
            _rect(place, CURVE_TOP - 14, RIGHT - place, CURVE_BOTTOM - CURVE_TOP + 14, "url(#beyond)", opacity=0.35)
        )
        out.append(_line(place, CURVE_TOP - 14, place, CURVE_BOTTOM, RED, width=2))
        left = place > WIDTH * 0.55
        label = f"largest batch here: {shown.largest}"
        out.append(
            _text(place + (-6 if left else 6), CURVE_TOP - 20, label, anchor="end" if left else "start", fill=RED)
        )
    elif shown.largest is not None:
        label = f"largest batch here: {shown.largest}, beyond this axis"
        out.append(_text(RIGHT, CURVE_TOP - 20, label, anchor="end"))
    if shown.throughput is None and shown.measured_rate is None:
        said = f"throughput: {shown.why_no_curve}"
        out.append(_text(LEFT + 12, (CURVE_TOP + CURVE_BOTTOM) / 2, said, size=13))
        return out
    return out + _rates(shown)


def _rates(shown: Shown) -> list[str]:
    curve = shown.throughput
    highest = max(curve.asymptote if curve else 0, shown.measured_rate or 0, *_measured(curve)) * 1.08

    def y(rate: float) -> float:
        return CURVE_BOTTOM - (CURVE_BOTTOM - CURVE_TOP) * rate / highest

    out = []
    step = 10 ** math.floor(math.log10(highest))
    step = next(each for each in (step / 5, step / 2, step, 2 * step, 5 * step) if highest / each <= 5)
    for index in range(int(highest / step) + 1):
        place = y(index * step)
        out.append(_line(LEFT, place, RIGHT, place, "#e4e4e4", width=1))
        out.append(_text(LEFT - 6, place + 4, f"{index * step:g}", anchor="end"))
    out.append(_text(LEFT - 40, CURVE_TOP - 20, "samples/s"))
    if curve:
        most = MOST if shown.largest is None else min(MOST, max(1, shown.largest))
        points = [each for power in range(8 * 12 + 1) if (each := 2 ** (power / 8)) < most] + [most]
        path = " ".join(f"{_x(each):.1f},{y(curve.samples_per_s(each)):.1f}" for each in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="2.5"/>')
        out += [_dot(_x(each.size), y(each.samples_per_s), 3.5, "white") for each in curve.timings]
        if 1 <= curve.knee <= most:
            place, high = _x(curve.knee), y(curve.samples_per_s(curve.knee))
            out.append(_line(place, high, place, CURVE_BOTTOM, GREEN, width=2, dash="5 4"))
            left = place > WIDTH * 0.75
            label = f"knee {curve.knee:.0f}: {SHARE:.0%} of what it tends to"
            out.append(
                _text(
                    place + (-6 if left else 6),
                    CURVE_BOTTOM - 10,
                    label,
                    anchor="end" if left else "start",
                    fill=GREEN,
                )
            )
        if shown.batch <= most:
            out.append(_dot(_x(shown.batch), y(curve.samples_per_s(shown.batch)), 6.5, BLUE))
    if shown.measured_rate is not None:
        at = _x(shown.batch), y(shown.measured_rate)
        out.append(f'<path d="M{at[0]:.1f} {at[1] - 9:.1f} l8 9 l-8 9 l-8 -9 z" fill="{TEXT}" class="measured"/>')
        flat = at[0] > WIDTH / 2  # a curve that still rises is below the dot on its left
        label, place = f"measured {shown.measured_rate:.0f} samples/s", min(at[0], RIGHT - 80)
        out.append(_text(place if flat else at[0] + 9, at[1] + 30, label, anchor="middle" if flat else "start"))
    return out


def _measured(curve: Throughput | None) -> list[float]:
    return [each.samples_per_s for each in curve.timings] if curve else [0.0]


def _x(samples: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log2(samples) / math.log2(MOST)


def _patterns() -> str:
    hatches = "".join(
        f'<pattern id="h-{_id(name)}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<path d="{LINES[hatch]}" stroke="white" stroke-width="1.3" fill="none"/></pattern>'
        for name, (_, hatch) in STYLES.items()
        if hatch in LINES
    )
    beyond = (
        '<pattern id="beyond" width="7" height="7" patternUnits="userSpaceOnUse">'
        f'<path d="M0 7 L7 0" stroke="{RED}" stroke-width="1.8" fill="none"/></pattern>'
    )
    none = "".join(
        f'<pattern id="h-{_id(name)}" width="8" height="8" patternUnits="userSpaceOnUse"></pattern>'
        for name, (_, hatch) in STYLES.items()
        if hatch not in LINES
    )
    return f"<defs>{hatches}{beyond}{none}</defs>"


def _id(name: str) -> str:
    return name.replace(" ", "-")


def _short(text: str) -> str:
    return text if len(text) < 84 else f"{text[:80]} ..."


def _rect(
    x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "none", opacity: float = 1
) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{fill}" '
        f'stroke="{stroke}" opacity="{opacity:g}"/>'
    )


def _dot(x: float, y: float, radius: float, fill: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{BLUE}" stroke-width="1.5"/>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, *, width: float = 1.2, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    path = f"M{x1:.1f} {y1:.1f} L{x2:.1f} {y2:.1f}"
    return f'<path d="{path}" stroke="{stroke}" stroke-width="{width}"{dashes} fill="none"/>'


def _text(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", fill: str = TEXT, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}" stroke="white" stroke-width="3" paint-order="stroke">{html.escape(text)}</text>'
    )
