"""What the graph tells that one backward pass is about to run: read without touching what it saved."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

# What tensor cores are for, by the names of autograd's nodes.
PRODUCT = re.compile(
    r"(Addmm|Mm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Linear|Mkldnn(Linear|Conv)|Conv|Cudnn(Conv|Rnn)|ScaledDot)"
)
THROUGH = ("AddBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0")  # no division hides in these
HALF = (torch.float16, torch.bfloat16)
MEAN = 1  # at::Reduction::Mean in ATen/core/Reduction.h


class Region(NamedTuple):
    """Where autocast was asked for."""

    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"autocast({self.device!r})"

    @property
    def kind(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass
class Graph:
    """`products`: matrix products by (region, dtype of the result), `regions`: all, `hidden`: those
    with a node that may be anything (a compiled part, a reentrant checkpoint, a function of Python's). `mean`: what the
    loss is the mean of, if nothing divides it. `outside_bytes`: results of nodes outside of `checkpoints`."""

    sequences: set[int] = field(default_factory=set)
    names: Counter[str] = field(default_factory=Counter)
    products: Counter[tuple[Region | None, torch.dtype]] = field(default_factory=Counter)
    regions: set[Region | None] = field(default_factory=set)
    hidden: set[Region | None] = field(default_factory=set)
    batch_norms: int = 0
    mean: str | None = None
    checkpoints: set[int] = field(default_factory=set)
    outside_bytes: float = 0

    @property
    def half(self) -> set[torch.dtype]:
        """The low precisions in which its matrix products ran."""
        return {dtype for _, dtype in self.products if dtype in HALF}


class Spans:
    """What was on while autograd gave out its sequence numbers."""

    def __init__(self) -> None:
        self._starts, self._values, self._outer = [-1], [None], [None]

    def begin(self, value: Any) -> None:
        self._outer.append(value)
        self._mark(value)

    def end(self) -> None:
        if len(self._outer) > 1:
            self._outer.pop()
            self._mark(self._outer[-1])

    @property
    def now(self) -> Any:
        return self._outer[-1]

    def _mark(self, value: Any) -> None:
        self._starts.append(torch.autograd._get_sequence_nr())
        self._values.append(value)

    def at(self, sequence: int) -> Any:
        return self._values[bisect_right(self._starts, sequence) - 1]


def read_graph(
    outputs: Sequence[Any], autocasts: Spans, checkpoints: Spans, scaled: Collection[int]
) -> tuple[Graph, list[torch.Tensor], list[Any]]:
    """The graph behind tensors (or edges), its leaves, and the nodes of its ends: its roots, and the oldest one.
    `scaled`: nodes that multiply by a GradScaler's scale."""
    graph, leaves = Graph(), []
    oldest: Any = None
    roots = [getattr(each, "grad_fn", None) or getattr(each, "node", None) for each in outputs]
    leaves += [each for each in outputs if isinstance(each, torch.Tensor) and each.is_leaf]
    if len(roots) == 1 and roots[0] is not None and getattr(outputs[0], "numel", lambda: 0)() == 1:
        graph.mean = _mean(roots[0], scaled)
    for node in _nodes(roots):
        if node.name().endswith("AccumulateGrad"):
            leaves.append(node.variable)
            continue
        sequence, name = node._sequence_nr(), node.name()
        oldest = node if oldest is None or sequence < oldest._sequence_nr() else oldest
        region, results = autocasts.at(sequence), node._input_metadata
        graph.sequences.add(sequence)
        graph.names[name] += 1
        graph.regions.add(region)
        if isinstance(node, BackwardCFunction):
            graph.hidden.add(region)
        elif PRODUCT.match(name) and results:
            graph.products[region, results[0].dtype] += 1
        graph.batch_norms += "BatchNorm" in name and bool(getattr(node, "_saved_training", True))
        inside = checkpoints.at(sequence)
        if inside is not None:
            graph.checkpoints.add(inside)
        else:
            graph.outside_bytes += sum(_nbytes(each) for each in results)
    return graph, leaves, [*roots, oldest]


def _nbytes(result: Any) -> float:
    known = all(type(size) is int for size in result.shape)  # those of a jagged tensor are symbols
    return prod(result.shape) * result.dtype.itemsize if known else inf


def _nodes(roots: Sequence[Any]) -> Iterator[Any]:
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        waiting += new


def _mean(root: Any, scaled: Collection[int]) -> str | None:
    """The mean reduction at the root of a loss (or of one term of its sum); None if there may be a division."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        name, below = node.name(), [each for each, _ in node.next_functions if each is not None]
        if getattr(node, "_saved_reduction", None) == MEAN:
            return str(name.partition("Backward")[0])
        if name.startswith("MeanBackward") and not (below and below[0].name().startswith(("Div", "Mul"))):
            return "Mean"
        if node._sequence_nr() in scaled or name in THROUGH:
            waiting += below
    return None
