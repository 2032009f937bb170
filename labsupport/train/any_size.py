"""A training step that takes any batch size."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from labsupport.measure.state import found_in
from labsupport.measure.stopwatch import name_of
from labsupport.train.recipe import Recipe
from labsupport.train.step import batch_of, build_step
from labsupport.train.workload import Workload


class WorkloadStep:
    """A step of a workload and a recipe, at any batch size. A batch is made when the size changes."""

    def __init__(
        self, workload: Workload, recipe: Recipe, state: Iterable[Any] | None, at: torch.device, first: int
    ) -> None:
        self.name, self._workload, self._recipe, self._device = workload.name, workload, recipe, at
        self._step = build_step(workload, recipe.but(batch_size=first), at)
        own = (self._step.model, self._step.optimizer, self._step.scaler, self._step.scheduler)
        self.things = [each for each in own if each is not None] + [*found_in(workload.loss), *(state or ())]
        self._size = 0
        self.release()

    def prepare(self, size: int) -> None:
        if size != self._size:
            self.release()
            self._step.batch, self._size = (
                batch_of(self._workload, self._recipe.but(batch_size=size), self._device),
                size,
            )

    def __call__(self, size: int) -> None:
        self.prepare(size)
        self._step()

    def release(self) -> None:
        self._step.batch, self._size = None, 0


class OwnStep:
    """A step of the user's own."""

    def __init__(self, step: Callable[[int], Any], state: Iterable[Any] | None) -> None:
        self.name = name_of(partial(step, 1)).strip("<>")
        self.things = found_in(step) if state is None else list(state)
        self._step = step

    def prepare(self, size: int) -> None:
        pass

    def __call__(self, size: int) -> None:
        self._step(size)

    release = None
