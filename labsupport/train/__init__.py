"""What is trained, how, with what data, and how much memory that takes."""

from labsupport.train.batch_size import BatchSizeResult, find_batch_size
from labsupport.train.data import StoredImages
from labsupport.train.plan import MemoryPlan, plan_memory
from labsupport.train.recipe import Recipe
from labsupport.train.step import Step, build_step
from labsupport.train.traces import CannotPlan
from labsupport.train.workload import Workload

__all__ = [
    "BatchSizeResult",
    "CannotPlan",
    "MemoryPlan",
    "Recipe",
    "Step",
    "StoredImages",
    "Workload",
    "build_step",
    "find_batch_size",
    "plan_memory",
]
