"""A record: one named, published value with its unit, its kind, and what is known of how it was measured."""

import math
import numbers
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from labsupport.units import format_value

RECORD_MIME = "application/vnd.labsupport.record+json"
SAY_MIME = "application/vnd.labsupport.say+json"
SUMMARY_MIME = "application/vnd.labsupport.summary+json"
# Our part of an output's metadata: nbval compares an output's data, and never its metadata.
METADATA_KEY = "labsupport"

KINDS = {
    "exact": "equal on every machine of the same profile and torch minor version: bytes, counts, shapes",
    "close": "equal within its own tolerance: losses, accuracies",
    "ratio": "an A/B in one process: inside a band, on the machine family that published it",
    "info": "present, finite, in its unit: absolute times and rates",
}
NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One value. `tolerance` is relative (kind close); `interval` a 95 % interval of the value; `spread` the
    interquartile range over the median; `n` how many samples stand behind it; `needs` what a machine must have;
    `at_least` a bound that a ratio keeps on every machine where the timed probe behind it said `bound_applies`.
    """

    name: str
    value: float
    unit: str = ""
    kind: str = "info"
    tolerance: float | None = None
    n: int = 1
    spread: float | None = None
    interval: tuple[float, float] | None = None
    seed: int | None = None
    needs: str | None = None
    at_least: float | None = None
    bound_applies: bool = True

    def __post_init__(self) -> None:
        if not NAME.match(self.name):
            raise ValueError(f"record name {self.name!r}: lower-case letters, digits and _ are expected")
        if self.kind not in KINDS:
            raise ValueError(f"record {self.name!r} has kind {self.kind!r}; expected one of {', '.join(KINDS)}")
        if isinstance(self.value, bool) or not isinstance(self.value, numbers.Real):
            raise TypeError(f"record {self.name!r} got {self.value!r}; a number is expected")
        if not math.isfinite(self.value):
            raise ValueError(f"record {self.name!r} is {self.value!r}; only finite values can be published")
        if (self.kind == "close") != (self.tolerance is not None):
            raise ValueError(f"record {self.name!r}: a tolerance belongs to kind 'close', and to no other")
        if self.at_least is not None and self.kind != "ratio":
            raise ValueError(f"record {self.name!r}: at_least belongs to kind 'ratio', not {self.kind!r}")
        if self.kind == "ratio" and self.value <= 0:
            raise ValueError(f"record {self.name!r} is {self.value!r}; a ratio is positive")
        rounded = self.value if self.kind == "exact" else _rounded(self.value)
        # int() and float() turn numpy's and torch's scalars into what JSON knows.
        object.__setattr__(self, "value", int(rounded) if _is_whole(self.value) else float(rounded))
        if self.interval is not None:
            low, high = self.interval
            if not -math.inf < low <= high < math.inf:
                raise ValueError(f"record {self.name!r} has the interval {self.interval}; low <= high is expected")
            object.__setattr__(self, "interval", (_rounded(low), _rounded(high)))
        if self.spread is not None:
            object.__setattr__(self, "spread", _rounded(self.spread, 2))

    @property
    def text(self) -> str:
        """The line that a reader sees. `(measured` marks it as one that differs from run to run."""
        shown = f"{self.name} = {format_value(self.value, self.unit)}"
        if self.kind == "exact":
            return f"{shown} (exact)"
        details = ["measured", f"n={self.n}"]
        if self.spread is not None:
            details.append(f"spread {format_value(self.spread, 'share')}")
        if self.interval is not None:
            low, high = (format_value(bound, self.unit) for bound in self.interval)
            details.append(f"95 % interval {low} to {high}")
        return f"{shown} ({', '.join(details)})"

    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Data and metadata of the output that carries this record. The value is data only when it is exact."""
        data: dict[str, Any] = {"name": self.name, "kind": self.kind, "unit": self.unit}
        if self.kind == "exact":
            data["value"] = self.value
        for key in ("tolerance", "needs", "at_least"):
            if getattr(self, key) is not None:
                data[key] = getattr(self, key)
        return {RECORD_MIME: data, "text/plain": self.text}, {METADATA_KEY: self.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """Everything but what has its default value, as JSON knows it."""
        defaults = {field.name: field.default for field in fields(self)}
        found = {k: v for k, v in asdict(self).items() if k in ("unit", "kind") or v != defaults[k]}
        return found | ({"interval": list(self.interval)} if self.interval else {})

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Record":
        known = {k: v for k, v in found.items() if k in {field.name for field in fields(cls)}}
        if "interval" in known:
            known["interval"] = tuple(known["interval"])
        return cls(**known)


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral)


def _rounded(value: float, digits: int = 6) -> float:
    """Six significant digits: no instrument of ours is better, and diffs stay readable."""
    return float(f"{value:.{digits}g}")


def absent_bundle(name: str, unit: str, kind: str, needs: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The output in a record's place on a machine without what it needs: the same data, and no value."""
    data = {"name": name, "kind": kind, "unit": unit, "needs": needs}
    text = f"{name}: not here, it needs {needs} (measured)"
    return {RECORD_MIME: data, "text/plain": text}, {METADATA_KEY: {"name": name, "absent": needs}}


def records_in(outputs: list[Any]) -> Iterator[Record]:
    """The records that a cell's outputs carry.

    Raises ValueError where an output names a record but its value is gone (a stripped or edited notebook).
    """
    for output in outputs:
        data = output.get("data", {})
        if RECORD_MIME not in data:
            continue
        found = output.get("metadata", {}).get(METADATA_KEY)
        name = data[RECORD_MIME].get("name")
        if found and found.get("absent"):
            continue
        if not found or found.get("name") != name:
            raise ValueError(f"the output of record {name!r} has lost its value: run and publish the lab again")
        try:
            record = Record.from_dict(found)
        except TypeError as error:
            raise ValueError(f"the output of record {name!r} has lost its value: {error}") from error
        yield record


def sentence(say: Mapping[str, Any], records: Mapping[str, Record]) -> str:
    """What `say` says of these records.

    `say` has `text` (true whatever the numbers are), or `about` (a ratio's name) with `above`, `below` and `same`:
    the branch follows the ratio's 95 % interval against 1, with the margin; an interval that reaches over is
    *cannot tell*. Fields are records' names: `{speedup}`, or `{share:.0%}` with a format of one's own.
    """
    if "text" in say:
        return _filled(say["text"], records)
    ratio = records[say["about"]]
    low, high = ratio.interval or (ratio.value, ratio.value)
    above, below = 1 + say["margin"], 1 / (1 + say["margin"])
    if low > above:
        return _filled(say["above"], records)
    if high < below:
        return _filled(say["below"], records)
    if below <= low and high <= above:
        return _filled(say["same"], records)
    return f"*Cannot tell*: {ratio.name} lies between {low:.3g} and {high:.3g}, on both sides of 1 or too close to it."


def said_text(said: Mapping[str, Any], records: Mapping[str, Record]) -> str:
    """The sentence as an output shows it: marked as measured unless every number in it is exact."""
    text = sentence(said, records)
    exact = "text" in said and all(records[field].kind == "exact" for field in fields_of(said["text"]))
    return text if exact else f"{text} <small>(measured)</small>"


def fields_of(template: str) -> set[str]:
    """The records a template names."""
    return set(re.findall(r"{(\w+)(?::[^{}]*)?}", template))


def _filled(template: str, records: Mapping[str, Record]) -> str:
    def fill(match: re.Match[str]) -> str:
        record, spec = records[match[1]], match[2]
        return format(record.value, spec) if spec else format_value(record.value, record.unit)

    return re.sub(r"{(\w+)(?::([^{}]*))?}", fill, template)
