"""What the ranks of torch.distributed tell each other while each of them searches."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def told_by_all(mine: T) -> list[T]:
    """What each rank says, in their order; alone, only mine. Every rank has to call it, as often as the others."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    told: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told  # type: ignore[return-value]
