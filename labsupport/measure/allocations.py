"""Every allocation followed, from the operation that made it to the moment it is freed.

This and `modules` use PyTorch's private interfaces: dispatch modes, the number of the running backward, autograd's
sequence numbers.
"""

import os
import threading
from contextlib import ExitStack
from types import CodeType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _python_dispatch as dispatch
from torch.utils.weak import WeakTensorKeyDictionary

from labsupport.measure.modules import RunningModules
from labsupport.measure.storages import (
    Storage,
    Watched,
    emulated_error,
    innermost_line,
    needs_grad,
    parts_of,
    storages_of,
    tensors_in,
)

running_backward = torch._C._current_graph_task_id  # -1 outside of one

PHASES = FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
CUDA_ROUNDING = 512  # kMinBlockSize in c10/cuda/CUDACachingAllocator.h


class StorageLog(dispatch.TorchDispatchMode):
    """A dispatch mode that logs the storages which this thread's operations make, use and free on one device.

    `events` are (number of the storage, change in bytes), in order. `marks` are (how many events came before, what
    happened): a phase began, the outermost module "returned", an optimizer made a "step". Bytes are those asked
    for on a CPU, and rounded as the caching allocator rounds on CUDA. With a `ceiling` in bytes, an operation that
    passes it raises torch.OutOfMemoryError, and what it made is dropped.
    """

    def __init__(self, device: torch.device, *, ceiling: int | None = None) -> None:
        super().__init__()
        self.device, self.ceiling = device, ceiling
        self.storages: list[Storage] = []
        self.events: list[tuple[int, int]] = []
        self.marks: list[tuple[int, str]] = []
        self.live_bytes = self.peak_bytes = self.steps = 0
        self.refused: tuple[int, Storage] | None = None  # what last passed the ceiling, after how many events
        self._rounding = CUDA_ROUNDING if device.type == "cuda" else 1
        self._live: dict[int, Watched] = {}  # by the storage's id
        self._phase, self._on, self._recomputing = FORWARD, False, False
        self._optimizing: torch.optim.Optimizer | None = None
        self.modules = RunningModules()
        self._parameter_names = WeakTensorKeyDictionary()
        self._skipped: dict[CodeType, bool] = {}
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._hooks, self._optimizer_hooks = ExitStack(), ExitStack()
        self._outer: dispatch.TorchDispatchMode | None = None

    def __enter__(self) -> "StorageLog":
        self._optimizer_hooks.callback(register_optimizer_step_pre_hook(self._optimizer_begins).remove)
        self._optimizer_hooks.callback(register_optimizer_step_post_hook(self._optimizer_returns).remove)
        self._outer = dispatch._get_current_dispatch_mode()
        self.resume()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.close()

    def close(self) -> None:
        """Follow nothing any more, not even what is freed."""
        if self._optimizing is not None:  # ended by an error: what state it has made is state
            self.know_optimizer(self._optimizing)
        self.know_gradients()
        self._on = False
        self._hooks.close()
        self._optimizer_hooks.close()
        self._live.clear()

    def pause(self) -> bool:
        """Follow no operation until `resume()`; False, and nothing done, where another mode began meanwhile."""
        if dispatch._get_current_dispatch_mode() is not self:
            return False
        super().__exit__(None, None, None)
        self._hooks.close()
        self.modules.clear()
        self._on = False
        return True

    def resume(self) -> bool:
        """Go on after `pause()`; False, and nothing done, where another dispatch mode began meanwhile."""
        if dispatch._get_current_dispatch_mode() is not self._outer:
            return False
        self._hooks.callback(register_module_forward_pre_hook(self._module_begins).remove)
        self._hooks.callback(register_module_forward_hook(self._module_returns, always_call=True).remove)
        self._on = True
        for parameter in list(self._parameter_names):
            self._hook(parameter)
        super().__enter__()
        self.mark(FORWARD)
        return True

    def mark(self, what: str) -> None:
        self.marks.append((len(self.events), what))

    def know_module(self, module: torch.nn.Module) -> None:
        """Its parts by their names, and its parameters, buffers and gradients."""
        self.modules.know(module)
        for name, parameter in module.named_parameters():
            self._know_parameter(parameter, name)
        for name, buffer in module.named_buffers():
            self.know(buffer, "buffer", name)

    def know_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Its parameters, and the state it has."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._know_parameter(parameter)
        for parameter, state in optimizer.state.items():
            name = self._parameter_names.get(parameter, "") if isinstance(parameter, torch.Tensor) else ""
            for tensor in tensors_in(state):
                self.know(tensor, "optimizer state", name)

    def _know_parameter(self, parameter: torch.Tensor, name: str = "") -> None:
        if parameter.grad is not None:
            self.know(parameter.grad, "gradient", self._parameter_names.get(parameter, name))
        if parameter in self._parameter_names:
            return
        self._parameter_names[parameter] = name
        self.know(parameter, "parameter", name)
        if self._on:
            self._hook(parameter)

    def know_gradients(self) -> None:
        """Look again: DDP exchanges gradients for views of its buckets after they came."""
        for parameter in list(self._parameter_names) if self._on else ():
            self._know_parameter(parameter)

    def _hook(self, parameter: torch.Tensor) -> None:
        if parameter.requires_grad and parameter.is_leaf:
            self._hooks.callback(parameter.register_post_accumulate_grad_hook(self._know_parameter).remove)

    def know(self, tensor: torch.Tensor, role: str, name: str = "") -> None:
        """Say what a tensor is; that holds from when it was made. What it was called before is not changed."""
        self._use(tensor, None)
        for storage in storages_of(tensor):
            watched = self._live.get(id(storage))
            if watched is not None and not (known := self.storages[watched.number]).role:
                known.role, known.name = role, name

    def _here(self) -> bool:
        """Hooks are global: not another thread's modules, save those of a backward, and not a forked worker's."""
        same_thread = threading.get_ident() == self._thread or running_backward() >= 0
        on = self._on and same_thread and os.getpid() == self._process
        return on and any(mode is self for mode in dispatch._get_current_dispatch_mode_stack())

    def _module_begins(self, module: torch.nn.Module, _: Any) -> None:
        if self._here():
            if not self.modules and module not in self.modules.names:
                self.know_module(module)
            self.modules.begins(module)

    def _module_returns(self, *_: Any) -> None:
        if self._here() and self.modules:
            self.modules.returns()
            if not self.modules:
                self.mark("returned")

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._here():
            self.know_optimizer(optimizer)
            self._optimizing = optimizer

    def _optimizer_returns(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._here():
            self.know_optimizer(optimizer)
            self._optimizing = None
            self.steps += 1
            self.mark("step")

    def _turn(self, phase: str) -> None:
        if phase == self._phase:
            return
        if self._phase == BACKWARD:
            self.know_gradients()
        self._phase = phase
        self.mark(phase)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if os.getpid() != self._process or func.namespace == "profiler":  # a forked loader worker inherits the mode
            return func(*args, **kwargs)
        if types and any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a wrapper (DTensor): its own dispatch comes first, and we see what it runs inside
        recording = torch.is_grad_enabled()
        if running_backward() >= 0:
            self._turn(BACKWARD)
            if self._recomputing and not recording:  # a checkpoint has run its part of the forward again
                self.mark("returned")
            self._recomputing = recording
        else:  # a closure of the optimizer records, the optimizer itself does not
            self._turn(FORWARD if recording or self._optimizing is None or self.modules else OPTIMIZER)
        for each in self._arguments(func, args, kwargs):
            for inner in each if isinstance(each, list | tuple) else (each,):
                if isinstance(inner, torch.Tensor):
                    self._use(inner)
        out = func(*args, **kwargs)
        for each in self._results(func, args, out):
            for inner in each if isinstance(each, list) else (each,):
                if isinstance(inner, torch.Tensor):
                    self._use(inner, func, args)
        return out

    def _arguments(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation takes."""
        return (*args, *kwargs.values()) if kwargs else args

    def _results(self, func: Any, args: Any, out: Any) -> Any:
        """What an operation gives."""
        return out if isinstance(out, list | tuple) else (out,)

    def _resized(self, storage: torch.UntypedStorage, watched: Watched) -> int:
        """The bytes of a storage that an operation gives again: in place, it may have got another size."""
        return storage.nbytes()

    def _nbytes(self, storage: torch.UntypedStorage, func: Any, args: Any) -> int:
        """The bytes of one storage that an operation gives."""
        return storage.nbytes()

    def _use(self, tensor: Any, made_by: Any = "", args: Any = ()) -> None:
        """A tensor that an operation takes, or gives (then it is `made_by` that), or that is only known (None)."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse
            for part in parts_of(tensor):
                self._use(part, made_by, args)
            return
        watched = self._live.get(id(storage))
        if watched is None:
            self._add(tensor, storage, made_by, args)
        elif not made_by:
            self.storages[watched.number].last_step = self.steps
        elif watched.nbytes != (nbytes := self._rounded(self._resized(storage, watched))):
            change, watched.nbytes = nbytes - watched.nbytes, nbytes
            self._change(watched.number, change)
            self._hold_to_ceiling(0, self.storages[watched.number])

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._rounding) * self._rounding

    def _add(self, tensor: torch.Tensor, storage: torch.UntypedStorage, made_by: Any, args: Any) -> None:
        nbytes = self._rounded(self._nbytes(storage, made_by, args))
        at = tensor.device
        if not nbytes or at.type != self.device.type or self.device.index not in (None, at.index):
            return
        source, seeding = innermost_line(self._skipped) if made_by is not None else (("", 0), False)
        new = Storage(
            nbytes,
            op=str(made_by or ""),
            phase=BACKWARD if seeding else self._phase,  # backward() makes the first gradient before it begins
            step=self.steps,
            last_step=self.steps,
            module=self.modules.current(backward=self._phase == BACKWARD),
            source=source,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            needs_grad=needs_grad(args if made_by else tensor),
            inside=bool(self.modules) or (self._phase == BACKWARD and self._recomputing),
            recording=torch.is_grad_enabled(),
            found=not made_by,
        )
        self._hold_to_ceiling(nbytes, new)
        watched = Watched(storage, self._gone)
        watched.key, watched.number, watched.nbytes = id(storage), len(self.storages), nbytes
        self._live[watched.key] = watched
        self.storages.append(new)
        self._change(watched.number, nbytes)

    def _hold_to_ceiling(self, nbytes: int, of: Storage) -> None:
        if self.ceiling is not None and self.live_bytes + nbytes > self.ceiling:
            self.refused = len(self.events), of
            raise emulated_error(nbytes, of, self.live_bytes, self.ceiling)

    def _gone(self, watched: Any) -> None:
        if self._live.pop(watched.key, None) is None:
            return  # freed after the log was closed
        if running_backward() >= 0:
            self.storages[watched.number].freed_in_backward = True
        self._change(watched.number, -watched.nbytes)

    def _change(self, number: int, change: int) -> None:
        self.events.append((number, change))
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
