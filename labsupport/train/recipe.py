"""How it is trained: the knobs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from labsupport.train.checkpointing import Checkpointing
from labsupport.train.precision import PRECISIONS

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "aot_eager")


@dataclass(frozen=True)
class Recipe:
    """The knobs of a training step. Raises ValueError, or TypeError, for a setting that makes no sense.

    * `batch_size`: samples in one forward pass on one rank, the micro-batch.
    * `precision`: "fp32"; "tf32" for fp32 whose products are rounded (GPUs from Ampere on); "bf16" or "fp16" for
      autocast: parameters, gradients and optimizer state stay fp32. "fp16" comes with a gradient scaler.
    * `channels_last`: weights and images of convolutions lie with their channels next to one another.
    * `checkpointing`: True computes each block of the model's `Sequential`s and `ModuleList`s again in the backward
      pass instead of storing what it needs; a number of 2 or more divides each `Sequential` into so many segments, of
      which all but the last are computed again; a policy (ctx, op, *args, **kwargs) -> `CheckpointPolicy` chooses
      within each block what is stored.
    * `accumulation`: micro-batches to one optimizer step.
    * `clip_norm`: the largest norm of all gradients together.
    * `schedule`: a function from the optimizer to its learning-rate scheduler, stepped once an optimizer step.
    * `compile`: a mode of `torch.compile`, or its backend "aot_eager", which needs no compiler and gains no speed.
    """

    batch_size: int = 32
    precision: str = "fp32"
    channels_last: bool = False
    checkpointing: Checkpointing = False
    accumulation: int = 1
    clip_norm: float | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    compile: str | None = None

    def __post_init__(self) -> None:
        _whole("batch_size", self.batch_size, "samples")
        _whole("accumulation", self.accumulation, "micro-batches")
        _one_of("precision", self.precision, PRECISIONS)
        if not isinstance(self.channels_last, bool):
            raise TypeError(f"channels_last: True or False is expected, got {self.channels_last!r}")
        if not isinstance(self.checkpointing, int) and not callable(self.checkpointing):
            raise TypeError(
                f"checkpointing: True, False, a number of segments or a policy is expected, got {self.checkpointing!r}"
            )
        if not isinstance(self.checkpointing, bool) and isinstance(self.checkpointing, int) and self.checkpointing < 2:
            raise ValueError(
                f"checkpointing: 2 or more segments are expected, got {self.checkpointing}: the last one is stored, so "
                "that a single one would save nothing"
            )
        clip = self.clip_norm
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float)):
            raise TypeError(f"clip_norm: a number or None is expected, got {clip!r}")
        if clip is not None and not (clip > 0 and math.isfinite(clip)):
            raise ValueError(f"clip_norm: a finite number above 0 is expected, got {clip}")
        if self.schedule is not None and not callable(self.schedule):
            raise TypeError(
                "schedule: a function from the optimizer to its scheduler is expected, such as lambda optimizer: "
                f"StepLR(optimizer, 30), got {type(self.schedule).__name__}"
            )
        if self.compile is not None:
            _one_of("compile", self.compile, COMPILE_MODES)

    @property
    def effective_batch(self) -> int:
        """Samples to one optimizer step of one rank."""
        return self.batch_size * self.accumulation

    def accumulated(self, effective_batch: int, *, at_most: int, ranks: int = 1) -> "Recipe":
        """The same with the largest `batch_size` up to `at_most`, what fits, whose windows have exactly
        `effective_batch` samples on all ranks together: halving until it fits would train another batch.

        ValueError if the ranks cannot share it equally.
        """
        for name, value in {"effective_batch": effective_batch, "at_most": at_most, "ranks": ranks}.items():
            _whole(name, value, "samples" if name != "ranks" else "ranks")
        share, rest = divmod(effective_batch, ranks)
        if rest:
            raise ValueError(
                f"effective_batch: {effective_batch} samples cannot be shared equally by {ranks} ranks; "
                f"{share * ranks} or {(share + 1) * ranks} could"
            )
        micro = next(size for size in range(min(at_most, share), 0, -1) if share % size == 0)
        return self.but(batch_size=micro, accumulation=share // micro)

    def but(self, **changes: Any) -> "Recipe":
        """The same with some knobs changed: `recipe.but(precision="bf16")`."""
        if unknown := set(changes) - {field.name for field in fields(self)}:
            known = ", ".join(field.name for field in fields(self))
            raise TypeError(f"a recipe has no knob {', '.join(sorted(unknown))}; it has {known}")
        return replace(self, **changes)

    def diff(self, other: "Recipe") -> dict[str, tuple[Any, Any]]:
        """What differs: {knob: (here, there)}."""
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return {name: pair for name, pair in pairs.items() if _differ(*pair)}


def _differ(a: Any, b: Any) -> bool:
    return a != b or type(a) is not type(b)  # True == 1


def _whole(name: str, value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: a whole number of {what} is expected, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: 1 or more {what} are expected, got {value}")


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: one of {', '.join(known)} is expected, got {value!r}")
