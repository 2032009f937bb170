"""What a memory ledger tells: bytes over time, tensors that were live, and what grew."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from labsupport.measure.storages import source_line
from labsupport.units import format_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Timeline:
    """Live bytes after each allocation and release: position 0 is the start, position i is after i of them.

    `bytes_of` has an array a category; `total` is their sum. `phases` are (first position, phase), `steps` the
    positions at which an optimizer finished its step, `peak` the position of the first maximum of `total`.
    """

    bytes_of: dict[str, np.ndarray]
    phases: tuple[tuple[int, str], ...]
    steps: tuple[int, ...]

    @cached_property
    def total(self) -> np.ndarray:
        return np.sum(list(self.bytes_of.values()), axis=0)

    @property
    def peak(self) -> int:
        return int(np.argmax(self.total))

    def at(self, position: int) -> dict[str, int]:
        """Live bytes by category at a position."""
        return {category: int(values[position]) for category, values in self.bytes_of.items()}


@dataclass(frozen=True)
class LiveTensor:
    """One storage that was live: its bytes, and what is known of the tensor it was made for."""

    nbytes: int
    category: str
    module: str
    name: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    phase: str
    step: int
    file: str
    line: int

    @property
    def source(self) -> str:
        """The line that made it."""
        return source_line(self.file, self.line) if self.file else "made before"

    def __str__(self) -> str:
        what = self.name or self.op.rpartition(".")[0] or "found"
        where = f" in {self.module}" if self.module and not self.name else ""
        kind = str(self.dtype).removeprefix("torch.")
        source = f"; {self.source}" if self.file else ""
        return f"{format_bytes(self.nbytes)} {self.category}: {what} {list(self.shape)} {kind}{where}{source}"


@dataclass(frozen=True)
class Growth:
    """Bytes, and storages, that one operation at one line left behind over some iterations."""

    nbytes: int
    count: int
    op: str
    module: str
    shape: tuple[int, ...]
    file: str
    line: int

    @property
    def source(self) -> str:
        return source_line(self.file, self.line) if self.file else "no line of Python"

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        made = self.op.rpartition(".")[0] or "found"
        return f"{format_bytes(self.nbytes)} in {self.count} x {made} {list(self.shape)}{where}, {self.source}"


class Listing(tuple[T, ...]):
    """A tuple that a notebook shows with a line for each item."""

    def __repr__(self) -> str:
        return "\n".join(str(each) for each in self) or "none"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"application/vnd.labsupport.memory+json": {"rows": len(self)}, "text/plain": repr(self)}
