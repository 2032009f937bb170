"""What a step changes, kept and put back: parameters, buffers, gradients, optimizer state, modes, randomness."""

import copy
import dis
import functools
import inspect
import random
from collections.abc import Callable, Iterable
from itertools import islice
from types import CellType, CodeType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

Keepable = (torch.nn.Module, torch.optim.Optimizer)


def found_in(step: Callable[..., Any]) -> list[Any]:
    """Modules, optimizers and other holders of a `state_dict` that a step names: in its closure, its defaults and the
    globals it uses, in what it is bound to or wraps (`partial`, a method's object, a decorator), and one level down
    in the attributes, lists and dicts there.

    Functions that it calls are read too where they are of its own module, or notebook. What those of other modules
    use is not seen: pass `state=` then.
    """
    named, read, home = [step], [step], _module_of(step) or type(step).__module__
    for each in read:  # it grows meanwhile
        parts = _parts(each)
        named += parts
        read += [part for part in _once(parts) if _module_of(part) == home and not any(part is old for old in read)]
    inner = [part for each in _once(named) for part in _inside(each)]
    return [each for each in _once([*named, *inner]) if not inspect.isclass(each) and _gives_state(each)]


def _module_of(thing: Any) -> str | None:
    """Where a function was written; None for anything else."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    return getattr(thing, "__module__", None) if inspect.isroutine(thing) else None


def _parts(thing: Any) -> list[Any]:
    """What a callable is made of, and names."""
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    bound = [getattr(thing, name, None) for name in ("__self__", "__func__", "__wrapped__")]
    if not inspect.isfunction(thing):
        return [*bound, type(thing).__call__ if callable(thing) else None]
    cells = [_content(cell) for cell in thing.__closure__ or ()]
    defaults = [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
    used = [thing.__globals__.get(name) for name in _globals_of(thing.__code__)]
    return [*bound, *cells, *defaults, *used]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _globals_of(code: CodeType) -> list[str]:
    """The names of globals that code loads, also in the functions and comprehensions within."""
    names = [each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]
    return [*names, *(name for part in code.co_consts if isinstance(part, CodeType) for name in _globals_of(part))]


def _inside(thing: Any) -> list[Any]:
    if isinstance(thing, dict | list | tuple | set):  # of a data set's million samples the first tell
        return list(islice(thing.values() if isinstance(thing, dict) else thing, 1000))
    if isinstance(thing, ModuleType | type):
        return []
    return [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in ("model", "optimizer"))]


def share_state(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether two lists of such things have a tensor or a thing in common."""
    return bool(reach(some) & reach(others))


def reach(things: Iterable[Any]) -> set[int]:
    """The ids of some things, and of the tensors that they train or hold."""
    reached = set()
    for thing in things:
        reached.add(id(thing))
        if isinstance(thing, torch.nn.Module):
            reached |= {id(tensor) for tensor in (*thing.parameters(), *thing.buffers())}
        if isinstance(thing, torch.optim.Optimizer):
            reached |= {id(parameter) for group in thing.param_groups for parameter in group["params"]}
    return reached


def _has_state(thing: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def _gives_state(thing: Any) -> bool:
    """Some only pass on the state of what they wrap, and that has none: Accelerate's data loaders."""
    if not _has_state(thing) or isinstance(thing, Keepable):
        return _has_state(thing)
    try:
        thing.state_dict()
    except Exception:  # whatever it is, there is no state to keep
        return False
    return True


def _once(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())


class KeptState:
    """The state of some modules, optimizers and others, as it was when this was made: `put_back()` as often as needed.

    Copies lie in host memory. Tensors are written in place, so that everything which points to them (an optimizer,
    a CUDA graph, a view) still does; what did not exist is removed again. With `randomness`, the random states of
    torch, CUDA, numpy and Python are kept too. Raises TypeError for an object without `state_dict` and
    `load_state_dict`, ValueError for a module whose parameters have no shape yet.
    """

    def __init__(self, things: Iterable[Any], *, randomness: bool = True) -> None:
        things = _once(things)
        if odd := [thing for thing in things if not _has_state(thing)]:
            raise TypeError(
                f"cannot keep the state of {odd[0]!r}: modules, optimizers, and objects with state_dict "
                "and load_state_dict are expected in state="
            )
        modules = _once(part for thing in things if isinstance(thing, torch.nn.Module) for part in thing.modules())
        self._optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
        self._others = [
            (thing, copy.deepcopy(thing.state_dict())) for thing in things if not isinstance(thing, Keepable)
        ]
        # What a GradScaler knows of gradients that wait is in no state_dict; an error may come before its update().
        scalers = [thing for thing in things if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled()]
        self._waiting = [(scaler, copy.deepcopy(scaler._per_optimizer_states)) for scaler in scalers]
        self._modes = [(module, module.training) for module in modules]
        # Which tensor each name means: `self.average = 0.9 * self.average + x` makes it mean another one.
        # (What TorchScript has there is no dict, and cannot be changed.)
        tables = [names for each in modules for names in (each._parameters, each._buffers) if isinstance(names, dict)]
        self._names = [(names, dict(names)) for names in tables]
        optimized = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        parameters = _once([*(p for m in modules for p in m.parameters(recurse=False)), *optimized])
        tensors = _once([*parameters, *(buffer for module in modules for buffer in module.buffers(recurse=False))])
        if any(torch.nn.parameter.is_lazy(tensor) for tensor in tensors):
            raise ValueError("a lazy module has no state to keep before its first call: call it once, then measure")
        self._tensors = [(tensor, _KeptTensor.of(tensor)) for tensor in tensors]
        self._gradients = [
            (p, p.requires_grad, p.grad, None if p.grad is None else _KeptTensor.of(p.grad)) for p in parameters
        ]
        self._states = [_copied(optimizer.state) for optimizer in self._optimizers]
        self._groups = [
            [(group, list(group["params"]), _copied({**group, "params": None})) for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        of_all = torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()
        self._random = of_all if randomness else None

    def put_back(self) -> None:
        """Make everything as it was."""
        for names, meant in self._names:
            names.clear()
            names.update(meant)
        with torch.no_grad():
            for tensor, kept in self._tensors:
                kept.write(tensor)
            for parameter, requires_grad, gradient, old in self._gradients:
                if parameter.requires_grad != requires_grad:  # may not even be said of one made in inference mode
                    parameter.requires_grad_(requires_grad)
                parameter.grad = gradient
                if gradient is not None and old is not None:
                    old.write(gradient)
            for optimizer, states, groups in zip(self._optimizers, self._states, self._groups, strict=True):
                _write(optimizer.state, states)
                optimizer.param_groups[:] = [group for group, _, _ in groups]
                for group, parameters, options in groups:
                    _write(group, options)
                    group["params"] = list(parameters)
        for thing, kept_dict in self._others:
            thing.load_state_dict(copy.deepcopy(kept_dict))
        for scaler, waiting in self._waiting:
            scaler._per_optimizer_states = copy.deepcopy(waiting)
        for module, training in self._modes:
            module.training = training
        if self._random is None:
            return
        on_cpu, cuda, of_numpy, of_python = self._random
        torch.set_rng_state(on_cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


class _KeptTensor(NamedTuple):
    device: torch.device
    copy: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_KeptTensor":
        return cls(tensor.device, tensor.detach().to("cpu", copy=True))

    def fits(self, tensor: Any) -> bool:
        kind = self.copy.shape, self.copy.dtype, self.device
        return isinstance(tensor, torch.Tensor) and (tensor.shape, tensor.dtype, tensor.device) == kind

    def fresh(self) -> torch.Tensor:
        return self.copy.to(self.device, copy=True)

    def write(self, tensor: torch.Tensor) -> None:
        """In place; only what was moved or converted meanwhile gets new storage."""
        if self.fits(tensor):
            # detached, for that can be written even if it was made in inference mode; a sparse one only as it is
            (tensor.detach() if tensor.layout == torch.strided else tensor).copy_(self.copy)
        else:
            tensor.data = self.fresh()


def _copied(value: Any) -> Any:
    """A copy that nothing else writes to; tensors remember the device they came from."""
    if isinstance(value, torch.Tensor):
        return _KeptTensor.of(value)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return copy.deepcopy(value)


def _write(into: Any, kept: dict[Any, Any]) -> None:
    """Make a dict as it was, its tensors in place where they still fit."""
    for new in set(into) - set(kept):
        del into[new]
    for key, value in kept.items():
        there = into.get(key)
        if isinstance(value, dict):
            into[key] = there if isinstance(there, dict) else {}
            _write(into[key], value)
        elif not isinstance(value, _KeptTensor):
            into[key] = copy.deepcopy(value)
        elif value.fits(there):
            value.write(there)
        else:
            into[key] = value.fresh()
