"""The timings of one step: every sample kept, statistics derived, the machine attached."""

import json
import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from labsupport.machine import Machine
from labsupport.measure.statistics import LEAST_SAMPLES, Stalls, Warmup, find_stalls, paired_interval
from labsupport.units import format_seconds

SCHEMA = "labsupport measurement 1"
KINDS = {
    "label": str,
    "samples_s": list,
    "dropped_s": list,
    "wall_s": list,
    "warmup": dict,
    "others_cores": int | float,
    "machine": dict,
}


def warnings_line(warnings: tuple[str, ...]) -> str:
    """One line, however many there are: a notebook's outputs are compared line by line with those of another run."""
    return "warnings: " + ("; ".join(warnings) or "none")


@dataclass(frozen=True, repr=False)
class Measurement:
    """Timings of one step, each kept, with the machine that made them.

    `samples_s` are the steady steps in the order they ran, in seconds: between CUDA events where the step uses a GPU,
    else by the wall clock. `wall_s` are then, for each group of steps, the wall clock's seconds a step from the first
    call to the end of the device's work; else it is empty. `dropped_s` is the warm-up. `others_cores` is how
    many cores other processes kept busy meanwhile.
    """

    label: str
    samples_s: tuple[float, ...]
    dropped_s: tuple[float, ...]
    wall_s: tuple[float, ...]
    warmup: Warmup
    others_cores: float
    machine: Machine

    def __post_init__(self) -> None:
        if len(self.samples_s) < LEAST_SAMPLES or not all(0 < sample < math.inf for sample in self.samples_s):
            raise ValueError(f"at least {LEAST_SAMPLES} positive step times are expected, got {self.samples_s[:9]}")

    @property
    def n(self) -> int:
        """Steady steps."""
        return len(self.samples_s)

    @property
    def total_s(self) -> float:
        return sum(self.samples_s)

    @cached_property
    def median_s(self) -> float:
        return self.percentile_s(50)

    @cached_property
    def iqr_s(self) -> float:
        """The width of the middle half of the steps."""
        return self.percentile_s(75) - self.percentile_s(25)

    def percentile_s(self, percent: float) -> float:
        """The time within which this share of the steps stays. Of 200 steps, the 99th percentile rests on the two
        longest."""
        return float(np.percentile(self.samples_s, percent))

    @property
    def steps_per_s(self) -> float:
        """Steps over time: stalls count, as they do in training."""
        return self.n / self.total_s

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        return self.iqr_s / self.median_s

    @cached_property
    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the median: of what *this* run varied by, not of what differs between runs."""
        return paired_interval(self.samples_s)

    @cached_property
    def stalls(self) -> Stalls | None:
        return find_stalls(self.samples_s)

    @property
    def value(self) -> float:
        """`lab.record` takes a measurement for its median."""
        return self.median_s

    @property
    def unit(self) -> str:
        return "s"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the median has to know; empty if nothing."""
        found = []
        if not self.warmup.steady:
            found.append(f"the step did not get steady: {self.warmup.reason}")
        if self.spread > 0.1:
            found.append(f"the middle half of the steps spreads over {self.spread:.0%} of the median")
        if self.stalls and self.stalls.share > 0.01:
            found.append(str(self.stalls))
        if self.others_cores > 0.1 * self.machine.cores:
            found.append(f"other processes kept {self.others_cores:.1f} cores busy")
        if self.wall_s and (apart := float(np.mean(self.wall_s)) * self.n / self.total_s - 1) > 0.1:
            found.append(
                f"the wall clock took {apart:.0%} more than the events: the host, or another stream, works when "
                "this stream does not"
            )
        return tuple(found)

    @property
    def lines(self) -> list[str]:
        """What it says, always in four lines: the timing, the warm-up, the warnings, the machine."""
        machine = self.machine
        where = machine.device if machine.profile == "cuda" else f"{machine.cpu_model} ({machine.isa})"
        threads = f"{machine.threads} {'thread' if machine.threads == 1 else 'threads'}"
        return [
            f"{self.label}: median {format_seconds(self.median_s)}, "
            f"IQR {format_seconds(self.iqr_s)} ({self.spread:.1%}), "
            f"p99 {format_seconds(self.percentile_s(99))}, n = {self.n}",
            f"dropped {len(self.dropped_s)} of {len(self.dropped_s) + self.n} steps: {self.warmup.reason}",
            warnings_line(self.warnings),
            f"{where}, {threads}, torch {machine.torch}",
        ]

    def __str__(self) -> str:
        return "\n  ".join(self.lines)

    def __repr__(self) -> str:
        """For notebooks: each line with the mark of what differs from run to run."""
        return "\n  ".join(f"{line} (measured)" for line in self.lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"application/vnd.labsupport.measurement+json": {"label": self.label}, "text/plain": repr(self)}

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"schema": SCHEMA, **asdict(self), "machine": self.machine.to_dict()}

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for `Measurement.load` and `labs compare`."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Measurement":
        """What `save` wrote. Raises ValueError, naming the file, for anything else; OSError if it cannot be read."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found.get("schema") != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA!r}")
            if missing := [field.name for field in fields(cls) if field.name not in found]:
                raise ValueError(f"it lacks {', '.join(missing)}")
            if wrong := [name for name, kind in KINDS.items() if not isinstance(found[name], kind)]:
                raise ValueError(f"of another type than expected: {', '.join(wrong)}")
            known = {field.name: found[field.name] for field in fields(cls)}
            columns = {name: tuple(map(float, known[name])) for name in ("samples_s", "dropped_s", "wall_s")}
            machine, warmup = Machine.from_dict(known["machine"]), Warmup(**known["warmup"])
            return cls(**{**known, **columns, "machine": machine, "warmup": warmup})
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is no measurement that `Measurement.save` wrote: {error}") from error
