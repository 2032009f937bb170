"""A ceiling for memory: the emulated one of a CPU, the process's share of a GPU; and what counts as out of memory."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from labsupport.devices import choose_device
from labsupport.measure.allocations import StorageLog
from labsupport.measure.memory import MemoryLedger
from labsupport.units import format_bytes, parse_bytes

# What allocators and libraries say besides raising torch.OutOfMemoryError. A launch with too large a grid ("invalid
# configuration argument"), a wrong shape or an illegal access are no questions of memory, and are not in here.
MESSAGES = (
    "out of memory",  # the CUDA driver, HIP, MPS, XPU
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",  # DefaultCPUAllocator
    "not enough memory: you tried to allocate",  # the same on Windows and macOS
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, whichever allocator or library says so.

    A failed allocation on a CPU is a plain RuntimeError, so the message has to decide.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


@contextmanager
def memory_budget(
    budget: int | str,
    model: Any = None,
    optimizer: Any = None,
    *,
    inputs: Any = None,
    device: torch.device | str | None = None,
) -> Iterator[MemoryLedger | None]:
    """Within the `with` block, at most `budget` bytes ("512MiB", or a number) of tensors may be live on the device.

    On a CPU a ledger counts them, and what would pass the ceiling raises torch.OutOfMemoryError as CUDA would: a
    peak of exactly `budget` fits, one byte more does not. Tensors count from their first use in the block; those of
    `model`, `optimizer` and `inputs` from its start (see MemoryLedger, whose errors this has). Yields the ledger.

    On CUDA the process gets that share of the device's memory, by set_per_process_memory_fraction, and the earlier
    share back afterwards; cached blocks count there. Yields None.

    The error is raised on, and the finished frames that it holds are cleared, so that their tensors are freed.
    Nothing is undone: an error within `optimizer.step()` leaves some parameters changed and others not.
    Raises ValueError for what is not a size.
    """
    ceiling = parse_bytes(budget)
    at = (
        MemoryLedger(model, device=device).device if model is not None or device is not None else choose_device().device
    )
    ledger = None
    try:
        if at.type == "cuda":
            with _share_of(at, ceiling):
                yield None
        else:
            log = StorageLog(at, ceiling=ceiling)
            with MemoryLedger(model, optimizer, inputs=inputs, device=at, log=log) as ledger:
                yield ledger
    except Exception as error:
        if is_out_of_memory(error):
            error.ledger, error.limit_bytes = ledger, ceiling  # type: ignore[attr-defined]
            traceback.clear_frames(error.__traceback__)
        raise


@contextmanager
def _share_of(device: torch.device, ceiling: int) -> Iterator[None]:
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    _, total = torch.cuda.mem_get_info(device)
    if ceiling > total:
        raise ValueError(f"a budget of {format_bytes(ceiling)} is more than the {format_bytes(total)} of {device}")
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what is cached would count
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(ceiling / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
