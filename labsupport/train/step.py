"""A training step made of a workload and a recipe."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from labsupport import machine
from labsupport.devices import choose_device
from labsupport.measure.storages import tensors_in
from labsupport.train.checkpointing import recomputing, replaced
from labsupport.train.precision import autocast_of, products_in, scaler_of
from labsupport.train.recipe import Recipe
from labsupport.train.workload import Workload


class Step:
    """One optimizer step, as often as it is called: clears the gradients, runs forward and backward of each
    micro-batch and then the optimizer, and returns the loss, detached.

    `model`, `optimizer`, `scaler` (fp16 has one), `scheduler` and `batch` are the objects it works on; `compiled` is
    what runs: the model, or what torch.compile made of it. The batch is the same in each call and micro-batch, unless
    others are given.
    """

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
    ) -> None:
        self.workload, self.recipe = workload, recipe
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self._kind = next((each.device.type for each in model.parameters()), "cpu")
        self.scaler = scaler_of(recipe.precision, self._kind)
        self.scheduler = None if recipe.schedule is None else recipe.schedule(optimizer)
        self.compiled = _compiled(model, recipe.compile)
        self._forwards = recomputing(model, recipe.checkpointing)

    def __call__(self, micro_batches: Sequence[Any] | None = None) -> torch.Tensor:
        """Train on the step's own batch, or on these micro-batches: a window of the recipe's `accumulation`, or fewer
        where an epoch ends.

        Losses that are means are weighed alike; those that are (sum, count) by the counts of the whole window. Raises
        ValueError for no micro-batch, and for more than a window.
        """
        window = self._window(micro_batches)
        losses: list[torch.Tensor] = []
        count: Any = None
        self.optimizer.zero_grad()
        with products_in(self.recipe.precision, self._kind):
            for batch in window:
                count = self._backward(batch, len(window), losses, count)
            self._update()
        if len(window) == 1:
            return losses[0]
        return torch.stack(losses).sum() / (len(window) if count is None else _at_least_one(count))

    def _window(self, micro_batches: Sequence[Any] | None) -> list[Any]:
        most = self.recipe.accumulation
        if micro_batches is None:
            return [self.batch] * most
        window = list(micro_batches)
        if not 1 <= len(window) <= most:
            raise ValueError(
                f"1 to {most} micro-batches are expected, as the recipe's accumulation says, got {len(window)}: cut an "
                "epoch into windows of so many; the last one may have fewer"
            )
        return window

    def _backward(self, batch: Any, window: int, losses: list[torch.Tensor], before: Any) -> Any:
        """Forward and backward of a micro-batch. Returns the count of the window until here, `before` and its own;
        None where losses are means."""
        with autocast_of(self.recipe.precision, self._kind), replaced(self._forwards):
            loss, count = _loss_of(self.workload, self.compiled, batch)
        if window == 1:
            loss = loss if count is None else loss / _at_least_one(count)
        losses.append(loss.detach())
        if window > 1 and count is None:
            loss = loss / window
        elif window > 1:  # what the window will count is known at its end: until then gradients are the mean so far
            count = count if before is None else before + count
            loss = loss / _at_least_one(count)
            if before is not None:
                for parameter in self._held():
                    parameter.grad.mul_(before / _at_least_one(count))  # type: ignore[union-attr]
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return count

    def _held(self) -> Iterator[torch.nn.Parameter]:
        """The optimizer's parameters that have a gradient."""
        return (p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None)

    def _update(self) -> None:
        if self.recipe.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self._held(), self.recipe.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
            stepped = True
        else:
            before = self.scaler.get_scale() if self.scheduler else 0.0
            self.scaler.step(self.optimizer)
            self.scaler.update()
            stepped = self.scheduler is not None and self.scaler.get_scale() >= before  # halved: the step was skipped
        if self.scheduler is not None and stepped:
            self.scheduler.step()


def build_step(workload: Workload, recipe: Recipe | None = None, device: torch.device | str | None = None) -> Step:
    """The step that trains a workload by a recipe: call it as often as you like.

    `device` defaults to the GPU if a kernel really runs on it, else the CPU. Where the workload returns a live
    model, that one is moved and trained. Raises TypeError if a part of the workload gives something else than it
    should, ValueError for a recipe that this model or device cannot follow, RuntimeError for one that needs a C++
    compiler where there is none.
    """
    recipe = recipe or Recipe()
    at = torch.device(device) if device is not None else choose_device().device
    _check_device(recipe, at.type)
    model = arranged(made("model", workload.model(), torch.nn.Module, workload).to(at), recipe)
    optimizer = optimizer_of(workload, model)
    return Step(workload, recipe, model, optimizer, batch_of(workload, recipe, at))


def _check_device(recipe: Recipe, kind: str) -> None:
    if recipe.precision == "tf32" and kind != "cuda":
        raise ValueError(f'precision: "tf32" is a format of GPUs, and this is a {kind}; "fp32" or "bf16" is expected')
    if recipe.compile == "reduce-overhead" and kind != "cuda":
        raise ValueError(
            f'compile: "reduce-overhead" records CUDA graphs, which a {kind} has not; "default" is expected'
        )
    if recipe.compile not in (None, "aot_eager") and kind == "cpu" and not machine.has("compiler"):
        raise RuntimeError(
            f'compile: "{recipe.compile}" needs a C++ compiler on a CPU, and there is none: install one (Debian: apt '
            'install g++), or set CXX, or use "aot_eager", which gains no speed'
        )


def arranged(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """The model, its weights as the recipe wants them. ValueError where it has none that could be."""
    parameters = list(model.parameters())
    if recipe.precision == "fp16" and any(p.dtype == torch.float16 for p in parameters):
        raise ValueError(
            'precision: "fp16" keeps weights in fp32, and this model has fp16 ones, whose gradients a scaler refuses: '
            "leave out .half()"
        )
    if not recipe.channels_last:
        return model
    if not any(p.dim() == 4 for p in parameters):
        raise ValueError(
            f"channels_last: {type(model).__name__} has no convolution over images, so there is nothing to arrange"
        )
    for tensor in (*parameters, *model.buffers()):
        if tensor.dim() == 4:  # as Module.to does, which does not take fake tensors
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    return model


def batch_of(workload: Workload, recipe: Recipe, at: torch.device) -> Any:
    """A batch of the recipe's size, its images as the recipe wants them. TypeError if there is no tensor in it."""
    batch = workload.batch(recipe.batch_size, at)
    tensors = list(tensors_in(batch))
    if not tensors:
        raise TypeError(
            f"batch of workload {workload.name!r}: tensors, or mappings, sequences or dataclasses of them, are "
            f"expected, got {type(batch).__name__}"
        )
    if not recipe.channels_last:
        return batch
    images = {id(each): each.contiguous(memory_format=torch.channels_last) for each in tensors if each.dim() == 4}
    return copy.deepcopy(batch, {id(each): images.get(id(each), each) for each in tensors})


def optimizer_of(workload: Workload, model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = made("optimizer", workload.optimizer(model.parameters()), torch.optim.Optimizer, workload)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"optimizer of workload {workload.name!r}: LBFGS runs the model as often as it likes within one step, "
            "which a step of ours does not; MemoryLedger around your own loop counts it"
        )
    return optimizer


def made(part: str, thing: Any, kind: type, workload: Workload) -> Any:
    """The thing, if it is of that kind; else TypeError."""
    if isinstance(thing, kind):
        return thing
    raise TypeError(f"{part} of workload {workload.name!r}: a {kind.__name__} is expected, got {type(thing).__name__}")


def _at_least_one(count: Any) -> Any:
    """A micro-batch may be nothing but padding."""
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(1, count)


def _compiled(model: torch.nn.Module, how: str | None) -> torch.nn.Module:
    if how is None:
        return model
    return torch.compile(model, backend=how) if how == "aot_eager" else torch.compile(model, mode=how)  # type: ignore[return-value]


def _loss_of(workload: Workload, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    """The loss to run backward from; a sum, and its count, where the workload gives both, else None."""
    loss, count = workload.loss(model, batch), None
    if isinstance(loss, tuple) and len(loss) == 2:
        loss, count = loss
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise TypeError(
            f"loss of workload {workload.name!r}: a tensor with one value is expected, or (sum, count), "
            f"got {type(loss).__name__}{shape}"
        )
    return loss, count
