"""What a watch writes down: one record for each thing that happened while training steps ran."""

from dataclasses import dataclass, field
from math import nan

import torch

from labsupport.diagnose.watching.graphs import Graph


@dataclass
class Backward:
    """`line`: from where it was called, all the way up; `scale`: a GradScaler's factor; `retains`: the graph was to
    stay; `old`: nodes of it that were made before the last backward pass; `reused`: another pass ran through it;
    `leaves`: what it reached, `filled`: what got values, by id; `hooked`: some of them have hooks; `norm`: of their
    gradients; `mixed`: scales of gradients that were added up; `zeros`: the share of float16 gradients without a scale
    that are 0, and `small` of the others that nearly are."""

    number: int
    call: int
    line: int
    source: str
    graph: Graph
    scale: float
    retains: bool
    old: int
    leaves: set[int]
    reused: bool = False
    filled: set[int] = field(default_factory=set)
    hooked: bool = False
    norm: float = nan
    mixed: tuple[float, ...] = ()
    zeros: float = 0.0
    small: float = 0.0


@dataclass
class Step:
    """Of an optimizer. `found`: there was a gradient; backward passes: `used` for the first time, used `again` with
    newer ones on top, `lost` since the step before; `touched`: some gradient was changed by the user's own code;
    `alive`: losses whose graphs are still held. Of half-precision weights with a gradient, `wanted`, so many were
    `unchanged` by it."""

    number: int
    call: int
    optimizer: str
    skipped: bool = False
    found: bool = False
    used: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    touched: bool = False
    alive: int = 0
    wanted: int = 0
    unchanged: int = 0


@dataclass
class Scheduled:
    call: int
    scheduler: str
    optimizer: str


@dataclass
class Clipped:
    """Gradients that were still scaled."""

    call: int
    function: str
    limit: float
    scale: float


@dataclass
class Checkpointed:
    """`saved_bytes`: what autograd would save within, `kept_bytes`: what the checkpoint keeps instead; both 0 where
    nobody can tell. `random`: it drew random numbers. `blind`: parameters that want a gradient in a reentrant one, if
    no input of it does."""

    number: int
    block: str
    preserves: bool
    random: bool = False
    saved_bytes: int = 0
    kept_bytes: int = 0
    blind: list[torch.Tensor] = field(default_factory=list)
