"""An out-of-memory error that says what was in the way."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from labsupport.devices import choose_device
from labsupport.measure.allocations import StorageLog
from labsupport.measure.budget import is_out_of_memory
from labsupport.measure.categories import ACTIVATION, INPUT, TEMPORARY
from labsupport.measure.memory import Growth, LiveTensor, MemoryLedger
from labsupport.train.plan import plan_memory
from labsupport.train.recipe import Recipe
from labsupport.train.workload import Workload
from labsupport.units import format_bytes

FIRST_STEPS = 2  # are watched: the second has the optimizer's state
LARGEST, GROWN = 5, 3


@dataclass(frozen=True, repr=False)
class OutOfMemoryReport:
    """What was in the way when memory ran out.

    `parts`: bytes by category, `largest`: how many of which tensors took most; at that moment, or, if `at_the_error`
    is false, at the peak of the steps that were watched before. `growth`: what steps left behind since the first
    ones, by the line that made it. `limit_bytes`: how much there was; None if nobody says. `largest_batch`: the most
    samples that fit in it, None if not known; `batch_from` says how that was found.
    """

    step: int
    at_the_error: bool
    parts: dict[str, int]
    largest: tuple[tuple[int, LiveTensor], ...]
    growth: tuple[Growth, ...]
    limit_bytes: int | None
    largest_batch: int | None
    batch_from: str

    @property
    def lines(self) -> tuple[str, ...]:
        when = f"when step {self.step} ran out of memory" if self.at_the_error else "at the peak of the watched steps"
        parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.parts.items() if nbytes)
        said = [f"Live {when}: {parts or 'nothing that was seen'}.", "The largest of it:"]
        said += [f"  {f'{count} x ' if count > 1 else ''}{each}" for count, each in self.largest]
        said += ["Left behind since the first steps:"] if self.growth else []
        said += [f"  {each}" for each in self.growth]
        if self.limit_bytes is not None:
            batch = "not known" if self.largest_batch is None else f"{self.largest_batch} samples"
            said.append(f"The largest batch in {format_bytes(self.limit_bytes)}: {batch} ({self.batch_from}).")
        return tuple(said)

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"application/vnd.labsupport.memory+json": {"step": self.step}, "text/plain": repr(self)}


@contextmanager
def explain_oom(workload: Workload | None = None, recipe: Recipe | None = None) -> Iterator[None]:
    """Around your own training loop: an error of memory leaves with `.report`, an OutOfMemoryReport, which is also
    printed below its traceback. Every other error passes as it is.

    A ledger watches the first two steps, and then one at each power of two; in between a step costs some microseconds
    more. With `memory_budget`, inside or around, the budget's own ledger tells. With `workload` and its `recipe` the
    largest batch comes from their plan, else it is estimated from what was seen.
    """
    watch = _Watch()
    try:
        yield
    except Exception as error:
        watch.end()  # before the report allocates anything
        if is_out_of_memory(error):
            report = watch.report(error, workload, recipe)
            error.report = report  # type: ignore[attr-defined]
            error.add_note(str(report))
        raise
    finally:
        watch.end()


class _Watch:
    """A ledger that is on in some steps."""

    def __init__(self) -> None:
        self.ledger = MemoryLedger(device=choose_device().device)
        self.ledger.__enter__()
        self.steps = 0
        self.on = True
        self._hook: Any = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.steps += 1
        wanted = self.steps < FIRST_STEPS or (self.steps > FIRST_STEPS and self.steps & (self.steps - 1) == 0)
        if self.on and not wanted:
            self.on = not self.ledger.log.pause()
        elif wanted and not self.on:
            self.on = self.ledger.log.resume()

    def end(self) -> None:
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        if self.on:
            self.ledger.__exit__(None, None, None)
        else:
            self.ledger.log.close()

    def report(self, error: BaseException, workload: Workload | None, recipe: Recipe | None) -> OutOfMemoryReport:
        ledger = getattr(error, "ledger", None) or _of_a_budget_around() or self.ledger
        log, timeline = ledger.log, ledger.timeline()
        at_the_error = log.refused is not None or (ledger is self.ledger and self.on)
        last = len(timeline.total) - 1
        position = log.refused[0] if log.refused else last if at_the_error else timeline.peak
        asked = log.refused[1].nbytes if log.refused else 0
        parts = timeline.at(position)
        iterations = len(ledger.iterations)
        grown = ledger.growth(since=FIRST_STEPS)[:GROWN] if iterations > FIRST_STEPS else ()
        limit = getattr(error, "limit_bytes", None) or log.ceiling
        if limit is None and ledger.device.type == "cuda":
            limit = torch.cuda.mem_get_info(ledger.device)[1]
        batch, batch_from = None, "give explain_oom the workload and recipe to know it"
        if limit is not None and workload is not None:
            batch, batch_from = _planned(workload, recipe, ledger.device.type, limit)
        elif limit is not None:
            batch, batch_from = _estimated(ledger.largest(len(log.storages), at=position), parts, asked, limit)
        if grown:
            batch_from += "; but the batch is not what grows"
        largest = _alike(ledger.largest(len(log.storages), at=position))[:LARGEST]
        return OutOfMemoryReport(self.steps + 1, at_the_error, parts, largest, tuple(grown), limit, batch, batch_from)


def _of_a_budget_around() -> MemoryLedger | None:
    """The ledger of a memory_budget that goes on around us, if that one has raised."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, StorageLog) and mode.refused:
            return MemoryLedger(log=mode)
    return None


def _alike(live: Sequence[LiveTensor]) -> tuple[tuple[int, LiveTensor], ...]:
    """How often each is there, those first that take most together: a leak is many small ones."""
    found: dict[tuple[object, ...], list[LiveTensor]] = {}
    for each in live:
        found.setdefault((each.category, each.op, each.module, each.shape, each.file, each.line), []).append(each)
    groups = sorted(found.values(), key=lambda group: -sum(each.nbytes for each in group))
    return tuple((len(group), group[0]) for group in groups)


def _planned(workload: Workload, recipe: Recipe | None, kind: str, limit: int) -> tuple[int | None, str]:
    try:
        with _disable_current_modes():  # a budget around us is full
            return plan_memory(workload, recipe, target=kind).max_batch(limit), "by its plan"
    except Exception as error:  # whatever it is, the error that is told is the one of memory
        return None, f"there is no plan: {error}"


def _estimated(live: Sequence[LiveTensor], parts: dict[str, int], asked: int, limit: int) -> tuple[int | None, str]:
    """As if everything but the inputs, activations and temporaries were there at any batch size."""
    samples = next((each.shape[0] for each in live if each.category == INPUT and each.shape), None)
    scaled = asked + sum(parts[name] for name in (INPUT, ACTIVATION, TEMPORARY))
    if not samples or not scaled:
        return None, "no input was seen"
    fixed = sum(parts.values()) + asked - scaled
    return max(0, samples * (limit - fixed) // scaled), f"at most, judging by how far {samples} samples got"
