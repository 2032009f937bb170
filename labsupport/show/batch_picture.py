"""The picture of the batch panel: a bar of bytes against the ceiling, and samples a second against the batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from labsupport.show.memory import STYLES
from labsupport.show.svg import BLUE, GREEN, GREY, RED, TEXT, dot, line, pattern, rect, svg, text
from labsupport.train.throughput import SHARE, Throughput
from labsupport.units import format_bytes

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT = 64, 736  # of bar and curve
BAR_TOP, BAR_HEIGHT = 62, 34
CURVE_TOP, CURVE_BOTTOM = 196, 356
MOST = 4096  # samples on the axis


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
    body = [_patterns(), text(LEFT - 40, 28, _short(verdict), size=16, weight="bold", fill=_ink(shown))]
    if not shown.problem:
        body += _bar(shown)
    body += _curve(shown)
    return svg(WIDTH, HEIGHT, verdict, body)


def _ink(shown: Shown) -> str:
    return TEXT if shown.fits and not shown.problem else RED


def _bar(shown: Shown) -> list[str]:
    """The parts side by side, the ceiling, what is beyond it, and what was measured."""
    top = max(shown.needed, shown.ceiling, shown.measured_bytes or 0) * 1.04

    def x(nbytes: float) -> float:
        return LEFT - 40 + (RIGHT - LEFT + 40) * nbytes / top

    room = rect(x(0), BAR_TOP, x(shown.ceiling) - x(0), BAR_HEIGHT, "#f4f4f4", stroke="#c8c8c8")
    out, at = [room], 0
    for name, nbytes in shown.parts.items():
        if nbytes:
            color, _ = STYLES[name]
            out.append(rect(x(at), BAR_TOP, x(at + nbytes) - x(at), BAR_HEIGHT, color))
            out.append(rect(x(at), BAR_TOP, x(at + nbytes) - x(at), BAR_HEIGHT, f"url(#h-{_id(name)})"))
            at += nbytes
    if not shown.fits:
        out.append(rect(x(shown.ceiling), BAR_TOP - 4, x(at) - x(shown.ceiling), BAR_HEIGHT + 8, "url(#beyond)"))
    over = "" if shown.fits else f", {format_bytes(shown.needed - shown.ceiling)} too much"
    where = x(shown.ceiling)
    out.append(line(where, BAR_TOP - 10, where, BAR_TOP + BAR_HEIGHT + 8, RED, width=2.5))
    anchor = "end" if where > WIDTH / 2 else "start"
    out.append(text(where, BAR_TOP - 14, f"ceiling {format_bytes(shown.ceiling)}{over}", anchor=anchor, fill=RED))
    if shown.measured_bytes is not None:
        place, y = x(shown.measured_bytes), BAR_TOP + BAR_HEIGHT
        out.append(f'<path d="M{place:.1f} {y} l-7 12 h14 z" fill="{TEXT}" class="measured"/>')
        anchor = "end" if place > WIDTH / 2 else "start"
        out.append(
            text(
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
            out.append(rect(place, row - 11, 14, 13, color, stroke=GREY))
            out.append(rect(place, row - 11, 14, 13, f"url(#h-{_id(name)})"))
            out.append(text(place + 19, row, label))
            place += width
    return out


def _curve(shown: Shown) -> list[str]:
    """Samples a second, on a logarithmic axis of samples."""
    out = [line(LEFT, CURVE_BOTTOM, RIGHT, CURVE_BOTTOM, GREY)]
    for power in range(0, 13, 2):
        place = _x(2**power)
        out.append(line(place, CURVE_BOTTOM, place, CURVE_BOTTOM + 5, GREY))
        out.append(text(place, CURVE_BOTTOM + 19, str(2**power), anchor="middle"))
    out.append(text((LEFT + RIGHT) / 2, HEIGHT - 8, "samples in a batch", anchor="middle"))
    if shown.largest is not None and shown.largest < MOST:
        place = _x(max(shown.largest, 1))
        out.append(
            rect(place, CURVE_TOP - 14, RIGHT - place, CURVE_BOTTOM - CURVE_TOP + 14, "url(#beyond)", opacity=0.35)
        )
        out.append(line(place, CURVE_TOP - 14, place, CURVE_BOTTOM, RED, width=2))
        left = place > WIDTH * 0.55
        label = f"largest batch here: {shown.largest}"
        out.append(
            text(place + (-6 if left else 6), CURVE_TOP - 20, label, anchor="end" if left else "start", fill=RED)
        )
    elif shown.largest is not None:
        label = f"largest batch here: {shown.largest}, beyond this axis"
        out.append(text(RIGHT, CURVE_TOP - 20, label, anchor="end"))
    if shown.throughput is None and shown.measured_rate is None:
        said = f"throughput: {shown.why_no_curve}"
        out.append(text(LEFT + 12, (CURVE_TOP + CURVE_BOTTOM) / 2, said, size=13))
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
        out.append(line(LEFT, place, RIGHT, place, "#e4e4e4", width=1))
        out.append(text(LEFT - 6, place + 4, f"{index * step:g}", anchor="end"))
    out.append(text(LEFT - 40, CURVE_TOP - 20, "samples/s"))
    if curve:
        most = MOST if shown.largest is None else min(MOST, max(1, shown.largest))
        points = [each for power in range(8 * 12 + 1) if (each := 2 ** (power / 8)) < most] + [most]
        path = " ".join(f"{_x(each):.1f},{y(curve.samples_per_s(each)):.1f}" for each in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="2.5"/>')
        out += [dot(_x(each.size), y(each.samples_per_s), 3.5, "white") for each in curve.timings]
        if 1 <= curve.knee <= most:
            place, high = _x(curve.knee), y(curve.samples_per_s(curve.knee))
            out.append(line(place, high, place, CURVE_BOTTOM, GREEN, width=2, dash="5 4"))
            left = place > WIDTH * 0.75
            label = f"knee {curve.knee:.0f}: {SHARE:.0%} of what it tends to"
            out.append(
                text(
                    place + (-6 if left else 6),
                    CURVE_BOTTOM - 10,
                    label,
                    anchor="end" if left else "start",
                    fill=GREEN,
                )
            )
        if shown.batch <= most:
            out.append(dot(_x(shown.batch), y(curve.samples_per_s(shown.batch)), 6.5, BLUE))
    if shown.measured_rate is not None:
        at = _x(shown.batch), y(shown.measured_rate)
        out.append(f'<path d="M{at[0]:.1f} {at[1] - 9:.1f} l8 9 l-8 9 l-8 -9 z" fill="{TEXT}" class="measured"/>')
        flat = at[0] > WIDTH / 2  # a curve that still rises is below the dot on its left
        label, place = f"measured {shown.measured_rate:.0f} samples/s", min(at[0], RIGHT - 80)
        out.append(text(place if flat else at[0] + 9, at[1] + 30, label, anchor="middle" if flat else "start"))
    return out


def _measured(curve: Throughput | None) -> list[float]:
    return [each.samples_per_s for each in curve.timings] if curve else [0.0]


def _x(samples: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log2(samples) / math.log2(MOST)


def _patterns() -> str:
    hatches = (pattern(f"h-{_id(name)}", hatch) for name, (_, hatch) in STYLES.items())
    return f"<defs>{''.join(hatches)}{pattern('beyond', '//', stroke=RED, width=1.8)}</defs>"


def _id(name: str) -> str:
    return name.replace(" ", "-")


def _short(text: str) -> str:
    return text if len(text) < 84 else f"{text[:80]} ..."
