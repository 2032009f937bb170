"""What each activation checkpoint saves, keeps and draws."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.utils import checkpoint

from labsupport.diagnose.watching.events import Checkpointed
from labsupport.diagnose.watching.graphs import Spans
from labsupport.diagnose.watching.patches import Patches, running_backward
from labsupport.measure.state import found_in
from labsupport.measure.storages import storages_of, tensors_in


def watch_checkpoints(patches: Patches, write: Callable[[Checkpointed], None]) -> Spans:
    """Spans of their numbers, filled as they run; each is written as an event. Those of compiled code are not seen."""
    return _CheckpointWatch(patches, write).spans


class _CheckpointWatch:
    def __init__(self, patches: Patches, write: Callable[[Checkpointed], None]) -> None:
        self.spans = Spans()
        self._write, self._count, self._inputs_bytes = write, 0, 0
        if hasattr(checkpoint._CheckpointFrame, "save_inputs"):
            patches.put(checkpoint._CheckpointFrame, "save_inputs", self._save_inputs)
        patches.put(checkpoint, "_checkpoint_hook", self._hook)
        patches.put(checkpoint.CheckpointFunction, "apply", self._reentrant)

    def _new(self, function: Any, preserves: bool) -> Checkpointed:
        self._count += 1
        function = getattr(function, "func", function)  # of a partial
        module = getattr(function, "__self__", function)
        block = type(module).__name__ if isinstance(module, torch.nn.Module) else getattr(function, "__qualname__", "?")
        event = Checkpointed(self._count, block, preserves)
        self._write(event)
        return event

    def _save_inputs(self, save: Callable[..., Any], frame: Any, *inputs: Any) -> None:
        save(frame, *inputs)
        made = [each for each in tensors_in(inputs) if each.requires_grad and not _is_weight(each)]  # not the batch
        storages = {id(part): part for each in made for part in storages_of(each)}
        self._inputs_bytes = sum(part.nbytes() for part in storages.values())

    @contextmanager
    def _hook(self, make: Callable[..., Any], frame: Any) -> Iterator[None]:
        hook = make(frame)
        if running_backward() != -1:
            with hook:
                yield
            return
        around = _closure(frame.recompute_fn)
        event = self._new(around.get("fn"), around.get("preserve_rng_state", True))
        if self.spans.now is None and isinstance(around.get("recompute_context"), nullcontext):
            event.kept_bytes = self._inputs_bytes
            hook.pack_hook = _counted(hook.pack_hook, event)
        before = _random_state()
        self.spans.begin(event.number)
        try:
            with hook:
                yield
        finally:
            self.spans.end()
            event.random = _random_state() != before

    def _reentrant(self, apply: Callable[..., Any], function: Any, preserves: bool, *inputs: Any) -> Any:
        if running_backward() != -1 or not torch.is_grad_enabled():
            return apply(function, preserves, *inputs)
        event = self._new(function, preserves)
        if not any(each.requires_grad for each in inputs if isinstance(each, torch.Tensor)):
            modules = [each for each in found_in(function) if isinstance(each, torch.nn.Module)]
            event.blind = [p for each in modules for p in each.parameters() if p.requires_grad]
        before = _random_state()
        result = apply(function, preserves, *inputs)
        event.random = _random_state() != before
        return result


def _closure(function: Any) -> dict[str, Any]:
    """The values that a function sees of those around it."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # one without a value
            found[name] = cell.cell_contents
    return found


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter)


def _counted(pack: Callable[..., Any], event: Checkpointed) -> Callable[..., Any]:
    """The same, and the bytes of each storage counted once. An address may be used again: what was freed is none."""
    seen: dict[int, weakref.ref[Any]] = {}

    def counted(tensor: torch.Tensor) -> Any:
        for part in () if _is_weight(tensor) else storages_of(tensor):
            if id(part) not in seen or seen[id(part)]() is not part:
                seen[id(part)] = weakref.ref(part)
                event.saved_bytes += part.nbytes()
        return pack(tensor)

    counted._checkpoint_internal = True  # type: ignore[attr-defined]
    return counted


def _random_state() -> list[bytes]:
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [each.numpy().tobytes() for each in (torch.get_rng_state(), *cuda)]
