"""A training step made of a workload and a recipe."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from labsupport.devices import choose_device
from labsupport.measure.storages import tensors_in
from labsupport.train.recipe import Recipe
from labsupport.train.workload import Workload


class Step:
    """One optimizer step on one batch, as often as it is called: clears the gradients, runs forward, backward and
    the optimizer, and returns the loss, detached.

    `model`, `optimizer` and `batch` are the objects it works on; the batch is the same in each call.
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
        self._blocks = blocks_of(model) if recipe.checkpointing else []

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        with self._settings():
            loss = _scalar(self.workload.loss(self.model, self.batch), self.workload.name)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _settings(self) -> ExitStack:
        settings = ExitStack()
        if self.recipe.precision == "bf16":
            kind = next((each.device.type for each in self.model.parameters()), "cpu")
            settings.enter_context(torch.autocast(kind, dtype=torch.bfloat16))
        if self._blocks:
            settings.enter_context(checkpointed(self._blocks))
        return settings


def build_step(workload: Workload, recipe: Recipe | None = None, device: torch.device | str | None = None) -> Step:
    """The step that trains a workload by a recipe: call it as often as you like.

    `device` defaults to the GPU if a kernel really runs on it, else the CPU. Where the workload returns a live
    model, that one is moved and trained. Raises TypeError if a part of the workload gives something else than it
    should, ValueError for a recipe that this model cannot follow.
    """
    recipe = recipe or Recipe()
    at = torch.device(device) if device is not None else choose_device().device
    model = made("model", workload.model(), torch.nn.Module, workload).to(at)
    optimizer = optimizer_of(workload, model)
    batch = workload.batch(recipe.batch_size, at)
    if not any(True for _ in tensors_in(batch)):
        raise TypeError(
            f"batch of workload {workload.name!r}: tensors, or mappings, sequences or dataclasses of them, are "
            f"expected, got {type(batch).__name__}"
        )
    return Step(workload, recipe, model, optimizer, batch)


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


def _scalar(loss: Any, name: str) -> torch.Tensor:
    """The loss to run backward from: a mean over the count where the workload gives (sum, count)."""
    if isinstance(loss, tuple) and len(loss) == 2:
        loss = loss[0] / loss[1]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise TypeError(
            f"loss of workload {name!r}: a tensor with one value is expected, or (sum, count), "
            f"got {type(loss).__name__}{shape}"
        )
    return loss


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated parts of a model: the children of its outermost Sequentials and ModuleLists that have two or more.

    ValueError where there are none.
    """
    blocks: list[torch.nn.Module] = []
    waiting = [model]
    while waiting:
        part = waiting.pop(0)
        children = list(part.children())
        if isinstance(part, torch.nn.Sequential | torch.nn.ModuleList) and len(children) > 1:
            blocks += [child for child in children if not any(child is block for block in blocks)]
        else:
            waiting += children
    if not blocks:
        raise ValueError(
            f"checkpointing: {type(model).__name__} has no Sequential or ModuleList of two or more blocks to compute "
            "again; put its blocks into one, or call torch.utils.checkpoint in its forward"
        )
    return blocks


@contextmanager
def checkpointed(blocks: list[torch.nn.Module]) -> Iterator[None]:
    """Within it, each block keeps its inputs only, and runs again in the backward pass. The modules are as before
    afterwards."""
    own = [(block, block.__dict__.get("forward")) for block in blocks]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block, forward in own:
            if forward is None:
                del block.forward
            else:
                block.forward = forward
