"""What is trained."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Workload:
    """What is trained: how to get a model, a batch, a loss and an optimizer.

    `model()` gives a Module; `batch(batch_size, device)` a batch of that many samples on that device: tensors, in any
    nest of mappings, sequences and dataclasses;
    `loss(model, batch)` a scalar tensor, or (sum of losses, count) where samples weigh differently, as tokens do;
    `optimizer(parameters)` an optimizer of them. `samples` is the size of the data set, None where it has no end.
    The functions may make new objects, or return live ones (`lambda: my_model`). Raises TypeError for a model, batch,
    loss or optimizer that is no function.
    """

    name: str
    model: Callable[[], torch.nn.Module]
    batch: Callable[[int, torch.device], Any]
    loss: Callable[[torch.nn.Module, Any], Any]
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    samples: int | None = None

    def __post_init__(self) -> None:
        wanted = {"model": "()", "batch": "(batch_size, device)", "loss": "(model, batch)", "optimizer": "(parameters)"}
        for part, arguments in wanted.items():
            given = getattr(self, part)
            if isinstance(given, torch.nn.Module | torch.optim.Optimizer) or not callable(given):
                raise TypeError(
                    f"{part} of workload {self.name!r}: a function {part}{arguments} is expected, got "
                    f"{type(given).__name__}; write {part}=lambda {arguments[1:-1]}: ... around an object that you have"
                )
        samples = self.samples
        if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
            raise ValueError(
                f"samples of workload {self.name!r}: a whole number of 1 or more, or None, got {samples!r}"
            )
