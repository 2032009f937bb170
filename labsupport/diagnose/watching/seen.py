"""The events of a watch in the order that rules ask for."""

import gc
import math
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from labsupport.diagnose.watching.events import Backward, Checkpointed, Clipped, Step
from labsupport.diagnose.watching.watch import Watch


class Seen:
    """What was watched: `backwards` by number, `steps` also by optimizer, `blind`: parameters that a reentrant
    checkpoint left without a gradient. `ended`: the loop did by itself; `target`: the kind of device."""

    def __init__(self, watch: Watch, ended: bool, target: str | None) -> None:
        self.watch, self.events, self.ended = watch, watch.events, ended
        self.backwards = {each.number: each for each in watch.events if isinstance(each, Backward)}
        self.steps = [each for each in watch.events if isinstance(each, Step)]
        self.by_optimizer: dict[str, list[Step]] = {}
        for step in self.steps:
            self.by_optimizer.setdefault(step.optimizer, []).append(step)
        self.clipped = [each for each in watch.events if isinstance(each, Clipped)]
        self.checkpoints = [each for each in watch.events if isinstance(each, Checkpointed)]
        self.blind = {id(p) for each in self.checkpoints for p in each.blind if not self.got(id(p))}
        kinds = Counter(each.parameter.device.type for each in watch.gradients.values())
        self.target = target or (kinds.most_common(1)[0][0] if kinds else "cpu")
        self.half = any(each.graph.half for each in self.backwards.values())
        self.half_on_cuda, self.compiled = self.half and self.target == "cuda", watch.compilations.count

    def got(self, key: int) -> bool:
        """Whether a backward pass ever made a gradient for a parameter."""
        return key in self.watch.gradients and self.watch.gradients[key].got

    def unused(self, numbers: Iterable[int]) -> list[int]:
        """Of some backward passes those whose gradients nobody used. Infinite ones are dropped for good
        reason, and where an input got one too, that may be what was wanted."""
        left = [self.backwards[each] for each in set(numbers) - self.watch.used if each in self.backwards]
        return sorted(
            each.number for each in left if math.isfinite(each.norm) and each.leaves <= set(self.watch.gradients)
        )

    def micro_batches(self, step: Step) -> list[Backward]:
        """The backward passes of a step, if they are several, of one line and one kind of graph. Those of several
        losses, or of real and fake samples, come from lines of their own."""
        used = [self.backwards[each] for each in sorted(step.used) if each in self.backwards]
        alike = {(each.line, frozenset(each.graph.names.items()), frozenset(each.filled)) for each in used}
        apart = any(
            each.used & step.used and each.used != step.used for each in self.steps
        )  # windows of another length
        return used if len(used) > 1 and len(alike) == 1 and not apart else []

    def names(self, keys: Iterable[int]) -> str:
        known = self.named()
        named = sorted(known.get(key, "one without a name") for key in keys)
        return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")

    def named(self) -> dict[int, str]:
        """The names of the parameters that modules of this process hold, by id."""
        parts = ((name, *part) for name, module in self.modules() for part in module.named_parameters(recurse=False))
        return {id(parameter): f"{name}.{part}".removeprefix(".") for name, part, parameter in parts}

    def modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules of this process whose parameters were seen, with their names."""
        kind = torch.nn.Module
        every = [each for each in gc.get_objects() if issubclass(type(each), kind) and "_modules" in vars(each)]
        inner = {id(child) for each in every for child in each.children()}
        for root in (each for each in every if id(each) not in inner):
            for name, part in root.named_modules():
                if any(id(each) in self.watch.gradients for each in part.parameters(recurse=False)):
                    yield name, part

    def in_optimizers(self) -> set[int]:
        """The parameters of all optimizers of this process, also of those that did not step, by id."""
        every = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
        return {id(each) for optimizer in every for group in optimizer.param_groups for each in group["params"]}


def passes(numbers: Iterable[int]) -> str:
    """ "backward 1, 2, 3", for people."""
    listed = sorted(numbers)
    return f"backward {', '.join(map(str, listed[:4]))}" + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
