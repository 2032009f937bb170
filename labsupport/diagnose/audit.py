"""An audit of a training step: a few of them watched, and the faults of technique that were seen, with the evidence."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import isgeneratorfunction
from types import GeneratorType
from typing import Any, NamedTuple

from labsupport.diagnose import graph_rules, window_rules
from labsupport.diagnose.seen import Seen
from labsupport.diagnose.watch import Watch
from labsupport.measure.state import KeptState, found_in


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
    skipped `skipped`. `not_looked_for`: name -> why."""

    calls: int
    backwards: int
    steps: int
    skipped: int
    findings: tuple[Finding, ...]
    not_seen: tuple[str, ...]
    not_looked_for: dict[str, str]

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
    things = [] if keep else _state_of(watched) if state is None else state
    kept = KeptState(things, randomness=not keep)
    try:
        with watch:
            ended = _run(watched, watch, calls if loop is None else None)
        return _report(watch, ended, target)
    finally:
        if not keep:
            kept.put_back()


def _state_of(watched: Any) -> list[Any]:
    frame = watched.gi_frame if isinstance(watched, GeneratorType) else None
    return found_in(watched if frame is None else partial(id, *frame.f_locals.values()))


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


def _report(watch: Watch, ended: bool, target: str | None) -> AuditReport:
    seen = Seen(watch, ended, target)
    findings: list[Finding] = []
    not_seen, not_looked_for = [], {}
    for rule in RULES if watch.backwards else ():
        evidence = rule.look(seen)
        findings += [Finding(rule.name, each, rule.advice) for each in evidence or ()]
        if evidence is None:
            not_looked_for[rule.name] = rule.needs
        elif not evidence:
            not_seen.append(rule.name)
    skipped = sum(each.skipped for each in seen.steps)
    return AuditReport(
        watch.call, watch.backwards, len(seen.steps), skipped, tuple(findings), tuple(not_seen), not_looked_for
    )


class Rule(NamedTuple):
    """`look` gives the evidence, or None where it could not look for want of what it `needs`."""

    name: str
    look: Callable[[Seen], list[str] | None]
    advice: str
    needs: str = ""


COMPILED = "nothing was compiled while it was watched"
CHECKPOINTS = "no checkpoint ran"
RULES = (
    Rule("gradients pile up", window_rules.piled_up, "Call optimizer.zero_grad() after each step."),
    Rule(
        "gradients cleared inside the window",
        window_rules.cleared_in_window,
        "Call zero_grad() once a window: right after optimizer.step(), not for each micro-batch.",
    ),
    Rule(
        "gradients cleared before the step",
        window_rules.cleared_before_step,
        "Move zero_grad() behind optimizer.step(), or in front of backward().",
    ),
    Rule("step before backward", window_rules.step_before_backward, "Call optimizer.step() after backward()."),
    Rule(
        "clipped before unscale_", window_rules.clipped_while_scaled, "Call scaler.unscale_(optimizer) before you clip."
    ),
    Rule(
        "scales mixed in a window",
        window_rules.mixed_scales,
        "Call scaler.unscale_() and scaler.update() only after the last micro-batch of the window.",
    ),
    Rule(
        "scheduler inside the window",
        window_rules.scheduled_in_window,
        "Call scheduler.step() once, after optimizer.step().",
    ),
    Rule(
        "scheduler at a skipped step",
        window_rules.scheduled_at_skipped,
        "Step the scheduler only if scaler.get_scale() has not become smaller in scaler.update().",
    ),
    Rule(
        "window left over",
        window_rules.left_over,
        "Step at the last micro-batch too, with the loss divided by what is in that window.",
        "the watch ended before the loop did: audit(loop=...) runs one to its end",
    ),
    Rule(
        "loss not divided by the window",
        window_rules.undivided,
        "Divide each loss by the number of micro-batches (or by the window's tokens) before backward().",
    ),
    Rule(
        "recompiled for a shape",
        graph_rules.recompiled,
        "Keep shapes fixed (drop_last, padding), or torch._dynamo.mark_dynamic() the dimension that varies.",
        COMPILED,
    ),
    Rule(
        "graph breaks",
        graph_rules.graph_breaks,
        "Return tensors and read them outside; torch.where in the place of if.",
        COMPILED,
    ),
    Rule(
        "checkpoint saves nothing",
        graph_rules.saves_nothing,
        "Checkpoint blocks of several layers, each by itself: about the square root of their number.",
        CHECKPOINTS,
    ),
    Rule("checkpoint without gradients", graph_rules.blind_checkpoint, "Pass use_reentrant=False.", CHECKPOINTS),
    Rule(
        "checkpoint with other randomness",
        graph_rules.other_randomness,
        "Leave preserve_rng_state at True.",
        CHECKPOINTS,
    ),
    Rule(
        "autocast without effect",
        graph_rules.no_autocast,
        "Run the forward within torch.autocast(the device of the model).",
    ),
    Rule("float16 gradients lost", graph_rules.lost_fp16, "Scale the loss with torch.amp.GradScaler, or use bfloat16."),
    Rule(
        "weights too coarse for the steps",
        graph_rules.coarse_weights,
        "Keep the weights in float32, and let autocast choose the precision of each operation.",
    ),
    Rule(
        "BatchNorm per micro-batch",
        window_rules.batch_norm,
        "Its result depends on the micro-batch's size: GroupNorm or LayerNorm, frozen statistics, or accept it.",
    ),
    Rule(
        "graphs kept",
        graph_rules.graphs_kept,
        "Add up loss.detach(), detach what goes on into the next step, drop retain_graph.",
    ),
    Rule(
        "parameters without gradient", graph_rules.without_gradient, "Look for a detach() on their way, or freeze them."
    ),
    Rule(
        "gradients without optimizer",
        graph_rules.without_optimizer,
        "Give them to the optimizer, or requires_grad_(False).",
    ),
    Rule(
        "dimensions off the tensor cores",
        graph_rules.odd_dimensions,
        "Make them multiples of 8 (a vocabulary's of 64).",
        "no matrix product in half precision on CUDA; target='cuda' asks for its rules",
    ),
)
