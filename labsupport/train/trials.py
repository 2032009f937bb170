"""One trial of a batch size: real steps under a ceiling, of which nothing is left behind."""

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from labsupport.measure.budget import is_out_of_memory, memory_budget
from labsupport.measure.state import KeptState
from labsupport.measure.storages import tensors_in
from labsupport.train.ranks import told_by_all
from labsupport.train.search import Trial

STEPS = 2  # the second has the optimizer's state
MOST_CALLS = 10  # until an optimizer has stepped twice: a gradient scaler may skip the first ones


class Trials:
    """Makes trials of `step(size)`, one whole training step, under `ceiling` bytes on a device.

    `things` are the modules, optimizers and others whose state is kept: after `put_back()` they are as they were.
    Their gradients' memory is lent to the trials, as `zero_grad()` would free it at the start of a step.
    """

    def __init__(
        self,
        step: Callable[[int], Any],
        things: list[Any],
        device: torch.device,
        ceiling: int,
        limit_s: float,
        release: Callable[[], Any] | None = None,
    ) -> None:
        self.step, self.device, self.ceiling, self.limit_s, self._release = step, device, ceiling, limit_s, release
        self._models = [each for each in things if isinstance(each, torch.nn.Module)]
        self._optimizers = [each for each in things if isinstance(each, torch.optim.Optimizer)]
        self._kept = KeptState(things)
        of_models = [p for model in self._models for p in model.parameters()]
        optimized = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
        self._parameters = list({id(p): p for p in (*of_models, *optimized)}.values())
        self._lent: list[tuple[torch.UntypedStorage, int]] = []
        self._warm = False
        self.out_of_memory: BaseException | None = None  # the last one
        parts = {id(part): part for model in self._models for part in model.modules()}.values()
        # Trials do not synchronise, so DDP's buckets are not seen; they are there all the same, and with
        # gradient_as_bucket_view the gradients lie in them: there the sum is too much by some of those.
        self._wrapped = [part for part in parts if isinstance(part, DistributedDataParallel)]
        self._buckets = sum(p.nbytes for each in self._wrapped for p in each.parameters() if p.requires_grad)

    def lend(self) -> None:
        for parameter in self._parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.layout == torch.strided:
                storage = gradient.untyped_storage()
                if storage.nbytes() == gradient.nbytes and storage.resizable():  # no view into a bucket of others
                    self._lent.append((storage, storage.nbytes()))
                    storage.resize_(0)

    def put_back(self) -> None:
        """Everything as it was, and what the trials used is free."""
        if self._release:
            self._release()
        for storage, nbytes in self._lent:
            storage.resize_(nbytes)
        self._lent.clear()
        self._kept.put_back()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, size: int, why: str) -> Trial:
        """Two steps at this size. All ranks make the trial, and get the same answer: whether it fits on each of them.

        Every error but one of memory is raised, on the other ranks as a RuntimeError that tells it.
        """
        error: Exception | None = None
        trial = None
        try:
            trial = self._run(size, why)
        except Exception as raised:
            error = raised
        told = told_by_all((trial, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        if failed := [(rank, text) for rank, (_, text) in enumerate(told) if text]:
            raise RuntimeError(f"rank {failed[0][0]} failed at {size} samples: {failed[0][1]}")
        return _agreed(trial, [each for each, _ in told if each]) if trial and len(told) > 1 else trial  # type: ignore

    def _run(self, size: int, why: str) -> Trial:
        self.lend()
        start, found = time.perf_counter(), _Found()
        try:
            with self.without_synchronisation():
                found = self._steps(size, limit_s=self.limit_s)
        finally:
            self.put_back()
        seconds = time.perf_counter() - start
        late = found.timed_out or (found.fits and seconds > 1.5 * self.limit_s)
        return Trial(size, found.fits and not late, found.peak, seconds, why, late, found.levels)

    def peak_of(self, size: int) -> int:
        """The peak of one more step; the first time of two, for the optimizer's state."""
        with self.without_synchronisation():
            found = self._steps(size, calls=1 if self._warm else STEPS)
        self._warm = True
        if self.out_of_memory is not None and not found.fits:
            raise self.out_of_memory
        return found.peak

    def _steps(self, size: int, *, calls: int | None = None, limit_s: float | None = None) -> "_Found":
        found = _Found()
        log = None
        try:
            with memory_budget(
                self.ceiling - self._buckets, self._models, self._optimizers, device=self.device
            ) as ledger:
                log = ledger.log if ledger else None
                with _phases_on_cuda(self.device) as phases, _until(limit_s, self._models):
                    self._call(size, calls)
            found.fits = log is None or log.refused is None  # a step that catches the error has not done its work
        except _TimedOut:
            found.timed_out = True
        except Exception as error:
            if not is_out_of_memory(error):
                error.add_note(f"(in a trial of {size} samples)")
                raise
            traceback.clear_frames(error.__traceback__)
            # Its traceback would hold us, and we hold it: gradients that were lent would live on in that circle.
            self.out_of_memory = error.with_traceback(None)
        if log is not None:
            changes = np.array([change for _, change in log.events], dtype=np.int64)
            found.levels = changes.cumsum() + self._buckets if found.fits else None
            asked = log.refused[1].nbytes if log.refused else 0
            found.peak = asked + int(changes[: log.refused[0]].sum()) if log.refused else log.peak_bytes
            found.peak += self._buckets
        elif self.device.type != "cuda":  # what is there before the first operation is too much
            found.peak = self._resident()
        elif found.fits:
            found.levels, found.peak = np.array(phases), max(phases, default=0)
        else:
            found.peak = torch.cuda.max_memory_allocated(self.device)
        return found

    def _resident(self) -> int:
        """Bytes of parameters, buffers and optimizer state."""
        buffers = [buffer for model in self._models for buffer in model.buffers()]
        states = [tensor for each in self._optimizers for tensor in tensors_in(list(each.state.values()))]
        storages = {each.untyped_storage() for each in (*self._parameters, *buffers, *states)}
        return sum(each.nbytes() for each in storages) + self._buckets

    def _call(self, size: int, calls: int | None) -> None:
        """So many calls, or until two of them made an optimizer step."""
        stepped: list[int] = []
        made = 0
        handle = register_optimizer_step_post_hook(lambda *_: stepped.append(made))
        try:
            while made < (calls or (STEPS if not self._optimizers else MOST_CALLS)):
                self.step(size)
                made += 1
                if calls is None and len(set(stepped)) >= STEPS:
                    return
        finally:
            handle.remove()
        if calls is None and self._optimizers:
            raise RuntimeError(
                f"at {size} samples, {made} calls of the step made {len(set(stepped))} optimizer steps: a trial that "
                "does not train proves nothing. A step has to run one optimizer step a call, whatever ran before: "
                "set a trainer's step count back, and its limit above it"
            )

    @contextmanager
    def without_synchronisation(self) -> Iterator[None]:
        """The ranks do not wait for one another within a step: one that runs out of memory would never come."""
        with ExitStack() as stack:
            for each in self._wrapped:
                stack.enter_context(each.no_sync())
            yield


class _Found:
    """What a trial has come to so far."""

    fits = timed_out = False
    peak = 0
    levels: np.ndarray | None = None


class _TimedOut(BaseException):  # no `except Exception` of a user's step may take it for its own
    pass


class _Deadline(TorchDispatchMode):
    """Ends what runs too long, at its next operation."""

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self._ends = time.perf_counter() + limit_s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.perf_counter() > self._ends:
            raise _TimedOut
        return func(*args, **(kwargs or {}))


@contextmanager
def _until(limit_s: float | None, models: list[torch.nn.Module]) -> Iterator[None]:
    """Not around compiled modules: under a dispatch mode they would run eager."""
    compiled = [part for model in models for part in model.modules() if type(part).__name__ == "OptimizedModule"]
    if limit_s is None or compiled:
        yield
        return
    with _Deadline(limit_s):
        yield


@contextmanager
def _phases_on_cuda(device: torch.device) -> Iterator[list[int]]:
    """The allocator's peaks between the beginnings and ends of optimizer steps: they need not be at their highest at
    the same batch size."""
    peaks: list[int] = []
    if device.type != "cuda":
        yield peaks
        return

    def note(*_: Any) -> None:
        peaks.append(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)

    torch.cuda.reset_peak_memory_stats(device)
    handles = [register_optimizer_step_pre_hook(note), register_optimizer_step_post_hook(note)]
    try:
        yield peaks
    finally:
        for handle in handles:
            handle.remove()
    note()


def _agreed(mine: Trial, told: list[Trial]) -> Trial:
    """It fits if it fits on every rank; what it takes is what it takes where it takes most."""
    return replace(
        mine,
        fits=all(each.fits for each in told),
        timed_out=any(each.timed_out for each in told),
        peak_bytes=max(each.peak_bytes for each in told),
        seconds=max(each.seconds for each in told),
    )
