"""What a step changes, kept and put back: parameters, buffers, gradients, optimizer state, modes, randomness."""

import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

Keepable = (torch.nn.Module, torch.optim.Optimizer)


def found_in(step: Callable[..., Any]) -> list[Any]:
    """Modules, optimizers and other holders of a `state_dict` that a step names: its closure, the globals it uses,
    what it is bound to (`partial`, a method's object), and the attributes `model` and `optimizer` of that.

    What a function further down uses is not seen: pass `state=` then.
    """
    near: list[Any] = [step]
    while isinstance(step, functools.partial):
        near += [*step.args, *step.keywords.values()]
        step = step.func
    owner = getattr(step, "__self__", step)
    near += [owner, *(getattr(owner, name, None) for name in ("model", "optimizer"))]
    function = getattr(step, "__func__", step)
    if inspect.isfunction(function):
        seen = inspect.getclosurevars(function)
        near += [*seen.nonlocals.values(), *seen.globals.values()]
    return [each for each in _once(near) if not inspect.isclass(each) and _has_state(each)]


def share_state(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether two lists of such things have a tensor or a thing in common."""
    return bool(_reach(some) & _reach(others))


def _reach(things: Iterable[Any]) -> set[int]:
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


def _once(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())


class KeptState:
    """The state of some modules, optimizers and others, as it was when this was made: `put_back()` as often as needed.

    Copies lie in host memory. Tensors are written in place, so that everything which points to them (an optimizer,
    a CUDA graph, a view) still does; what did not exist is removed again. Random states of torch, CUDA, numpy and
    Python are kept too. Raises TypeError for an object without `state_dict` and `load_state_dict`.
    """

    def __init__(self, things: Iterable[Any]) -> None:
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
        self._modes = [(module, module.training) for module in modules]
        optimized = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        parameters = _once([*(p for m in modules for p in m.parameters(recurse=False)), *optimized])
        buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
        self._tensors = [(tensor, _host_copy(tensor)) for tensor in _once([*parameters, *buffers])]
        self._gradients = [(p, p.grad, None if p.grad is None else _host_copy(p.grad)) for p in parameters]
        self._states = [{p: _copied(state) for p, state in each.state.items()} for each in self._optimizers]
        self._groups = [
            [{key: _copied(value) for key, value in group.items() if key != "params"} for group in each.param_groups]
            for each in self._optimizers
        ]
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._random = torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()

    def put_back(self) -> None:
        """Make everything as it was."""
        with torch.no_grad():
            for tensor, kept in self._tensors:
                tensor.detach().copy_(kept)
            for parameter, gradient, old in self._gradients:
                parameter.grad = gradient
                if gradient is not None and old is not None:
                    gradient.copy_(old)
            for optimizer, states, groups in zip(self._optimizers, self._states, self._groups, strict=True):
                for new in set(optimizer.state) - set(states):
                    del optimizer.state[new]
                for parameter, state in states.items():
                    _write(optimizer.state[parameter], state)
                for group, kept_group in zip(optimizer.param_groups, groups, strict=False):
                    _write(group, kept_group, spare=("params",))
        for thing, kept_dict in self._others:
            thing.load_state_dict(copy.deepcopy(kept_dict))
        for module, training in self._modes:
            module.training = training
        on_cpu, cuda, of_numpy, of_python = self._random
        torch.set_rng_state(on_cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


class _KeptTensor(NamedTuple):
    device: torch.device
    copy: torch.Tensor


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copied(value: Any) -> Any:
    """A copy that nothing else writes to; tensors remember the device they came from."""
    if isinstance(value, torch.Tensor):
        return _KeptTensor(value.device, _host_copy(value))
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return copy.deepcopy(value)


def _write(into: Any, kept: dict[Any, Any], spare: tuple[str, ...] = ()) -> None:
    """Make a dict as it was, its tensors in place where they still fit."""
    for new in set(into) - set(kept) - set(spare):
        del into[new]
    for key, value in kept.items():
        there = into.get(key)
        if isinstance(value, dict):
            into[key] = there if isinstance(there, dict) else {}
            _write(into[key], value)
        elif not isinstance(value, _KeptTensor):
            into[key] = copy.deepcopy(value)
        elif isinstance(there, torch.Tensor) and (there.shape, there.dtype) == (value.copy.shape, value.copy.dtype):
            there.copy_(value.copy)
        else:
            into[key] = value.copy.to(value.device, copy=True)
