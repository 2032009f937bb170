"""How much room the accelerators of the table have for tensors, and which batch fits into it."""

from labsupport.accelerators import accelerators
from labsupport.train.plan import MemoryPlan

# Of the memory on the box. The rest is for the CUDA context, kernels' workspaces and fragmentation, which no plan sees.
TENSOR_SHARE = 0.9


def rooms() -> dict[str, int]:
    """Bytes for tensors, by card and memory: {"T4 (16 GB)": ...}; a card sold with several has a row for each."""
    return {
        f"{name} ({memory_gb:g} GB)": int(TENSOR_SHARE * memory_gb * 1e9)
        for name, card in accelerators().items()
        for memory_gb in card.memory_gb
    }


def largest_batches(plan: MemoryPlan) -> dict[str, int | None]:
    """The largest batch that the plan allows on each card: 0 if not one sample fits, None if memory does not rise."""
    return {name: plan.max_batch(room) for name, room in rooms().items()}
