"""The memory ledger: every live byte of a training loop by category, over time, with the line that asked for it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from labsupport.measure.allocations import PHASES, StorageLog
from labsupport.measure.categories import CATEGORIES, INPUT, UNTRACKED, changes_of, spans_of
from labsupport.measure.live import Growth, Listing, LiveTensor, Timeline
from labsupport.measure.storages import described, tensors_in
from labsupport.units import format_bytes

T = TypeVar("T")


class MemoryLedger:
    """Follows every tensor of one device while a loop runs, and says afterwards where the bytes were.

        with MemoryLedger(model, optimizer) as ledger:
            step()
        ledger.at_peak()  # {"parameter": ..., "gradient": ..., "activation": ...}: sums to ledger.peak_bytes

    `model` and `optimizer` may each be one or several; what is not given is recognised once an optimizer steps.
    `inputs` (any nest of tensors) count from the start instead of from their first use. `device` defaults to that
    of the model's first parameter, else the CPU. `log` is for tools that follow storages in their own way.

    On a CPU the bytes are those that tensors asked for: exact, and the same on every run. The allocator's true peak
    may be about 1 % higher, where it falls into a kernel that makes copies or a workspace which no tensor shows
    (benchmarks/README.md has cases), and a checkpoint's random state (5,056 B) is none either. On CUDA sizes are
    rounded as the allocator rounds them, `peak_bytes` is the allocator's own, and what no tensor shows is "untracked".

    Categories are decided afterwards, from the log. A forward's tensor is an "activation" if it is still there when
    the outermost module returns or the backward begins, else "temporary". It is "input" if it was there before (and is
    no leaf that needs a gradient: that is a "parameter"), or was made outside of modules from nothing that needs a
    gradient. What is still there when the next forward begins, and no backward frees, is "kept": some name in Python
    holds it.

    Raises RuntimeError when entered twice, and for compiled modules. Operations of other threads are not seen; their
    tensors count from the first use by this one. Forked loader workers are left alone.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        inputs: Any = None,
        device: torch.device | str | None = None,
        log: StorageLog | None = None,
    ) -> None:
        self._models = _each(model, torch.nn.Module, "model")
        self._optimizers = _each(optimizer, torch.optim.Optimizer, "optimizer")
        self._inputs = list(tensors_in(inputs))
        if inputs is not None and not self._inputs:
            raise TypeError(
                "inputs: tensors, or mappings, sequences or dataclasses of them, are expected, got "
                f"{type(inputs).__name__}"
            )
        first = next((p for each in self._models for p in each.parameters()), None)
        default = log.device if log is not None else first.device if first is not None else "cpu"
        self.device = torch.device(device if device is not None else default)
        if self.device.type == "cuda" and self.device.index is None and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.log = log if log is not None else StorageLog(self.device)
        self._entered = False
        self._allocator: dict[str, int] = {}
        self._iterations: list[int] = []

    def __enter__(self) -> "MemoryLedger":
        if self._entered:
            raise RuntimeError("this ledger has watched already: make a new MemoryLedger for each loop")
        self._entered = True
        try:
            for model in self._models:
                self.log.know_module(model)
            for optimizer in self._optimizers:
                self.log.know_optimizer(optimizer)
            for tensor in self._inputs:
                self.log.know(tensor, INPUT)
        except BaseException:  # they alone pass a ceiling
            self.log.close()
            raise
        self._models, self._optimizers, self._inputs = (), (), []  # what is watched must not live longer for it
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self.log.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.device.type == "cuda":
            self._allocator = cuda_memory(self.device)
        self.log.__exit__(*error)

    # Bytes.

    @property
    def live_bytes(self) -> int:
        """Now; after the `with` block, at its end."""
        return self.log.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self._allocator.get("peak_allocated", self.log.peak_bytes)

    @property
    def allocator(self) -> dict[str, int]:
        """On CUDA, after the `with` block: bytes allocated, reserved and used by the whole device, with their peaks
        (see `cuda_memory`); empty on a CPU."""
        return dict(self._allocator)

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the moment of the peak; they sum to `peak_bytes`."""
        timeline = self.timeline()
        return timeline.at(timeline.peak) | {UNTRACKED: self.peak_bytes - self.log.peak_bytes}

    def at_end(self) -> dict[str, int]:
        """Bytes by category now; they sum to `live_bytes`."""
        return self.timeline().at(-1)

    def timeline(self) -> Timeline:
        self.log.know_gradients()
        length = len(self.log.events) + 1
        bytes_of = {category: np.zeros(length, dtype=np.int64) for category in CATEGORIES}
        for position, category, change in changes_of(self.log):
            bytes_of[category][position + 1] += change
        marks = self.log.marks
        return Timeline(
            {category: changes.cumsum() for category, changes in bytes_of.items()},
            tuple((position, what) for position, what in marks if what in PHASES),
            tuple(position for position, what in marks if what == "step"),
        )

    @property
    def lines(self) -> tuple[str, str]:
        """The report: the peak and what made it, and what it consists of."""
        position = self.timeline().peak
        made = described(self.log.storages[self.log.events[position - 1][0]], line=False) if position else "nothing"
        parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.at_peak().items() if nbytes)
        return f"peak {format_bytes(self.peak_bytes)} ({self.peak_bytes:,} B), at {made}", parts

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"application/vnd.labsupport.memory+json": {"device": str(self.device)}, "text/plain": repr(self)}

    # Tensors.

    def largest(self, n: int = 10, *, at: int | None = None) -> Listing[LiveTensor]:
        """The n largest tensors at the peak, or at another position of the timeline."""
        return Listing(sorted(self._live_at(at), key=lambda each: -each.nbytes)[:n])

    def by_module(self, *, at: int | None = None) -> dict[str, dict[str, int]]:
        """Bytes by module and category at the peak, or at another position of the timeline.

        Parameters, gradients and state belong to the module of the parameter; everything else to the innermost
        module that ran when it was made, or whose backward ran. "" is outside of all modules.
        """
        table: dict[str, dict[str, int]] = {}
        root = next(iter(self.log.modules.order), "")
        for each in self._live_at(at):
            owner = (each.name.rpartition(".")[0] or root) if each.name else each.module
            parts = table.setdefault(owner, defaultdict(int))
            parts[each.category] += each.nbytes
        order = {module: place for place, module in enumerate(self.log.modules.order)}
        in_order = sorted(table, key=lambda module: order.get(module, len(order)))
        return {module: dict(table[module]) for module in in_order}

    def mark(self) -> None:
        """The end of an iteration, in a loop without an optimizer."""
        self._iterations.append(len(self.log.events))

    @property
    def iterations(self) -> tuple[int, ...]:
        """Live bytes at the end of each iteration: at `mark()`, else at each optimizer step, else at each call of
        the outermost module."""
        total = self.timeline().total
        return tuple(int(total[position]) for position in self._ends())

    def growth(self, *, since: int = 1) -> Listing[Growth]:
        """What there is more of at the end of the last iteration than at the end of iteration number `since` (0: the
        start), by what made it: the largest first. Empty for a loop that leaves nothing behind."""
        ends = self._ends()
        if not 0 <= since < len(ends):
            raise ValueError(f"since={since}: one of the {len(ends)} iterations seen is expected, but not the last")
        alike: dict[tuple[Any, ...], np.ndarray] = defaultdict(lambda: np.zeros(2, dtype=np.int64))
        for sign, position in ((-1, ends[since - 1] if since else 0), (1, ends[-1])):
            for number, nbytes in self._sizes(position).items():
                storage = self.log.storages[number]
                alike[storage.op, storage.module, storage.shape, *storage.source] += sign * nbytes, sign
        found = [Growth(int(more), int(count), *made) for made, (more, count) in alike.items() if more > 0]
        return Listing(sorted(found, key=lambda each: -each.nbytes))

    def _ends(self) -> list[int]:
        if self._iterations:
            return self._iterations
        for kind in ("step", "returned"):
            if ends := [position for position, what in self.log.marks if what == kind]:
                return ends
        return []

    def _sizes(self, position: int) -> dict[int, int]:
        """Bytes of each storage that is live at a position."""
        sizes: dict[int, int] = defaultdict(int)
        for number, change in self.log.events[:position]:
            sizes[number] += change
        return {number: nbytes for number, nbytes in sizes.items() if nbytes}

    def _live_at(self, at: int | None) -> Iterable[LiveTensor]:
        timeline = self.timeline()
        position = timeline.peak if at is None else range(len(timeline.total))[at]
        categories = spans_of(self.log)
        for number, nbytes in self._sizes(position).items():
            s = self.log.storages[number]
            category = next(name for start, name in reversed(categories[number]) if start <= position)
            yield LiveTensor(nbytes, category, s.module, s.name, s.op, s.shape, s.dtype, s.phase, s.step, *s.source)


def _each(given: Any, kind: type[T], name: str) -> tuple[T, ...]:
    several = isinstance(given, Iterable) and not isinstance(given, torch.nn.Module)
    things = () if given is None else tuple(given) if several else (given,)
    if odd := [each for each in things if not isinstance(each, kind)]:
        raise TypeError(f"{name}: a {kind.__module__}.{kind.__name__}, or several, is expected, got {odd[0]!r}")
    return things


def cuda_memory(device: torch.device | str | None = None) -> dict[str, int]:
    """The numbers that are taken for one another, in bytes: "allocated" by tensors <= "reserved" by PyTorch's
    allocator <= "used" on the device by every process, CUDA contexts included; and the first two at their peaks."""
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "peak_allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak_reserved": torch.cuda.max_memory_reserved(device),
        "used": total - free,
    }


def graph_nodes(*tensors: torch.Tensor) -> int:
    """How many nodes of autograd's graph these tensors keep: objects of the host, which no count of bytes shows."""
    waiting = [each.grad_fn for each in tensors if each.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        new = {node for node, _ in waiting.pop().next_functions if node is not None} - seen
        seen |= new
        waiting += new
    return len(seen)
