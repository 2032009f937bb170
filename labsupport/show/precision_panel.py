"""The precision panel: gradients against the range of a format, and what a loss scale does about it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from labsupport.measure.storages import tensors_in
from labsupport.show.svg import BLUE, GREY, RED, TEXT, line, pattern, rect, svg, text
from labsupport.show.widgets import Panel, Values, choice, slider


@dataclass(frozen=True)
class Format:
    """A floating-point format by its bits, as IEEE 754 counts them: a hidden one, subnormals, an infinity."""

    name: str
    exponent_bits: int
    fraction_bits: int

    @property
    def highest(self) -> int:
        """The largest numbers lie between 2 to this and twice that."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def lowest(self) -> int:
        """2 to this is the smallest normal number."""
        return 1 - self.highest

    @property
    def least(self) -> int:
        """2 to this is the smallest number of all, a subnormal one."""
        return self.lowest - self.fraction_bits

    def fates(self, exact: torch.Tensor) -> dict[str, torch.Tensor]:
        """Which of these numbers (float64, none of them 0) becomes what when it is rounded to the nearest, ties to
        even: masks by fate, which exclude each other."""
        size = exact.abs()
        zero = size <= 2.0 ** (self.least - 1)  # half of the smallest is a tie, and 0 is even
        over = size >= (2 - 2.0 ** -(self.fraction_bits + 1)) * 2.0**self.highest
        # Just below the smallest normal number, rounding may reach it.
        normal = (size >= 2.0**self.lowest - 2.0 ** (self.least - 1)) & ~over
        return {"zero": zero, "subnormal": ~zero & ~normal & ~over, "normal": normal, "overflow": over}


FORMATS = {each.name: each for each in (Format("fp32", 8, 23), Format("tf32", 8, 10), Format("bf16", 8, 7))}
FORMATS["fp16"] = Format("fp16", 5, 10)
SCALES = [(f"2^{power}", 2**power) for power in range(33)]
# Fate -> colour, label, hatch; the hatch says the same as the colour.
FATES = {
    "zero": (GREY, "becomes zero", "xx"),
    "subnormal": ("#D9822B", "subnormal: fewer digits", "//"),
    "normal": (BLUE, "normal", ""),
    "overflow": (RED, "overflows: infinite", "\\\\"),
}
WIDTH, HEIGHT, LEFT, RIGHT = 760, 372, 66, 736
TOP, BOTTOM = 62, 214  # of the histogram
LOWEST, HIGHEST = -64, 40  # powers of two on the axis; what lies beyond is drawn at its end


@dataclass(frozen=True)
class Fates:
    """What a format makes of scaled gradients: counts by fate, and by fate and power of two.

    `zeros` were zero from the start. `safe` is the largest k for which none overflows at a scale of 2^k; it may be
    negative.
    """

    format: Format
    scale: int
    counts: Mapping[str, int]
    bins: Mapping[str, Mapping[int, int]]
    zeros: int
    safe: int

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def share(self, fate: str) -> float:
        return self.counts[fate] / self.total


def fates_of(gradients: torch.Tensor, form: Format, scale: int) -> Fates:
    """Count what becomes of each gradient that is not zero. Raises ValueError if there is none, or one is no finite
    number."""
    values = gradients.detach().flatten().double().cpu()
    if not values.isfinite().all():
        raise ValueError("gradients: finite numbers are expected; take those of a step that did not overflow")
    found = values[values != 0]
    if not len(found):
        raise ValueError("gradients: some that are not zero are expected")
    scaled = found * scale  # exact: a power of two
    powers = scaled.abs().log2().floor().int().clamp(LOWEST, HIGHEST - 1)
    counts, bins = {}, {}
    for fate, mask in form.fates(scaled).items():
        counts[fate] = int(mask.sum())
        each, many = powers[mask].unique(return_counts=True)
        bins[fate] = dict(zip(each.tolist(), many.tolist(), strict=True))
    edge = (2 - 2.0 ** -(form.fraction_bits + 1)) * 2.0**form.highest
    safe = math.ceil(math.log2(edge / found.abs().max().item())) - 1
    return Fates(form, scale, counts, bins, len(values) - len(found), safe)


class PrecisionPanel(Panel):
    """Format and loss scale against gradients: which share becomes zero, is subnormal, overflows?

    `gradients` are tensors in any nest, best those of a step in fp32, unscaled: the panel rounds them itself. What is
    lost *inside* of a backward pass, before a gradient of a weight is complete, comes on top.
    """

    def __init__(self, gradients: Any, format: str = "fp16", scale: int = 1) -> None:
        given = list(tensors_in(gradients))
        if not given:
            raise TypeError(f"gradients: tensors are expected, got {type(gradients).__name__}")
        self._gradients = torch.cat([each.detach().flatten().double().cpu() for each in given])
        controls = {
            "format": choice("format", list(FORMATS), format),
            "scale": slider("loss scale", SCALES, scale),
        }
        super().__init__(
            "formats and ranges",
            controls,
            lambda values: picture(self.fates(values)),
            lambda values: "\n".join(lines(self.fates(values))),
        )

    def fates(self, values: Values) -> Fates:
        return fates_of(self._gradients, FORMATS[values["format"]], values["scale"])


def title_of(fates: Fates) -> str:
    lost, over = fates.share("zero"), fates.counts["overflow"]
    if over:
        return f"{_share(fates, 'overflow')} overflow: the scaler skips this step and halves the scale"
    if lost > 0.001:
        return f"{_share(fates, 'zero')} become zero: a larger scale would keep them"
    if fates.share("subnormal") > 0.001:
        return f"{_share(fates, 'subnormal')} are subnormal: kept, with fewer digits"
    return "they fit: a larger scale gains nothing" if fates.share("normal") == 1 else "they fit, all but a few"


def lines(fates: Fates) -> tuple[str, ...]:
    """The same in words. Those with counts of gradients end with "(measured)"."""
    form = fates.format
    parts = ", ".join(f"{_share(fates, fate)} {label.split(':')[0]}" for fate, (_, label, _) in FATES.items())
    zeros = f", {fates.zeros:,} more were zero from the start" if fates.zeros else ""
    return (
        f"{form.name}: normal numbers from 2^{form.lowest} to 2^{form.highest + 1}, subnormal ones down to "
        f"2^{form.least}, {2**form.fraction_bits:,} steps to each power of two",
        f"{fates.total:,} gradients at a loss scale of 2^{int(math.log2(fates.scale))}: {parts}{zeros} (measured)",
        f"{title_of(fates)} (measured)",
        f"the largest scale at which none overflows: 2^{fates.safe} (measured)",
    )


def _share(fates: Fates, fate: str) -> str:
    """A few of many are not none, and almost all are not all."""
    count, share = fates.counts[fate], fates.share(fate)
    if 0 < share < 0.001:
        return f"{count:,} of {fates.total:,}"
    return "99.9 %" if 0.999 < share < 1 else f"{100 * share:.3g} %"


def picture(fates: Fates) -> str:
    """An SVG on a white ground, for light and dark pages."""
    title = f"{fates.format.name}, loss scale 2^{int(math.log2(fates.scale))}: {title_of(fates)}"
    ink = TEXT if not fates.counts["overflow"] and fates.share("zero") <= 0.001 else RED
    body = [_patterns(), text(26, 28, title, size=15, weight="bold", fill=ink)]
    body += _zones(fates.format, TOP, BOTTOM, 0.16) + _bars(fates) + _axis() + _strips(fates.format) + _legend(fates)
    return svg(WIDTH, HEIGHT, title, body)


def _x(power: float) -> float:
    return LEFT + (RIGHT - LEFT) * (min(max(power, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)


def _zones(form: Format, top: float, bottom: float, opacity: float) -> list[str]:
    """Where on the axis a number of this format becomes what."""
    ends = (LOWEST, form.least - 1, form.lowest, form.highest + 1, HIGHEST)
    out = []
    for fate, low, high in zip(FATES, ends, ends[1:], strict=False):
        if _x(high) > _x(low):
            width = _x(high) - _x(low)
            out.append(rect(_x(low), top, width, bottom - top, FATES[fate][0], opacity=opacity))
    return out


def _bars(fates: Fates) -> list[str]:
    """The gradients by their power of two; where a fate ends within one, its parts stand on top of one another."""
    heights: dict[int, int] = {}
    for fate in FATES:
        for power, count in fates.bins[fate].items():
            heights[power] = heights.get(power, 0) + count
    unit, floor, out = (BOTTOM - TOP - 14) / max(heights.values()), dict[int, float](), []
    for fate, (color, _, hatch) in FATES.items():
        for power, count in fates.bins[fate].items():
            foot = floor.get(power, BOTTOM)
            place, width, high = _x(power) + 0.5, _x(power + 1) - _x(power) - 1, max(count * unit, 1)
            out.append(rect(place, foot - high, width, high, color))
            if hatch:
                out.append(rect(place, foot - high, width, high, f"url(#p-{fate})"))
            floor[power] = foot - high
    return out


def _axis() -> list[str]:
    out = [line(LEFT, BOTTOM, RIGHT, BOTTOM, GREY), text(LEFT - 40, TOP - 10, "gradients, scaled, by magnitude")]
    for power in range(LOWEST, HIGHEST + 1, 8):
        out.append(line(_x(power), BOTTOM, _x(power), BOTTOM + 5, GREY))
        out.append(text(_x(power), BOTTOM + 18, f"2^{power}", anchor="middle", size=11))
    return out


def _strips(chosen: Format) -> list[str]:
    """The ranges of all formats under the same axis."""
    out = []
    for row, form in enumerate(FORMATS.values()):
        top, here = BOTTOM + 30 + 21 * row, form is chosen
        out += _zones(form, top, top + 14, 0.8 if here else 0.3)
        out.append(text(LEFT - 8, top + 12, form.name, anchor="end", weight="bold" if here else "normal"))
        if _x(form.lowest) == LEFT:
            out.append(text(LEFT + 6, top + 12, f"on to 2^{form.least}", size=11))
            out.append(text(RIGHT - 6, top + 12, f"on to 2^{form.highest + 1}", anchor="end", size=11))
    return out


def _legend(fates: Fates) -> list[str]:
    out, place = [], 26.0
    for fate, (color, label, hatch) in FATES.items():
        said = f"{label.split(':')[0]} {_share(fates, fate)}"
        out.append(rect(place, HEIGHT - 27, 14, 13, color))
        if hatch:
            out.append(rect(place, HEIGHT - 27, 14, 13, f"url(#p-{fate})"))
        out.append(text(place + 19, HEIGHT - 16, said))
        place += 36 + 7.4 * len(said)
    return out


def _patterns() -> str:
    return "".join(pattern(f"p-{fate}", hatch) for fate, (_, _, hatch) in FATES.items() if hatch)
