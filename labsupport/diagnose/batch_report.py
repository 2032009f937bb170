"""A workload's memory, the largest batch on each card, and the batch to take: the report of `labs batch`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from labsupport.devices import choose_device
from labsupport.limits import allowed_memory_bytes
from labsupport.train.batch_result import BatchSizeResult
from labsupport.train.batch_size import ceiling_of, find_batch_size
from labsupport.train.plan import NOT_IN_A_CUDA_PLAN, MemoryPlan, plan_memory
from labsupport.train.recipe import Recipe
from labsupport.train.rooms import TENSOR_SHARE, largest_batches, rooms
from labsupport.train.workload import Workload
from labsupport.units import format_bytes


@dataclass(frozen=True)
class BatchReport:
    """`parts` are bytes by category at the peak of `recipe.batch_size` samples; `largest` has a batch for each card of
    the table. Both are None without a plan: `no_plan` says why. `found` is None where no step was run."""

    name: str
    recipe: Recipe
    ceiling: int
    ceiling_from: str
    plan: MemoryPlan | None
    no_plan: str
    parts: dict[str, int] | None
    planned: int | None
    largest: dict[str, int | None] | None
    found: BatchSizeResult | None
    not_run: str

    @property
    def lines(self) -> tuple[str, ...]:
        said = []
        if self.plan and self.parts:
            parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.parts.items() if nbytes)
            said += [
                *self.plan.lines,
                f"with {self.recipe.batch_size} samples: {format_bytes(sum(self.parts.values()))}: {parts}",
            ]
            said.append(
                f"largest batch in {format_bytes(self.ceiling)} ({self.ceiling_from}): {_samples(self.planned)}"
            )
        else:
            said.append(f"{self.name} cannot be planned: {self.no_plan}")
        if self.largest:
            said.append(
                f"largest batch by card, an estimate: {TENSOR_SHARE:.0%} of its memory counts, "
                f"not in it are {', '.join(NOT_IN_A_CUDA_PLAN)}"
            )
            said += [f"  {card:24} {_samples(batch)}" for card, batch in self.largest.items()]
        if self.found:
            said += [*self.found.lines, f"the line to use: batch_size = {self.found.recommended_batch}"]
        else:
            said.append(f"no step was run: {self.not_run}")
        return tuple(said)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = self.found
        return {
            "workload": self.name,
            "recipe": asdict(self.recipe),
            "budget_bytes": self.ceiling,
            "budget_from": self.ceiling_from,
            "parts": self.parts,
            "peak_bytes": None if self.parts is None else sum(self.parts.values()),
            "planned_batch": self.planned,
            "no_plan": self.no_plan or None,
            "largest_by_card": self.largest,
            "not_run": self.not_run or None,
            "search": None if found is None else found.as_dict(),
        }


def report_batch(
    workload: Workload,
    *,
    budget: str | None = None,
    accelerator: str | None = None,
    batch: int = 32,
    precision: str = "fp32",
    checkpointing: bool = False,
    max_batch: int | None = None,
    multiple_of: int = 1,
    plan_only: bool = False,
    progress: Callable[[str], Any] | None = None,
) -> BatchReport:
    """Plan a workload and, unless `plan_only`, search on this machine. Raises ValueError for a request that makes no
    sense, torch.OutOfMemoryError if not one sample fits; the workload's own errors are raised as they are."""
    recipe = Recipe(batch_size=batch, precision=precision, checkpointing=checkpointing)
    device = choose_device().device
    if accelerator is None:
        target, (ceiling, ceiling_from) = device.type, ceiling_of(budget, device)
    elif budget is None:
        card = _card(accelerator)
        target, ceiling, ceiling_from = "cuda", rooms()[card], f"{TENSOR_SHARE:.0%} of a {card}"
    else:
        raise ValueError("--budget or --accelerator is expected, not both")
    plan, parts, planned, no_plan = None, None, None, ""
    try:
        plan = plan_memory(workload, recipe, target=target)
        parts, planned = plan.at_peak(batch), plan.max_batch(ceiling)
    except Exception as error:  # real steps may work all the same
        no_plan = str(error)
    if plan_only and no_plan:
        raise ValueError(f"{workload.name} cannot be planned: {no_plan}")
    largest = (
        None
        if no_plan
        else largest_batches(plan if target == "cuda" and plan else plan_memory(workload, recipe, target="cuda"))
    )
    not_run = "--plan-only" if plan_only else ""
    if accelerator and device.type == "cpu" and ceiling > 0.8 * allowed_memory_bytes():
        not_run = not_run or f"{format_bytes(ceiling)} are more than this machine has; give --plan-only, or a --budget"
    found = None
    if not not_run:
        found = find_batch_size(
            workload, budget=ceiling, recipe=recipe, max_batch=max_batch, multiple_of=multiple_of, progress=progress
        )
    return BatchReport(
        workload.name, recipe, ceiling, ceiling_from, plan, no_plan, parts, planned, largest, found, not_run
    )


def _card(name: str) -> str:
    """The row of the table that a name means."""
    cards = {card: card.rpartition(" (")[0] for card in rooms()}
    exact = [card for card, short in cards.items() if name.lower() in (card.lower(), short.lower())]
    if len(exact) == 1:
        return exact[0]
    if exact:
        raise ValueError(f"{name} was sold with several sizes of memory: give one of {', '.join(exact)}")
    near = get_close_matches(name.upper(), cards.values(), n=3, cutoff=0.4)
    known = [card for card, short in cards.items() if short in near or not near]
    raise ValueError(f"no accelerator {name!r}: {'near are' if near else 'there are'} {', '.join(known)}")


def _samples(batch: int | None) -> str:
    return (
        "any: memory does not rise with it" if batch is None else f"{batch} samples" if batch else "not even 1 sample"
    )
