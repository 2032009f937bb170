"""What a search for a batch size has found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labsupport.train.recipe import Recipe
from labsupport.train.search import Trial
from labsupport.train.throughput import Throughput, Timing
from labsupport.units import format_bytes


@dataclass(frozen=True, repr=False)
class BatchSizeResult:
    """What the search found; sizes are samples.

    `max_batch` is the largest that was seen to fit, in real steps; `stopped_by` is what ended the search: "memory" (the
    next size was seen not to fit), "samples", "max_batch", "memory does not rise", "time limit", "trial limit" or
    "tolerance". `knee_batch` is the smallest size at the knee of `throughput`, None where that was not reached or not
    asked for. `recommended_batch` is that one, or the largest that leaves the headroom, whichever is smaller; `reason`
    says which.
    """

    name: str
    recipe: Recipe | None
    max_batch: int
    stopped_by: str
    budget_bytes: int
    budget_from: str
    trials: tuple[Trial, ...]
    plan_says: str
    throughput: Throughput | None = None
    knee_batch: int | None = None
    recommended_batch: int | None = None
    reason: str = "throughput was not asked for"

    @property
    def timings(self) -> tuple[Timing, ...]:
        return self.throughput.timings if self.throughput else ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the numbers, without what the trials' predictions went by."""
        curve = self.throughput
        return {
            "max_batch": self.max_batch,
            "stopped_by": self.stopped_by,
            "knee_batch": self.knee_batch,
            "knee_interval": curve and curve.interval,
            "recommended_batch": self.recommended_batch,
            "reason": self.reason,
            "plan": self.plan_says,
            "trials": [{key: value for key, value in vars(trial).items() if key != "levels"} for trial in self.trials],
            "timings": [{**vars(timing), "samples_per_s": timing.samples_per_s} for timing in self.timings],
        }

    @property
    def lines(self) -> tuple[str, ...]:
        said = [
            f"{self.name}: the largest batch in {format_bytes(self.budget_bytes)} ({self.budget_from}) is "
            f"{self.max_batch} samples; stopped by: {self.stopped_by}",
            self.plan_says,
            *(f"  {trial}" for trial in self.trials),
        ]
        if self.throughput:
            low, high = self.throughput.interval
            said += [f"  {timing}" for timing in self.timings if timing.rounds_s]
            doubt = ""
            if self.throughput.knee > self.timings[-1].size:
                doubt = ", beyond what was timed: by the straight line alone"
            elif high > 2 * low + self.timings[0].size:
                doubt = ": the timings differ too much to tell it well"
            said += [f"knee: {self.throughput.knee:.0f} samples ({low:.0f} to {high:.0f}){doubt}"]
            said += [f"recommended: {self.recommended_batch} samples: {self.reason}"]
        return tuple(said)

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        said = f"largest batch {self.max_batch} samples, stopped by: {self.stopped_by}, {len(self.trials)} trials"
        measured = "".join(f"\n{line} (measured)" for line in self.lines[1:])
        return {"application/vnd.labsupport.memory+json": {"batch": self.name}, "text/plain": said + measured}


def nothing_fits(name: str, trials: Sequence[Trial], ceiling: int, error: Any, more: str) -> Exception:
    """What to raise where no size fits. `error` is the last one of memory, `more` is what else there is to say."""
    smallest = min(trial.size for trial in trials)
    samples = "sample" if smallest == 1 else "samples"
    if error is None and any(trial.timed_out for trial in trials):
        return TimeoutError(
            f"{name}: the trial of {smallest} {samples} was ended by the time limit: give a longer trial_limit_s"
        )
    ledger = getattr(error, "ledger", None)
    parts = {} if ledger is None else ledger.timeline().at(-1 if not ledger.log.refused else ledger.log.refused[0])
    live = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in parts.items() if nbytes)
    resident = f"Parameters, buffers and optimizer state alone take {format_bytes(trials[-1].peak_bytes)}"
    found = torch.OutOfMemoryError(
        f"{name}: not even {smallest} {samples} {'fits' if smallest == 1 else 'fit'} in {format_bytes(ceiling)}"
        f"{more}. {f'Live when memory ran out: {live}' if live else resident}"
    )
    found.ledger, found.limit_bytes, found.trials = ledger, ceiling, tuple(trials)  # type: ignore[attr-defined]
    return found
