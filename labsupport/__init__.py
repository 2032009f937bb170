"""The instruments behind the labs of Feed the GPU: measure a training step, and know what it is waiting for.

The dozen names that a learner types can be imported from here; everything else lives in its wing
(`labsupport.measure`, `.train`, `.diagnose`, `.show`, `.publish`).
"""

from importlib import import_module

__version__ = "0.1.0"

# Name -> module. Resolved on first use, so that the command line starts without importing torch.
_EXPORTS = {
    "Lab": "labsupport.publish.lab",
    "measure_ceilings": "labsupport.measure.roofline",
    "MemoryLedger": "labsupport.measure.memory",
    "memory_budget": "labsupport.measure.budget",
    "Workload": "labsupport.train.workload",
    "Recipe": "labsupport.train.recipe",
    "build_step": "labsupport.train.step",
    "plan_memory": "labsupport.train.plan",
    "find_batch_size": "labsupport.train.batch_size",
    "ExperimentLog": "labsupport.diagnose.experiments",
    "audit": "labsupport.diagnose.audit",
    "explain_oom": "labsupport.diagnose.out_of_memory",
    "plot": "labsupport.show.plots",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'labsupport' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
