"""A run of the experiment log, and what tells it from the run it is compared with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

NOT_SET = "(not set)"


@dataclass(frozen=True, repr=False)
class Run:
    """One run of the log, and how it differs from its parent.

    `results` are numbers, units in their names; `changed` is {parameter: (old, new)}, nested names dotted,
    NOT_SET where only one of the two has it; `warnings` say why a gain may not be the change's.
    """

    name: str
    parent: str | None
    parameters: Mapping[str, Any]
    results: Mapping[str, float]
    machine: Mapping[str, Any] | None
    note: str
    changed: Mapping[str, tuple[Any, Any]]
    warnings: tuple[str, ...]

    @property
    def what_changed(self) -> str:
        """One line: "precision: fp32 -> bf16", or "nothing"; empty for a run without parent."""
        if self.parent is None:
            return ""
        return "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in self.changed.items()) or "nothing"

    def __repr__(self) -> str:
        against = f", against {self.parent!r}: {self.what_changed}" if self.parent is not None else ""
        results = ", ".join(f"{key} = {value:.4g}" for key, value in self.results.items())
        return "\n  ".join([f"run {self.name!r}{against}", f"{results} (measured)", *self.warnings])


def run_of(entry: Mapping[str, Any], before: Mapping[str, Run]) -> Run:
    """The run of one line of the log; `before` are those above it. KeyError for a parent not among them."""
    run = Run(**entry, changed={}, warnings=())
    if run.parent is None:
        return run
    parent = before[run.parent]
    old, new = dict(flat(parent.parameters)), dict(flat(run.parameters))
    pairs = {key: (old.get(key, NOT_SET), new.get(key, NOT_SET)) for key in old | new}
    run = replace(run, changed={key: pair for key, pair in pairs.items() if pair[0] != pair[1]})
    return replace(run, warnings=tuple(_warnings(run, parent)))


def _warnings(run: Run, parent: Run) -> Iterator[str]:
    count = len(run.changed)
    if count > 1:
        yield f"{'two' if count == 2 else count} changes at once: {', '.join(run.changed)}"
    if other := other_machine(run, parent):
        yield f"another machine than its parent: {other}"
    elif not count:
        yield "nothing changed: an A/A run, its gain is noise"


def other_machine(run: Run, base: Run | None) -> str:
    """What tells two machines apart, base / run; empty if nothing. Where both have a family, that decides."""
    if base is None:
        return ""
    old, new = (each.machine or {"family": "not recorded"} for each in (base, run))
    keys = ["family"] if "family" in old and "family" in new else [*{**old, **new}]
    pairs = ((key, old.get(key, NOT_SET), new.get(key, NOT_SET)) for key in keys)
    return ", ".join(f"{key} {a} / {b}" for key, a, b in pairs if a != b)


def flat(parameters: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Parameters with nested names dotted: {"optimizer": {"lr": 0.1}} gives ("optimizer.lr", 0.1)."""
    for key, value in parameters.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
