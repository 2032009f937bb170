"""What is known of one storage, and which storages a nest of tensors has."""

import linecache
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from labsupport.units import format_bytes

# A tensor's source line is the innermost one outside of these: not torch's, and not ours.
OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")


@dataclass(slots=True)
class Storage:
    """What is known of one storage. The tensor is not held.

    `role` is "" until something says what it is ("parameter", "buffer", "gradient", "optimizer state"); `name` is
    then the parameter's. `inside`: made while a module ran. `recording`: while autograd
    recorded. `found`: an operation used it, and none had made it.
    """

    nbytes: int
    op: str
    phase: str
    step: int
    last_step: int  # in which an operation used it
    module: str
    source: tuple[str, int]  # file and line
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    inside: bool
    recording: bool
    found: bool
    role: str = ""
    name: str = ""
    freed_in_backward: bool = False


class Watched(weakref.ref):
    """A weak reference to a storage that is live, with its number in the log."""

    __slots__ = ("key", "number", "nbytes")
    key: int
    number: int
    nbytes: int


def innermost_line(skipped: dict[CodeType, bool]) -> tuple[tuple[str, int], bool]:
    """File and line of the innermost frame that is neither torch's nor ours, and whether backward() makes its first
    gradient. `skipped` remembers which code is whose."""
    frame: FrameType | None = sys._getframe(1)
    seeding = False
    while frame is not None:
        code = frame.f_code
        ours = skipped.get(code)
        if ours is None:
            ours = skipped[code] = code.co_filename.startswith(OURS)
        if not ours:
            return (code.co_filename, frame.f_lineno), seeding
        seeding = seeding or code.co_name == "_make_grads"
        frame = frame.f_back
    return ("", 0), seeding


def described(storage: Storage, *, line: bool = True) -> str:
    """What made it, where: "aten.mm in layer1.0 (backward), train.py line 12: loss.backward()"."""
    file, number = storage.source
    where = f", {source_line(file, number)}" if file and line else ""
    made = storage.op.rpartition(".")[0] or storage.role or "a tensor that was there"
    module = f" in {storage.module}" if storage.module else ""
    return f"{made}{module}{'' if storage.found else f' ({storage.phase})'}{where}"


def emulated_error(nbytes: int, of: Storage, live_bytes: int, ceiling: int) -> torch.OutOfMemoryError:
    """What a CPU raises in the place of CUDA's error."""
    return torch.OutOfMemoryError(
        f"Emulated CUDA out of memory. Tried to allocate {format_bytes(nbytes)} for {described(of)}: "
        f"{format_bytes(live_bytes)} of a budget of {format_bytes(ceiling)} are in use."
    )


def needs_grad(arguments: Any) -> bool:
    """Whether a gradient is wanted of an operation's arguments; of a tensor alone, whether it is trained."""
    if isinstance(arguments, torch.Tensor):
        return arguments.requires_grad and arguments.is_leaf
    return any(each.requires_grad for each in tensors_in(arguments))


def source_line(file: str, line: int) -> str:
    """A source line for people. A notebook's cell has a made-up file name: there the text of the line tells more."""
    text = linecache.getline(file, line).strip()
    text = text if len(text) < 80 else text[:77] + "..."
    name = "cell" if "ipykernel" in file or file.startswith("<") else Path(file).name
    return f"{name} line {line}" + (f": {text}" if text else "")


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested mappings, sequences and dataclasses, as batches, arguments and optimizer state are."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from tensors_in(value)
    elif isinstance(thing, list | tuple | set | frozenset):
        for item in thing:
            yield from tensors_in(item)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for field in fields(thing):
            yield from tensors_in(getattr(thing, field.name))


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that a sparse one consists of; none of an opaque one (mkldnn), whose bytes nobody tells."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold a tensor's values; views share theirs with their base."""
    try:
        yield tensor.untyped_storage()
    except NotImplementedError:
        for part in parts_of(tensor):
            yield from storages_of(part)
