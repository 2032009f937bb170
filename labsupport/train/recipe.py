"""How it is trained: the knobs."""

from dataclasses import dataclass, fields, replace
from typing import Any

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Recipe:
    """The knobs of a training step. Raises ValueError, or TypeError, for a setting that makes no sense.

    `batch_size`: samples in one forward pass on one rank. `precision`: "fp32", or "bf16" for autocast (parameters,
    gradients and optimizer state stay as they are). `checkpointing`: each block of the model's `Sequential`s and
    `ModuleList`s is computed again in the backward pass instead of stored.
    """

    batch_size: int = 32
    precision: str = "fp32"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int):
            raise TypeError(f"batch_size: a whole number of samples is expected, got {self.batch_size!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size: 1 or more samples are expected, got {self.batch_size}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision: one of {', '.join(PRECISIONS)} is expected, got {self.precision!r}")
        if not isinstance(self.checkpointing, bool):
            raise TypeError(f"checkpointing: True or False is expected, got {self.checkpointing!r}")

    def but(self, **changes: Any) -> "Recipe":
        """The same with some knobs changed: `recipe.but(precision="bf16")`."""
        if unknown := set(changes) - {field.name for field in fields(self)}:
            known = ", ".join(field.name for field in fields(self))
            raise TypeError(f"a recipe has no knob {', '.join(sorted(unknown))}; it has {known}")
        return replace(self, **changes)

    def diff(self, other: "Recipe") -> dict[str, tuple[Any, Any]]:
        """What differs: {knob: (here, there)}."""
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
