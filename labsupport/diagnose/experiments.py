"""The log of experiments: one line of JSON a run, and what each run changed against its parent."""

import errno
import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from labsupport.diagnose.runs import Run, flat, other_machine, run_of

if TYPE_CHECKING:
    import pandas as pd


class ExperimentLog:
    """Runs in the order they were made, in a file of JSON lines that outlives the process.

    Raises ValueError, naming file and line, for a file that is not such a log. A last line that was cut while
    it was written (the process died) is left out with a warning; the next `add` writes in its place.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._runs = self._read()[0]

    def add(
        self,
        name: str,
        parameters: Any,
        result: Any,
        *,
        unit: str = "s",
        machine: Any = None,
        note: str = "",
        parent: str | Run | EllipsisType | None = ...,
    ) -> Run:
        """Append a run, on disk when this returns, and tell what it changed.

        `parameters` is a mapping or a dataclass (a recipe). `result` is a number in `unit`, a mapping of
        numbers with units in their names, or a measurement (`median_s`, `iqr_s`, `n`). `machine` is a dict or
        has `to_dict()`; by default the measurement's. `parent` is the run to compare with (by default the
        last one), or None. Raises TypeError naming what JSON cannot hold, ValueError for a taken name,
        KeyError for an unknown parent, OSError if it cannot be written; the file is then as it was.
        """
        runs, kept = self._read()  # again: another process may have added some
        if not isinstance(name, str) or not name:
            raise TypeError(f"a run's name is {name!r}; a text is expected")
        if name in runs:
            raise ValueError(f"{self.path} has a run {name!r} already: choose another name, or a new file")
        if isinstance(parent, EllipsisType):
            parent = next(reversed(runs), None)
        parent = parent.name if isinstance(parent, Run) else parent
        if parent is not None and parent not in runs:
            raise KeyError(f"parent {parent!r} is not in the log; it has {_listed(runs)}")
        entry = {
            "name": name,
            "parent": parent,
            "parameters": _plain_dict(parameters, "parameters"),
            "results": _results(result, unit),
            "machine": _machine(getattr(result, "machine", None) if machine is None else machine),
            "note": str(note),
        }
        line = json.dumps(entry)
        self._append(line.encode() + b"\n", kept)
        # From the line, not from the objects: a run must be the same now and when it is read back.
        runs[name] = run_of(json.loads(line), runs)
        self._runs = runs
        return runs[name]

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, name: str) -> Run:
        if name not in self._runs:
            raise KeyError(f"no run {name!r} in {self.path}; it has {_listed(self._runs)}")
        return self._runs[name]

    def frame(self) -> "pd.DataFrame":
        """A table with one row a run (its index) and one column a parameter and result."""
        import pandas as pd

        rows = []
        for run in self.runs:
            row = dict(flat(run.parameters))
            # A parameter and a result of one name ("n") must not write over each other.
            row |= {f"result.{key}" if key in row else key: value for key, value in run.results.items()}
            rows.append(row)
        return pd.DataFrame(rows, index=pd.Index(list(self._runs), name="run"))

    def ladder(self, metric: str | None = None, *, higher_is_better: bool | None = None) -> "pd.DataFrame":
        """What each change brought, in columns run, changed, value, gain, gain_in_all, flag.

        `gain` is against the run's parent, `gain_in_all` against the first run; 2 is twice as good: old / new
        or, if higher is better, new / old. By default higher is better for a rate (its name or unit ends in /s
        or _per_s). NaN where a value is missing or not positive. `flag` says why a
        gain may not be the change's. `metric` names a result, by default the first; KeyError if none has it.
        """
        import pandas as pd

        columns = ["run", "changed", "value", "gain", "gain_in_all", "flag"]
        if not self._runs:
            return pd.DataFrame(columns=columns)
        first = self.runs[0]
        known = {key: None for run in self.runs for key in run.results}
        metric = next(iter(known)) if metric is None else metric
        if metric not in known:
            raise KeyError(f"no run has a result {metric!r}; there are {_listed(known)}")
        if higher_is_better is None:
            higher_is_better = metric.rstrip("]").endswith(("/s", "_per_s"))
        rows = []
        for run in self.runs:
            parent = self._runs[run.parent] if run.parent is not None else None
            value, start = (each.results.get(metric, math.nan) for each in (run, first))
            before = parent.results.get(metric, math.nan) if parent else math.nan
            flags = list(run.warnings)
            # Its parent may share its machine and still not be where the ladder began.
            if not other_machine(run, parent) and (other := other_machine(run, first)):
                flags.append(f"another machine than the first run: {other}")
            gains = _gain(before, value, higher_is_better), _gain(start, value, higher_is_better)
            rows.append((run.name, run.what_changed, value, *gains, "; ".join(flags)))
        return pd.DataFrame(rows, columns=columns)

    def _repr_html_(self) -> str:
        table = self.ladder().to_html(index=False, na_rep="", float_format="{:.4g}".format)
        # The mark of what differs from run to run, which hides its line: so the table is one line.
        return f"<!-- (measured) -->{table}".replace("\n", "")

    def __repr__(self) -> str:
        # The name alone: a notebook that is published should not tell where somebody keeps their files.
        return f"ExperimentLog({self.path.name!r}: {_listed(self._runs)})"

    def _read(self) -> tuple[dict[str, Run], bytes]:
        """The runs by name, and the bytes of the file that hold them: all but a last line that was cut."""
        found = self.path.read_bytes() if self.path.exists() else b""
        runs: dict[str, Run] = {}
        kept = b""
        for number, line in enumerate(found.splitlines(keepends=True), start=1):
            where = f"{self.path}, line {number}"
            try:
                run = run_of(json.loads(line), runs)
                if run.name in runs:
                    raise ValueError(f"a run {run.name!r} stands above already")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                # Only what looks like one of our lines: `add` will write over it.
                ours = line[:9] == b'{"name": '[: len(line)] and not line.endswith(b"\n")
                if ours and isinstance(error, json.JSONDecodeError):
                    text = f"{where}, was cut while it was written: left out, the runs before it are kept"
                    warnings.warn(text, stacklevel=3)
                    break
                raise ValueError(f"{where}, is not a run: mend or delete it ({error!r})") from error
            runs[run.name] = run
            kept += line
        return runs, kept

    def _append(self, line: bytes, kept: bytes) -> None:
        """One write of one line after those that are kept; unbuffered, so nothing is written later."""
        if kept and not kept.endswith(b"\n"):  # an editor may have left the last newline out
            line = b"\n" + line
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            file.truncate(len(kept))
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, "the run does not fit on the disk", str(self.path))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(len(kept))
                raise


def _gain(old: float, new: float, higher_is_better: bool) -> float:
    if not (old > 0 and new > 0):  # so for NaN, too
        return math.nan
    return new / old if higher_is_better else old / new


def _machine(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    family = {"family": given.family} if hasattr(given, "family") else {}
    return _plain_dict(given.to_dict() if hasattr(given, "to_dict") else given, "machine") | family


def _results(given: Any, unit: str) -> dict[str, float]:
    if hasattr(given, "median_s"):
        given = {"median_s": given.median_s, "iqr_s": given.iqr_s, "n": given.n}
    elif isinstance(given, Real):
        given = {f"value [{unit}]": given}
    if not isinstance(given, Mapping) or not given:
        raise TypeError(f"result is {given!r}; a number, a mapping of numbers or a measurement is expected")
    for key, value in given.items():
        if not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"result {key!r} is {value!r}; a number is expected (for a tensor: .item())")
        if not math.isfinite(value):
            raise ValueError(
                f"result {key!r} is {value!r}: JSON has finite numbers only; leave it out, and say why in note"
            )
    return {key: int(value) if isinstance(value, Integral) else float(value) for key, value in given.items()}


def _plain_dict(given: Any, where: str) -> dict[str, Any]:
    plain = _plain(given, where)
    if not isinstance(plain, dict):
        raise TypeError(f"{where}: {given!r} is a {type(given).__name__}; a mapping or dataclass is expected")
    return plain


def _plain(value: Any, where: str) -> Any:
    """The value as JSON knows it. Raises TypeError, naming where, for anything that JSON does not know."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{where} has the key {odd[0]!r}; a text is expected")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value!r}: JSON has finite numbers only; give a text")
    if value is None or isinstance(value, str | int | float):
        return value
    kind = type(value).__name__
    raise TypeError(f"{where} is {value!r}: JSON has no {kind}; give a text, a number, a list or a dict")


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "none yet"
