"""A workload's memory, the largest batch on each card, and the batch to take: the report of `labs batch`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from labsupport.devices import choose_device
from labsupport.train.batch_result import BatchSizeResult
from labsupport.train.batch_size import ceiling_of, find_batch_size
from labsupport.train.plan import NOT_IN_A_CUDA_PLAN, MemoryPlan, plan_memory
from labsupport.train.recipe import Recipe
from labsupport.train.rooms import TENSOR_SHARE, largest_batches, rooms
from labsupport.train.traces import CannotPlan
from labsupport.train.workload import Workload
from labsupport.units import format_bytes


@dataclass(frozen=True)
class BatchReport:
    """`parts` are bytes by category at the peak of `recipe.batch_size` samples; they and `planned` are None without a
    plan, and `no_plan` says why (`no_parts`, where only that size cannot be planned). `largest` has a batch for each
    card of the table, None without a plan for CUDA, and `no_cards` says why. `card` is the one asked for. `found` is
    None where no step was run: `not_run` says why."""

    name: str
    recipe: Recipe
    device: str
    card: str | None
    ceiling: int
    ceiling_from: str
    plan: MemoryPlan | None
    no_plan: str
    parts: dict[str, int] | None
    no_parts: str
    planned: int | None
    largest: dict[str, int | None] | None
    no_cards: str
    found: BatchSizeResult | None
    not_run: str

    @property
    def nothing_fits(self) -> bool:
        """By the plan, where no step was run."""
        return self.found is None and self.planned == 0

    @property
    def lines(self) -> tuple[str, ...]:
        said = []
        if self.plan:
            sizes = self.parts or {}
            parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in sizes.items() if nbytes)
            said += [
                *self.plan.lines,
                self.no_parts or f"with {self.recipe.batch_size} samples: {format_bytes(sum(sizes.values()))}: {parts}",
                f"largest batch in {format_bytes(self.ceiling)} ({self.ceiling_from}): {_samples(self.planned)}",
            ]
        else:
            said.append(f"{self.name} cannot be planned: {self.no_plan}")
        if self.largest:
            said.append(
                f"largest batch by card, an estimate: {TENSOR_SHARE:.0%} of its memory counts, "
                f"not in it are {', '.join(NOT_IN_A_CUDA_PLAN)}"
            )
            said += [f"  {card:24} {_samples(batch)}" for card, batch in self.largest.items()]
        elif self.plan:
            said.append(f"no card can be planned for: {self.no_cards}")
        if self.found:
            here = f"steps run here, on the {'CPU' if self.device == 'cpu' else 'GPU'}, with as much memory"
            said += [f"{here}: a {self.card} has a knee of its own"] if self.card else []
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
            "device": self.device,
            "accelerator": self.card,
            "budget_bytes": self.ceiling,
            "budget_from": self.ceiling_from,
            "plan": None if self.plan is None else self.plan.as_dict(),
            "parts": self.parts,
            "no_parts": self.no_parts or None,
            "peak_bytes": None if self.parts is None else sum(self.parts.values()),
            "planned_batch": self.planned,
            "no_plan": self.no_plan or None,
            "largest_by_card": self.largest,
            "no_cards": self.no_cards or None,
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
    trial_limit_s: float = 60.0,
    plan_only: bool = False,
    progress: Callable[[str], Any] | None = None,
) -> BatchReport:
    """Plan a workload and, unless `plan_only`, search on this machine.

    Nothing is run under a ceiling that is more than what is free here: trials would fill the machine's memory before
    they meet it. Raises ValueError for a request that makes no sense, and where there is neither plan nor search;
    torch.OutOfMemoryError if not one sample fits; the workload's own errors are raised as they are.
    """
    if accelerator is not None and budget is not None:
        raise ValueError("--budget or --accelerator is expected, not both")
    recipe = Recipe(batch_size=batch, precision=precision, checkpointing=checkpointing)
    device = choose_device().device
    free, free_from = ceiling_of(None, device)
    target, card, ceiling, ceiling_from = device.type, None, free, free_from
    if budget is not None:
        ceiling, ceiling_from = ceiling_of(budget, device)
    elif accelerator is not None:
        card = _card(accelerator)
        target, ceiling, ceiling_from = "cuda", rooms()[card], f"{TENSOR_SHARE:.0%} of a {card}"
    not_run = "--plan-only" if plan_only else ""
    if ceiling > free and not plan_only:
        not_run = f"{format_bytes(ceiling)} are more than {free_from}, {format_bytes(free)}; give a smaller --budget"
    found = None
    if not not_run:  # before any plan, which may build the model without memory: a `model()` that keeps it would too
        found = find_batch_size(
            workload,
            budget=ceiling,
            recipe=recipe,
            max_batch=max_batch,
            multiple_of=multiple_of,
            trial_limit_s=trial_limit_s,
            progress=progress,
        )
    plan, no_plan = _planned(workload, recipe, target, raises=bool(not_run))
    if plan is None and not_run:
        raise ValueError(f"{workload.name} cannot be planned: {no_plan}\nno step was run: {not_run}")
    cards, no_cards = (plan, no_plan) if plan is None or target == "cuda" else _planned(workload, recipe, "cuda")
    parts, no_parts = None, ""
    try:
        parts = None if plan is None else plan.at_peak(batch)
    except ValueError as error:  # one sample, which the model does not take
        no_parts = str(error)
    return BatchReport(
        workload.name,
        recipe,
        device.type,
        card,
        ceiling,
        ceiling_from,
        plan,
        no_plan,
        parts,
        no_parts,
        None if plan is None else plan.max_batch(ceiling),
        None if cards is None else largest_batches(cards),
        no_cards,
        found,
        not_run,
    )


def _planned(workload: Workload, recipe: Recipe, target: str, *, raises: bool = False) -> tuple[MemoryPlan | None, str]:
    """The plan, or why there is none. With `raises`, an error of its own leaves as it is: no step will meet it."""
    try:
        return plan_memory(workload, recipe, target=target), ""
    except CannotPlan as error:
        return None, str(error)
    except Exception as error:  # real steps may work all the same
        if raises:
            raise
        return None, f"{type(error).__name__}: {error}"


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
