"""A training step traced without memory: on copies of its model, optimizer and batch that have fake CPU tensors."""

import copy
import gc
import random
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from labsupport.measure.allocations import FORWARD, StorageLog
from labsupport.measure.categories import spans_of
from labsupport.measure.memory import MemoryLedger
from labsupport.measure.state import KeptState
from labsupport.measure.storages import OURS, Storage, described, source_line, tensors_in
from labsupport.train.cuda_kernels import as_on_cuda
from labsupport.train.recipe import Recipe
from labsupport.train.step import Step, arranged, batch_of, made, optimizer_of
from labsupport.train.workload import Workload

T = TypeVar("T")
STEPS = 2  # the first makes the optimizer's state, the second has it


class CannotPlan(RuntimeError):
    """The memory of this step is no line in the batch size, or it cannot run on fake tensors; the text says why."""


@dataclass(frozen=True)
class Trace:
    """The allocations of a step at one batch size, in order: whose, and by how many bytes what is live changed."""

    batch: int
    batch_bytes: int
    numbers: tuple[int, ...]
    changes: np.ndarray
    storages: list[Storage]
    spans: list[list[tuple[int, str]]]

    @cached_property
    def keys(self) -> list[tuple[Any, ...]]:
        """What has to be the same at another batch size."""
        told = [(each.op, each.phase, each.module) for each in self.storages]
        return [(number, change > 0, *told[number]) for number, change in zip(self.numbers, self.changes, strict=True)]

    def event(self, index: int) -> str:
        storage = self.storages[self.numbers[index]]
        what = described(storage, line=storage.phase == FORWARD)  # later phases have the line that called us
        return what if self.changes[index] > 0 else f"the end of {what}"

    def category(self, number: int, position: int) -> str:
        return next(name for start, name in reversed(self.spans[number]) if start <= position)


def model_of(workload: Workload) -> torch.nn.Module:
    """The workload's model. Random states are as before.

    Not built on `meta`: a factory that keeps what it once made would give that to the training afterwards.
    """
    kept = KeptState(())
    try:
        return made("model", workload.model(), torch.nn.Module, workload)
    finally:
        kept.put_back()


def trace(workload: Workload, recipe: Recipe, target: str, model: torch.nn.Module | None = None) -> Trace:
    """Two steps of a workload, on fake copies of its model, or of the one given. Raises CannotPlan where it cannot."""
    kept = KeptState(())  # the factories may draw random numbers
    random.seed(recipe.batch_size)  # a branch that is taken by chance has a chance to differ between two traces
    np.random.seed(recipe.batch_size)
    with _no_collector():
        try:
            return _trace(workload, recipe, target, model or model_of(workload))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CannotPlan(
                f"the step reads a tensor's value at {_line_of(error)}: shapes and control flow that depend on data "
                "cannot be planned"
            ) from error
        except CannotPlan:
            raise
        except Exception as error:
            if traceback.extract_tb(error.__traceback__)[-1].filename.startswith(OURS[1]):
                raise  # a workload that gives something else than it should: said as build_step says it
            said = (str(error).strip().splitlines() or [""])[0]
            raise CannotPlan(
                f"with {recipe.batch_size} samples, and tensors that have no values, the step raised "
                f"{type(error).__name__} at {_line_of(error)}: {said}"
            ) from error
        finally:
            kept.put_back()


def _trace(workload: Workload, recipe: Recipe, target: str, real_model: torch.nn.Module) -> Trace:
    if recipe.compile:
        raise CannotPlan("what torch.compile makes of a step allocates as it decides: measure it, or plan without")
    real_batch = batch_of(workload, recipe, torch.device("cpu"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    model = _faked(real_model, [t for part in real_model.modules() for t in tensors_in(part.__dict__)], mode, memo)
    batch = _faked(real_batch, tensors_in(real_batch), mode, memo)
    with mode:
        model = arranged(model, recipe)
    optimizer = optimizer_of(workload, model)
    if any(not hasattr(p, "fake_mode") for group in optimizer.param_groups for p in group["params"]):  # a live one
        live = [*tensors_in(optimizer.param_groups), *tensors_in(dict(optimizer.state))]
        optimizer = _faked(optimizer, live, mode, memo)
    with ExitStack() as around:
        if target == "cuda":
            around.enter_context(as_on_cuda(optimizer))
        around.enter_context(mode)
        around.enter_context(_NormsOfCPU())
        log = _FakeLog(torch.device("cpu"))
        around.enter_context(MemoryLedger(model, optimizer, inputs=batch, log=log))
        step = Step(workload, recipe, model, optimizer, batch)
        step.scaler = step.scaler and _FakeScaler("cpu")
        for _ in range(STEPS):
            step()
    events = [event for _, run in groupby(log.events, lambda each: each[1] > 0) for event in _in_order(run)]
    numbers, changes = zip(*events, strict=True)
    batch_bytes = sum(tensor.nbytes for tensor in tensors_in(real_batch))
    return Trace(recipe.batch_size, max(1, batch_bytes), numbers, np.array(changes), log.storages, spans_of(log))


def _in_order(run: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is freed between two allocations goes in whatever order; a peak does not depend on it."""
    events = list(run)
    return events if events[0][1] > 0 else sorted(events)


def _faked(thing: T, tensors: Iterable[torch.Tensor], mode: FakeTensorMode, memo: dict[int, Any]) -> T:
    """A deep copy with fake CPU tensors of the same layout; what shares a storage shares one in the copy.

    Zero-dimensional tensors of the CPU, by which optimizers count, keep their value.
    """
    storages: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in memo:
            if torch.nn.parameter.is_lazy(tensor):
                raise CannotPlan("a lazy module has no shapes before its first call: call the model once, then plan")
            number = None if tensor.dim() or tensor.device.type != "cpu" or tensor.requires_grad else tensor.item()
            with mode, torch.no_grad():
                memo[id(tensor)] = _fake(tensor, number, storages)
            memo[id(memo)] = [*memo.get(id(memo), ()), tensor]  # alive, or another takes its id
    return copy.deepcopy(thing, memo)


def _fake(tensor: torch.Tensor, number: float | None, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        raise CannotPlan(f"a tensor with strides is expected, got {type(tensor).__name__} of {tensor.layout}")
    if number is not None:
        return torch.tensor(number, dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    if id(storage) not in storages:
        storages[id(storage)] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
    flat = storages[id(storage)]
    flat = flat[: flat.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    fake = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


aten = torch.ops.aten
# Operations whose result has a larger storage than its shape says, which fake tensors do not know: a mean or sum that
# was first computed element by element in the place of the result, and an image that was folded where its columns lay.
ELEMENTWISE_FIRST = (aten.mse_loss, aten.smooth_l1_loss, aten.binary_cross_entropy, aten.soft_margin_loss)
COLUMNS_FIRST = (aten.col2im,)


class _FakeLog(StorageLog):
    """Follows fake tensors, with the bytes that real ones have."""

    _one_more: torch.UntypedStorage | None = None

    def _arguments(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A real tensor is one that the workload took from elsewhere; save where lift_fresh makes a fake one of it."""
        return () if func.overloadpacket is aten.lift_fresh else super()._arguments(func, args, kwargs)

    def _results(self, func: Any, args: Any, out: Any) -> Any:
        if func.overloadpacket is aten.mkldnn_rnn_layer:
            raise CannotPlan(
                "oneDNN's recurrent layers take a workspace of a size that only they know: plan with "
                "torch.backends.mkldnn.flags(enabled=False), which uses others, or measure with MemoryLedger"
            )
        results = super()._results(func, args, out)
        if func.overloadpacket is aten._embedding_bag:
            self._one_more = results[1].untyped_storage()
        if any(isinstance(each, torch.Tensor) and each.layout != torch.strided for each in results):
            raise CannotPlan(f"{func} makes a sparse tensor: how large it gets depends on data")
        mask = args[-1] if args else None
        if isinstance(mask, list) and len(mask) == len(results) and all(isinstance(each, bool) for each in mask):
            return [each for each, wanted in zip(results, mask, strict=True) if wanted]  # a real one gives None there
        return results

    def _resized(self, storage: torch.UntypedStorage, watched: Any) -> int:
        return watched.nbytes

    def _nbytes(self, storage: torch.UntypedStorage, func: Any, args: Any) -> int:
        nbytes = storage.nbytes()
        packet = getattr(func, "overloadpacket", None)
        if packet in ELEMENTWISE_FIRST:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return max(nbytes, shape.numel() * args[0].itemsize)
        if packet in COLUMNS_FIRST:
            return max(nbytes, args[0].nbytes)
        if packet is aten._embedding_bag and storage is self._one_more:  # the bag of each index, and an end
            return nbytes + args[1].itemsize
        return nbytes


NORMS = (aten.native_batch_norm, aten.native_group_norm, aten.native_layer_norm)


class _NormsOfCPU(TorchDispatchMode):
    """Norms of low-precision inputs with fp32 weights, as autocast has them: on a CPU their statistics are fp32, and
    the gradient has the input's type. Fake tensors have it the other way round."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in NORMS:
            weight = next((each for each in args[1:] if isinstance(each, torch.Tensor)), out[0])
            return (out[0], *(each.to(weight.dtype) for each in out[1:]))
        if func.overloadpacket is aten.native_group_norm_backward and out[0] is not None:
            return (out[0].to(args[1].dtype), *out[1:])
        return out


class _FakeScaler(torch.amp.GradScaler):
    """Never skips a step: whether gradients are finite, fake ones cannot tell."""

    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        optimizer.step()

    def get_scale(self) -> float:
        return 1.0


@contextmanager
def _no_collector() -> Iterator[None]:
    """What a collector frees, it frees at any moment; here that would make two traces differ."""
    on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _line_of(error: BaseException) -> str:
    """The user's line that raised: the innermost outside of torch and of this package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(OURS)]
    return source_line(frames[-1].filename, frames[-1].lineno or 0) if frames else "no line of the workload"
