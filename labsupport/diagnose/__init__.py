"""What is wrong with this run: the log of experiments that knows what changed, why memory ran out, faults of a step."""

from labsupport.diagnose.audit import AuditReport, Finding, audit
from labsupport.diagnose.experiments import ExperimentLog
from labsupport.diagnose.out_of_memory import OutOfMemoryReport, explain_oom
from labsupport.diagnose.runs import NOT_SET, Run

__all__ = [
    "NOT_SET",
    "AuditReport",
    "ExperimentLog",
    "Finding",
    "OutOfMemoryReport",
    "Run",
    "audit",
    "explain_oom",
]
