"""What happens in training steps, written down: backward passes, steps, clipping, schedules, checkpoints.

Nothing that runs is changed. This and its helpers use PyTorch's private interfaces: autograd's one entrance to its
engine and its sequence numbers, the cell behind `clip_grad_norm_` (a name that was imported before means the same
function), the hooks of checkpoints, and dynamo's metrics.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from labsupport.diagnose.watching.autocasts import watch_autocast
from labsupport.diagnose.watching.checkpoints import watch_checkpoints
from labsupport.diagnose.watching.compilations import Compilations
from labsupport.diagnose.watching.events import Backward, Clipped, Scheduled, Step
from labsupport.diagnose.watching.gradients import Gradient, norm_of, shares_of
from labsupport.diagnose.watching.graphs import HALF, read_graph
from labsupport.diagnose.watching.patches import Patches, is_traced, quiet, running_backward
from labsupport.measure.storages import innermost_line, source_line, tensors_in


class Watch:
    """A context that writes `events` while steps run. `call` is for its user to raise.

    `used`: backward passes whose gradients any step has used, or the user's own code. `owners`: the parameters of each
    optimizer that was seen, by id.
    """

    def __init__(self) -> None:
        self.call = self.backwards = self.steps = self.inside = 0
        self.events: list[Any] = []
        self.gradients: dict[int, Gradient] = {}
        self.used: set[int] = set()
        self.owners: dict[str, set[int]] = {}
        self.compilations = Compilations()
        self._names: dict[int, str] = {}
        self._scaled: dict[int, float] = {}
        self._open: dict[str, tuple[Step, int, list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        self._graphs: list[weakref.ref[Any]] = []
        self._retained: list[Backward] = []
        self._scheduling = self._last_start = self._alive = 0
        self._skipped: dict[Any, bool] = {}
        self._patches = Patches()

    def __enter__(self) -> "Watch":
        with self._patches as patches:
            patches.callback(register_optimizer_step_pre_hook(self._step_begins).remove)
            patches.callback(register_optimizer_step_post_hook(self._step_ends).remove)
            patches.put(torch.autograd, "_engine_run_backward", self._backward, apart=True)
            for name in ("scale", "unscale_", "step"):
                patches.put(GradScaler, name, getattr(self, f"_scaler_{name.rstrip('_')}"))
            for kind in _with_subclasses(LRScheduler):
                if "step" in vars(kind):
                    patches.put(kind, "step", self._schedule)
            for clip in (clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_):
                patches.put((clip.__closure__ or ())[0], "cell_contents", self._clip)
            self._autocasts = watch_autocast(patches)
            self._checkpoints = watch_checkpoints(patches, self.events.append)
            self._undo = patches.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()
        self.compilations.see(self.call)

    # Backward passes.

    def _backward(self, run: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if running_backward() != -1 or capturing or any(is_traced(each) for each in outputs):
            return run(outputs, *args, **kwargs)
        with quiet():
            event = self._begin_backward(outputs, *args, **kwargs)
        result = run(outputs, *args, **kwargs)
        if event:
            with quiet():
                self._end_backward(event)
        return result

    def _begin_backward(
        self, outputs: Any, seeds: Any, retain: bool, create: bool, *_: Any, accumulate_grad: bool = False, **__: Any
    ) -> Backward | None:
        graph, leaves, ends = read_graph(outputs, self._autocasts, self._checkpoints, self._scaled)
        for each in self._retained[-16:]:
            each.reused = each.reused or not each.graph.sequences.isdisjoint(graph.sequences)
        if not accumulate_grad:  # torch.autograd.grad
            return None
        if any(seed is not None and not bool((seed == 1).all()) for seed in seeds):
            graph.mean = None  # it may be divided by what backward() was given
        self.backwards += 1
        self._know(leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter))
        self._look()
        scale = next((self._scaled[each] for each in graph.sequences & set(self._scaled)), 1.0)
        old = sum(each < self._last_start for each in graph.sequences)
        self._last_start = torch.autograd._get_sequence_nr()
        token = _Token()  # lives as long as the loss, or what it was made from, keeps its graph
        self._graphs.append(weakref.ref(token))
        for node in ends:
            getattr(node, "metadata", {})["labsupport.audit"] = token
        source = source_line(*innermost_line(self._skipped)[0])
        reached, retains = {id(leaf) for leaf in leaves}, bool(retain) and not create
        return Backward(self.backwards, self.call, _line(), source, graph, scale, retains, old, reached)

    def _end_backward(self, event: Backward) -> None:
        fresh = {key for key, each in self.gradients.items() if not each.held}
        numbers, leaves = (event.number, event.scale), event.leaves
        event.filled = {key for key, each in self.gradients.items() if each.fill(*numbers, reached=key in leaves)}
        filled = [self.gradients[key] for key in event.filled]
        event.norm = norm_of(each.parameter.grad for each in filled if each.parameter.grad is not None)
        for each in filled:
            parameter: Any = each.parameter
            event.hooked |= bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
            scales = {scale for number, scale in each.held.items() if number and number not in each.used}
            event.mixed = max(event.mixed, tuple(sorted(scales)) if len(scales) > 1 else ())
        if torch.float16 in event.graph.half and event.scale == 1:
            gradients = [each.parameter.grad for key, each in self.gradients.items() if key in fresh and each.got]
            event.zeros, event.small = shares_of(gradients)
        if self._open:
            self.used.add(event.number)  # within an optimizer's step, by a closure: it knows what it asked for
        if event.retains:
            self._retained.append(event)
        else:
            event.graph.sequences.clear()
        self.events.append(event)

    def _know(self, parameters: Iterable[torch.Tensor]) -> None:
        for each in parameters:
            if id(each) not in self.gradients:
                self.gradients[id(each)] = Gradient(each)

    def _look(self, keys: Iterable[int] | None = None, *, expected: bool = False) -> None:
        for key in self.gradients if keys is None else keys:
            self.used |= self.gradients[key].look(expected=expected)

    # Optimizers, scalers, schedulers, clipping.

    def _owner(self, optimizer: Any) -> str:
        """Its name; the same for an optimizer and what wraps it."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._know(parameters)
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        others = sum(name.partition(" ")[0] == kind for name in self._names.values())
        name = self._names.setdefault(
            id(parameters[0] if parameters else optimizer), f"{kind} {others + 1}" if others else kind
        )
        self.owners.setdefault(name, set()).update(id(each) for each in parameters)
        return name

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._patches.on:
            return
        if running_backward() != -1:
            self.inside += 1
            return
        with quiet():
            name, halves = self._owner(optimizer), []
            if type(optimizer).__module__.startswith("torch.optim"):  # others may round by lot, or keep a float32 copy
                groups = [each["params"] for each in optimizer.param_groups if each.get("lr")]
                halves = [each for group in groups for each in group if each.dtype in HALF and each.grad is not None]
            step = self._new_step(name)
            self._open[name] = step, self.backwards, [(each, each.clone()) for each in halves]

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._patches.on or running_backward() != -1:
            return
        with quiet():
            name = self._owner(optimizer)
            if name not in self._open:
                return
            step, backwards, halves = self._open.pop(name)
            self._look(expected=True)
            if self.backwards > backwards:  # its closure made the gradients
                self._use(step)
            for parameter, before in halves:
                if parameter.grad is not None:
                    moving = parameter.grad != 0
                    step.wanted += int(moving.sum())
                    step.unchanged += int((moving & (parameter == before)).sum())
            self._finish(step)

    def _new_step(self, name: str, *, skipped: bool = False) -> Step:
        self.steps += 1
        step = Step(self.steps, self.call, name, skipped)
        self._look()
        self._use(step)
        return step

    def _finish(self, step: Step) -> None:
        if self._count_graphs() > self._alive:
            gc.collect()  # what only cycles hold is not kept
        self._alive = step.alive = self._count_graphs()
        self.compilations.see(self.call)
        self.events.append(step)

    def _count_graphs(self) -> int:
        self._graphs = [graph for graph in self._graphs if graph() is not None]
        return len(self._graphs)

    def _use(self, step: Step) -> None:
        for key in self.owners[step.optimizer]:
            each = self.gradients[key]
            step.found |= bool(each.held) or each.zero
            step.touched |= each.touched
            used, again = each.use(step.number)
            step.used |= used
            step.again |= again
            step.lost |= each.lost
            each.lost = set()
        self.used |= step.used

    def _scaler_scale(self, scale: Callable[..., Any], scaler: GradScaler, outputs: Any) -> Any:
        result = scale(scaler, outputs)
        for each in tensors_in(result) if scaler.is_enabled() else ():
            if each.grad_fn is not None:
                self._scaled[each.grad_fn._sequence_nr()] = scaler.get_scale()
        return result

    def _scaler_unscale(self, unscale: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer) -> None:
        unscale(scaler, optimizer)
        if scaler.is_enabled():
            with quiet():
                keys = self.owners[self._owner(optimizer)]
                self._look(keys, expected=True)
                for key in keys:
                    self.gradients[key].held = dict.fromkeys(self.gradients[key].held, 1.0)

    def _scaler_step(
        self, step: Callable[..., Any], scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        before = self.steps, self.inside
        result = step(scaler, optimizer, *args, **kwargs)
        if scaler.is_enabled():
            with quiet():
                infinite = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
                if (self.steps, self.inside) == before:
                    self._finish(self._new_step(self._owner(optimizer), skipped=True))
                elif any(bool(each) for each in infinite):  # a fused optimizer skips by itself
                    next(each for each in reversed(self.events) if isinstance(each, Step)).skipped = True
        return result

    def _schedule(self, step: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self._scheduling += 1  # some step others
        try:
            result = step(scheduler, *args, **kwargs)
        finally:
            self._scheduling -= 1
        if not self._scheduling and not scheduler._is_initial:
            with quiet():
                self.events.append(Scheduled(self.call, type(scheduler).__name__, self._owner(scheduler.optimizer)))
        return result

    def _clip(self, clip: Callable[..., Any], parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not isinstance(parameters, torch.Tensor) and iter(parameters) is parameters:
            parameters = iter(given)
        with quiet():
            keys = [id(each) for each in given if id(each) in self.gradients]
            self._look(keys)
            before = [self.gradients[key].now for key in keys]
        result = clip(parameters, limit, *args, **kwargs)
        with quiet():
            self._look(keys, expected=True)
            scale = max((scale for key in keys for scale in self.gradients[key].held.values()), default=1.0)
            if scale != 1 and before != [self.gradients[key].now for key in keys]:
                self.events.append(Clipped(self.call, clip.__name__.strip("_"), float(limit), scale))
        return result


class _Token:
    pass


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = kind.__subclasses__()
    for each in subclasses:
        yield from _with_subclasses(each)


def _line() -> int:
    """From where, all the way up: the same in each round of a loop."""
    frame: FrameType | None = sys._getframe(1)
    calls = []
    while frame is not None:
        calls.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return hash(tuple(calls))
