"""Which module runs now, or made the autograd node that runs now."""

import threading
import weakref
from bisect import bisect_right
from typing import Any

import torch

next_sequence = torch.autograd._get_sequence_nr
running_node = torch._C._current_autograd_node


class RunningModules:
    """The names of the modules that run, the innermost last, as forward hooks tell it."""

    def __init__(self) -> None:
        self.names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self.order: dict[str, None] = {}  # the names it was told, in the order of the model
        self._running: list[str] = []
        self._made_by: list[tuple[int, str]] = [(-1, "")]  # from this autograd node on, the module
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return bool(self._running)

    def know(self, model: torch.nn.Module) -> None:
        for name, part in model.named_modules():
            self.order[self.names.setdefault(part, name or type(part).__name__)] = None

    def begins(self, module: torch.nn.Module) -> None:
        """Raises RuntimeError for a compiled one."""
        if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            raise RuntimeError(
                f"{type(module).__name__} is compiled, and a compiled module silently runs eager while its bytes are "
                "counted: give the model as it was before torch.compile, or measure the compiled one on CUDA with "
                "torch.cuda.max_memory_allocated()"
            )
        self._running.append(self.names.get(module) or type(module).__name__)
        self._remember()

    def returns(self) -> None:
        if self._running:
            self._running.pop()
            self._remember()

    def _remember(self) -> None:
        if threading.get_ident() == self._thread:  # the backward of a GPU recomputes in a thread that counts anew
            self._made_by.append((next_sequence(), self._running[-1] if self._running else ""))

    def clear(self) -> None:
        self._running.clear()

    def current(self, *, backward: bool) -> str:
        """The innermost module that runs; in a backward, the one in whose forward the running node was made."""
        node: Any = running_node() if backward and not self._running else None
        if node is None:
            return self._running[-1] if self._running else ""
        return self._made_by[bisect_right(self._made_by, node._sequence_nr(), key=lambda each: each[0]) - 1][1]
