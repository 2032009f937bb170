"""An audit of a training step: a few of them watched, and the faults of technique that were seen, with the evidence."""

import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from inspect import isgeneratorfunction
from types import GeneratorType
from typing import Any

from labsupport.diagnose import rules
from labsupport.diagnose.watching.seen import Seen
from labsupport.diagnose.watching.watch import Watch
from labsupport.measure.state import KeptState, found_in, reach


@dataclass(frozen=True)
class Finding:
    """A fault that was seen: its name, the evidence with its numbers, and what to do."""

    name: str
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}\n  {self.advice}"


@dataclass(frozen=True, repr=False)
class AuditReport:
    """What an audit has seen: `findings`, and what it looked for in vain. That is "not seen", and no proof of more:
    `calls` calls with `backwards` backward passes and `steps` optimizer steps were watched, of which the GradScaler
    skipped `skipped`. `not_looked_for`: name -> why. `not_put_back`: parameters that it could not find beforehand."""

    calls: int
    backwards: int
    steps: int
    skipped: int
    findings: tuple[Finding, ...]
    not_seen: tuple[str, ...]
    not_looked_for: dict[str, str]
    not_put_back: str

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the findings."""
        return tuple(each.name for each in self.findings)

    @property
    def lines(self) -> tuple[str, ...]:
        said = [
            f"Watched {self.calls} calls: {self.backwards} backward passes, {self.steps} optimizer steps"
            f"{f', {self.skipped} of them skipped by the GradScaler' if self.skipped else ''}."
        ]
        if not self.backwards:
            return *said, "Nothing was seen to train: no backward pass ran."
        said += [line for each in self.findings for line in str(each).splitlines()]
        said += [f"Not seen: {', '.join(self.not_seen)}."] if self.not_seen else []
        for why in dict.fromkeys(self.not_looked_for.values()):
            names = [name for name, reason in self.not_looked_for.items() if reason == why]
            said.append(f"Not looked for: {', '.join(names)} ({why}).")
        if self.not_put_back:
            said.append(
                f"Trained and not put back: {self.not_put_back}. Name them next time: state=[model, optimizer]."
            )
        return tuple(said)

    def __repr__(self) -> str:
        return "\n".join(self.lines)


def audit(
    step: Callable[[], Any] | Iterable[Any] | None = None,
    *,
    loop: Callable[[], Any] | Iterable[Any] | None = None,
    calls: int = 8,
    state: Iterable[Any] | None = None,
    keep: bool = False,
    target: str | None = None,
) -> AuditReport:
    """Run a few training steps of yours, watch them, and name the faults of technique that were seen.

        audit(step)  # a function that runs one step, or one micro-batch: called 8 times
        audit(batches_of(loader))  # or a generator that trains between its yields: 8 of them
        audit(loop=train)  # a whole loop: a function, called once, or an iterable, run to its end

    Only a whole loop shows what is left over at its end; give one of two to twenty steps. The steps do what
    they always do, bit for bit, and somewhat slower. Afterwards the modules, optimizers, schedulers and scalers that
    `step` or `loop` names (or `state`: anything with a `state_dict`) and the random states are as before, unless `keep`
    is true; what a generator or a data loader has yielded is gone. `target`: the kind of device whose rules count,
    by default that of the parameters.

    Not seen are operations of other threads, and what runs within compiled code; there nothing is claimed. Raises
    TypeError for what can be neither called nor iterated, ValueError for `calls` below 1, or for both or neither
    of `step` and `loop`; an error of the step passes as it is.
    """
    watched = loop if step is None else step
    if (step is None) == (loop is None):
        raise ValueError("one of step and loop= is expected: audit(step), or audit(loop=train)")
    if not callable(watched) and not isinstance(watched, Iterable):
        raise TypeError(f"a function, or an iterable that trains, is expected, got {type(watched).__name__}")
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise ValueError(f"calls: a whole number of 1 or more is expected, got {calls!r}")
    watch = Watch()
    things = [] if keep else _state_of(watched) if state is None else list(state)
    kept = KeptState(things, randomness=not keep)
    try:
        with watch:
            ended = _run(watched, watch, calls if loop is None else None)
        seen = Seen(watch, ended, target)
        known = set() if keep else set(seen.named()) - reach(things)
        lost = [key for key in known & set(watch.gradients) if watch.gradients[key].moved]
        return _report(seen, seen.names(lost))
    finally:
        if not keep:
            kept.put_back()


def _state_of(watched: Any) -> list[Any]:
    frame = watched.gi_frame if isinstance(watched, GeneratorType) else None
    if frame is None:
        return found_in(watched)
    named = [frame.f_globals.get(name) for name in frame.f_code.co_names]
    return [thing for part in (*frame.f_locals.values(), *named) for thing in found_in(part)]


def _run(watched: Any, watch: Watch, calls: int | None) -> bool:
    """Whether a loop ended by itself."""
    if callable(watched) and not isgeneratorfunction(watched):
        for _ in range(calls or 1):
            watch.call += 1
            watched()
        return calls is None
    rounds: Iterator[Any] = iter(watched() if callable(watched) else watched)
    while calls is None or watch.call < calls:
        watch.call += 1
        if next(rounds, rounds) is rounds:
            watch.call -= 1
            return True
    return False


def _report(seen: Seen, not_put_back: str) -> AuditReport:
    watch, backwards = seen.watch, seen.watch.backwards
    findings: list[Finding] = []
    not_looked_for: dict[str, str] = {}
    table = tomllib.loads((files("labsupport.diagnose") / "faults.toml").read_text())
    for fault in table["fault"] if backwards else ():
        if "needs" in fault and not getattr(seen, fault["needs"]):
            not_looked_for[fault["name"]] = fault["why"]
            continue
        for numbers in getattr(rules, fault["rule"])(seen):
            findings.append(Finding(fault["name"], fault["evidence"].format(**numbers), fault["advice"]))
    found = {each.name for each in findings} | set(not_looked_for)
    names = dict.fromkeys(each["name"] for each in table["fault"] if backwards and each["name"] not in found)
    skipped = sum(each.skipped for each in seen.steps)
    counts = watch.call, backwards, len(seen.steps), skipped
    return AuditReport(*counts, tuple(findings), tuple(names), not_looked_for, not_put_back)
