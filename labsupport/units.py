"""Bytes, seconds, rates and shares as people write them. Imports nothing of ours and no torch."""

import math
import re
from numbers import Integral

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("", "k", "M", "G", "T", "P")
_FACTORS = {
    "b": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
# The largest unit first; a time is printed in the first one that it fills.
_SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def parse_bytes(size: str | int) -> int:
    """Bytes of a size: a whole number of bytes, or text such as "512MiB" or "1.5 GB".

    KiB to TiB are powers of 1024, KB to TB powers of 1000; case does not matter. ValueError for anything
    else: a bare "512M" is refused, because tools disagree about what it means.
    """
    if isinstance(size, Integral) and not isinstance(size, bool) and size >= 0:
        return int(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or (match[2] and match[2].lower() not in _FACTORS):
        raise ValueError(
            f"{size!r} is not a size: give whole bytes (1048576), or a number with one of "
            'B, KiB, MiB, GiB, TiB (powers of 1024), KB, MB, GB, TB (powers of 1000), as in "512MiB"'
        )
    return round(float(match[1]) * _FACTORS[match[2].lower() or "b"])


def format_bytes(size: float) -> str:
    """A size in binary units, three significant digits: 12897484 gives "12.3 MiB", 185 gives "185 B"."""
    if not math.isfinite(size):
        return f"{size} B"
    scaled, unit = _scale(size, 1024, _BINARY)
    return f"{scaled:g} B" if unit == "B" and scaled == int(scaled) else f"{_three_digits(scaled)} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration in ns, µs, ms, s, min or h, three significant digits: 0.0123 gives "12.3 ms"."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    rounded = float(f"{seconds:.3g}")
    factor, unit = next((pair for pair in _SECONDS if abs(rounded) >= pair[0]), _SECONDS[-1])
    return f"{_three_digits(seconds / factor)} {unit}"


def format_rate(value: float, unit: str) -> str:
    """A rate with a decimal prefix: (1.58e11, "FLOP/s") gives "158 GFLOP/s", (2.31e10, "B/s") "23.1 GB/s"."""
    if not math.isfinite(value):
        return f"{value} {unit}"
    scaled, prefix = _scale(value, 1000, _DECIMAL)
    return f"{_three_digits(scaled)} {prefix}{unit}"


def format_value(value: float, unit: str) -> str:
    """Any record's value for people, by its unit.

    "B" 12.3 MiB; "s" 12.3 ms; "FLOP" and "FLOP/s" 158 GFLOP/s; "B/s" 23.1 GB/s (decimal); "x" 5.31x; "%" and
    "share" (of 0 to 1) 86 %; any other unit follows the number as it is: 185 samples, 2 cores. Whole
    numbers are exact, floats have three significant digits.
    """
    if unit == "B":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    if unit in ("FLOP", "FLOP/s", "B/s"):
        return format_rate(value, unit)
    if unit in ("%", "share"):
        return f"{100 * value:.3g} %"
    if isinstance(value, Integral):
        number = str(value)
    else:
        number = f"{value:.0f}" if unit != "x" and float(value).is_integer() else _three_digits(float(value))
    return f"{number}x" if unit == "x" else f"{number} {unit}".rstrip()


def _scale(value: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    """The value in the largest unit that it fills once rounded: 1023.9 KiB reads 1.00 MiB, not 1024 KiB."""
    power = 0
    while round(abs(value)) >= base and power < len(units) - 1:
        value /= base
        power += 1
    return value, units[power]


def _three_digits(value: float) -> str:
    """Three significant digits without an exponent, zeros kept: 5.3 gives "5.30", 4412.3 gives "4410"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"
