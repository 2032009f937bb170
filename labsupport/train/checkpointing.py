"""Parts of a model that are computed again in the backward pass instead of stored."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

Forward = Callable[..., Any]
Checkpointing = bool | int | Callable[..., Any]  # none or every block, segments, or a policy


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated parts of a model: the children of its outermost Sequentials and ModuleLists that have two or more.

    ValueError where there are none.
    """
    blocks: list[torch.nn.Module] = []
    for part in _rows_of(model):
        blocks += [child for child in part.children() if not any(child is block for block in blocks)]
    if not blocks:
        raise ValueError(
            f"checkpointing: {type(model).__name__} has no Sequential or ModuleList of two or more blocks to compute "
            "again; put its blocks into one, or call torch.utils.checkpoint in its forward"
        )
    return blocks


def _rows_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    rows: list[torch.nn.Module] = []
    waiting = [model]
    while waiting:
        part = waiting.pop(0)
        children = list(part.children())
        if isinstance(part, torch.nn.Sequential | torch.nn.ModuleList) and len(children) > 1:
            rows.append(part)
        else:
            waiting += children
    return rows


def recomputing(model: torch.nn.Module, how: Checkpointing) -> list[tuple[torch.nn.Module, Forward]]:
    """The modules of a model that need another forward for this, and that forward.

    `how` as in `Recipe`. ValueError for a model that has no such blocks, or fewer than segments are wanted.
    """
    if how is False:
        return []
    blocks = blocks_of(model)
    if how is True or callable(how):
        own = {} if how is True else {"context_fn": partial(create_selective_checkpoint_contexts, how)}
        return [(block, partial(checkpoint, block.forward, use_reentrant=False, **own)) for block in blocks]
    rows = [row for row in _rows_of(model) if isinstance(row, torch.nn.Sequential)]
    most = max((len(row) for row in rows), default=0)
    if how > most:
        raise ValueError(
            f"checkpointing: {how} segments are wanted, and the longest Sequential of {type(model).__name__} has "
            f"{most} blocks"
            + ("" if rows else ": segments need blocks that run one after the other, as in a Sequential")
        )
    return [(row, partial(_in_segments, list(row), min(how, len(row)))) for row in rows]


def _in_segments(blocks: list[torch.nn.Module], segments: int, x: Any) -> Any:
    return checkpoint_sequential(blocks, segments, x, use_reentrant=False)


@contextmanager
def replaced(forwards: list[tuple[torch.nn.Module, Forward]]) -> Iterator[None]:
    """Within it, these modules have these forwards. They are as before afterwards."""
    own: list[tuple[torch.nn.Module, Any]] = [(module, module.__dict__.get("forward")) for module, _ in forwards]
    for module, forward in forwards:
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in own:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward
