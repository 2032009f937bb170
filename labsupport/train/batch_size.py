"""The largest batch that fits, the knee of throughput, and which batch to take."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import psutil
import torch
from torch.nn.parallel import DistributedDataParallel

from labsupport.devices import choose_device
from labsupport.limits import allowed_memory_bytes
from labsupport.measure.state import KeptState
from labsupport.measure.stopwatch import check_callable, check_positive
from labsupport.train.any_size import OwnStep, WorkloadStep
from labsupport.train.batch_result import BatchSizeResult, nothing_fits
from labsupport.train.plan import MemoryPlan, plan_memory
from labsupport.train.ranks import told_by_all
from labsupport.train.recipe import Recipe
from labsupport.train.search import NothingFits, Search, Trial, largest_by_levels
from labsupport.train.throughput import SHARE, sizes_to_time, time_sizes
from labsupport.train.trials import STEPS, Trials
from labsupport.train.workload import Workload
from labsupport.units import format_bytes, parse_bytes

T = TypeVar("T")

HOST_SHARE = 0.8  # of a host's free memory: tensors are not all that takes some
KNEE_S = 5.0


def find_batch_size(
    workload: Workload | None = None,
    *,
    step: Callable[[int], Any] | None = None,
    budget: int | str | None = None,
    recipe: Recipe | None = None,
    max_batch: int | None = None,
    multiple_of: int = 1,
    tolerance: float = 0.0,
    headroom: float = 0.1,
    knee: bool = True,
    plan: bool = True,
    trial_limit_s: float = 60.0,
    max_trials: int = 30,
    state: Iterable[Any] | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[str], Any] | None = print,
) -> BatchSizeResult:
    """The largest batch that trains within `budget` bytes ("512MiB", or a number), and the smallest that trains fast.

    A plan of the memory says where to look; without one (`plan=False`, or a model that cannot be planned) two
    small sizes are tried and the rest is predicted from them. Each trial is two real steps, for an optimizer makes
    its state in the first. The answer was tried, and so was the next size, which did not fit. Only errors of memory
    count as such; every other error is raised as it is. The workload's batch has to be the worst one that training
    meets: the longest sequences, the most crowded images.

    Instead of a workload, `step` may be any function of your own that trains one step on `batch_size` samples:
    several models, a gradient scaler, a trainer. It has to make its own batch. What it names that has a `state_dict`
    is kept (or `state`). Models, optimizers, gradients, modes and random states are as before afterwards, after an
    error too, and nothing stays allocated.

    The search ends at the data set's size (`samples` of the workload), at `max_batch`, and where a trial would take
    longer than `trial_limit_s`. Sizes are multiples of `multiple_of`. On a GPU, memory is fragmented now and then, so
    that a size fails which is smaller than one that fits: a `tolerance` of 0.02 stops the search at 2 %.
    `budget` is by default the GPU's memory; on a CPU 80 % of what is free, counted by the ledger (`memory_budget`).
    With torch.distributed, every rank has to call this: they agree on what fits on all of them.

    With `knee`, sizes up to the largest are timed in turns, and `recommended_batch` is the smallest that reaches 90 %
    of the throughput that no batch passes, if it leaves `headroom` (a share) of the budget free. `progress` gets a
    line a trial. Raises torch.OutOfMemoryError, with a note on what is in the way, if not even the smallest size fits.
    """
    _check(workload, step, max_batch, multiple_of, tolerance, headroom, max_trials, trial_limit_s)
    at = torch.device(device) if device is not None else choose_device().device
    if recipe is not None and recipe.compile and at.type == "cpu":
        raise ValueError(
            "compile: on a CPU the ledger would make a compiled step run eager, and count that; leave compile out of "
            "the recipe, and compile at the size that is found"
        )
    ceiling, budget_from = ceiling_of(budget, at)
    if at.type == "cpu" and ceiling > (free := _free_on_host()):
        raise ValueError(
            f"budget: {format_bytes(ceiling)} is more than the {format_bytes(free)} that are free here: a trial would "
            "end this process before it meets the ceiling; give a smaller one, or ask plan_memory(...).max_batch"
        )
    most, limit = _limit(workload, max_batch, multiple_of)
    with _random_states_kept():  # the first batch is made before there is a state to keep
        subject: WorkloadStep | OwnStep
        if workload is not None:
            first = min(2 * multiple_of, most or 2 * multiple_of)
            subject = WorkloadStep(workload, recipe or Recipe(), state, at, first)
        else:
            subject = OwnStep(step, state)  # type: ignore[arg-type]
        planned, says = (
            _plan(workload, recipe, at, subject.things, ceiling) if plan else (None, "no plan was asked for")
        )
        trials = Trials(subject, subject.things, at, ceiling, trial_limit_s, subject.release)
        predict = partial(_predicted, plan=planned, ceiling=ceiling)
        search = Search(
            partial(_tried, trials, progress),
            predict,
            at_most=most,
            limit=limit,
            multiple_of=multiple_of,
            tolerance=tolerance,
            max_trials=max_trials,
            trial_limit_s=trial_limit_s,
        )
        stopped_by = _searched(search, planned.max_batch(ceiling) if planned else None, trials, subject.name)
        result = BatchSizeResult(
            subject.name,
            None if step else recipe or Recipe(),
            search.low * multiple_of,
            stopped_by,
            ceiling,
            budget_from,
            tuple(search.trials),
            says,
        )
        if not knee:
            return result
        room = int((1 - headroom) * ceiling)
        with_room = _predicted(search.trials, planned, room) or result.max_batch
        with_room = min(result.max_batch, int(with_room) // multiple_of * multiple_of)
        return _with_knee(result, trials, subject, with_room, room, multiple_of)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    kept = KeptState([])
    try:
        yield
    finally:
        kept.put_back()


def _tried(trials: Trials, progress: Callable[[str], Any] | None, size: int, why: str) -> Trial:
    trial = trials.run(size, why)
    if progress:
        progress(str(trial))
    return trial


def _searched(search: Search, planned: int | None, trials: Trials, name: str) -> str:
    """What ended the search. Errors leave with what was found until then."""
    refused = ""
    try:
        return search.find(_least(told_by_all(planned)))
    except NothingFits:
        pass
    except Exception as error:
        done = "; ".join(map(str, search.trials)) or "none"
        if search.low or not search.trials:
            error.add_note(f"find_batch_size stopped: this is no error of memory. Trials before it: {done}")
            raise
        refused = f", and a smaller one is refused: {error}"  # BatchNorm's word for one sample
    raise nothing_fits(name, search.trials, trials.ceiling, trials.out_of_memory, refused)


def _with_knee(
    result: BatchSizeResult, trials: Trials, subject: WorkloadStep | OwnStep, with_room: int, room: int, unit: int
) -> BatchSizeResult:
    """The same with throughput, knee and recommendation; what is recommended was run."""
    last = next(trial for trial in reversed(result.trials) if trial.fits)
    sizes = sizes_to_time(result.max_batch, last.seconds / STEPS * result.max_batch / last.size, unit)
    timed = partial(time_sizes, subject, prepare=subject.prepare, peak_of=trials.peak_of, agree=_first_rank)
    trials.lend()
    try:
        throughput = _first_rank(timed(sizes, seconds=KNEE_S))
        knee = max(sizes[0], math.ceil(throughput.knee / unit) * unit)
        wanted = min(knee, with_room or result.max_batch)
        if wanted not in sizes:
            throughput = throughput.also(_first_rank(timed([wanted], seconds=KNEE_S / 10)))
    finally:
        trials.put_back()
    with_headroom = [each.size for each in throughput.timings if each.size <= wanted and each.peak_bytes <= room]
    recommended = max(with_headroom, default=wanted)
    free = f"{1 - room / result.budget_bytes:.0%} of the budget free"
    share = throughput.samples_per_s(recommended) / throughput.asymptote
    reached = f"{share:.0%} of the throughput that no batch size passes"
    if recommended == knee:
        reason = f"the smallest that reaches {SHARE:.0%} of the throughput that no batch size passes"
    elif not with_headroom:
        reason = f"no size that was tried leaves {free}"
    elif recommended == result.max_batch and result.stopped_by != "memory":
        reason = f"the largest within the search's limit ({result.stopped_by}); it reaches {reached}"
    else:
        reason = f"the largest that leaves {free}; it reaches {reached}"
    knee_batch = knee if knee <= result.max_batch else None
    return replace(result, throughput=throughput, knee_batch=knee_batch, recommended_batch=recommended, reason=reason)


def _first_rank(mine: T) -> T:
    return told_by_all(mine)[0]


def _least(answers: Sequence[float | None]) -> Any:
    """Of all ranks; None if memory rises on none of them."""
    return min((answer for answer in answers if answer is not None), default=None)


def _predicted(trials: Sequence[Trial], plan: MemoryPlan | None, ceiling: int) -> float | None:
    """By the plan, as far off as it was at the largest size that fits; else by what the trials took."""
    largest = max((trial for trial in trials if trial.fits), key=lambda trial: trial.size, default=None)
    if plan is None or largest is None:
        return _least(told_by_all(largest_by_levels(trials, ceiling)))
    off = largest.peak_bytes - plan.peak_bytes(largest.size)
    return _least(told_by_all(plan.max_batch(max(0, ceiling - off))))


def _plan(
    workload: Workload | None, recipe: Recipe | None, at: torch.device, things: Sequence[Any], ceiling: int
) -> tuple[MemoryPlan | None, str]:
    if workload is None:
        return None, "there is no plan: a step of your own cannot be traced on fake tensors"
    if any(isinstance(each, DistributedDataParallel) for each in things):
        return None, "there is no plan: DistributedDataParallel cannot be traced on fake tensors"
    try:
        plan = plan_memory(workload, recipe, target=at.type)
        most = plan.max_batch(ceiling)
        return plan, f"the plan says {'that memory does not rise' if most is None else f'{most} samples'}"
    except Exception as error:  # whatever it is, real steps will tell
        return None, f"there is no plan: {error}"


def ceiling_of(budget: int | str | None, at: torch.device) -> tuple[int, str]:
    """Bytes that tensors may take on a device, and where that number is from."""
    if budget is not None:
        return parse_bytes(budget), "the budget given"
    if at.type == "cuda":
        free, _ = torch.cuda.mem_get_info(at)
        cached = torch.cuda.memory_reserved(at)
        return free + cached, "what is free on the GPU"
    return int(HOST_SHARE * _free_on_host()), f"{HOST_SHARE:.0%} of this machine's free memory"


def _free_on_host() -> int:
    return min(psutil.virtual_memory().available, allowed_memory_bytes())


def _limit(workload: Workload | None, max_batch: int | None, unit: int) -> tuple[int | None, str]:
    limits = {"max_batch": max_batch, "samples": workload.samples if workload else None}
    given = {name: most for name, most in limits.items() if most is not None}
    if not given:
        return None, ""
    name = min(given, key=lambda each: given[each])
    if given[name] < unit:
        raise ValueError(f"multiple_of={unit}: not one such size is within {name}, {given[name]}")
    return given[name], name


def _check(
    workload: Any,
    step: Any,
    max_batch: int | None,
    multiple_of: int,
    tolerance: float,
    headroom: float,
    max_trials: int,
    trial_limit_s: float,
) -> None:
    if (workload is None) == (step is None):
        raise TypeError("find_batch_size takes a workload, or step=lambda batch_size: ..., one of them")
    if step is not None:
        check_callable(step)
    elif not isinstance(workload, Workload):
        raise TypeError(f"a Workload is expected, got {type(workload).__name__}; for a function of your own, step=")
    whole = {"multiple_of": multiple_of, "max_trials": max_trials, "max_batch": 1 if max_batch is None else max_batch}
    for name, value in whole.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: a whole number of 1 or more is expected, got {value!r}")
    for name, share in {"tolerance": tolerance, "headroom": headroom}.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"{name}: a share from 0 up to, not including, 1 is expected, got {share!r}")
    check_positive(trial_limit_s=trial_limit_s)
