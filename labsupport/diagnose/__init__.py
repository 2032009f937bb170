"""What is wrong with this run: the log of experiments that knows what changed, and why memory ran out."""

from labsupport.diagnose.experiments import ExperimentLog
from labsupport.diagnose.out_of_memory import OutOfMemoryReport, explain_oom
from labsupport.diagnose.runs import NOT_SET, Run

__all__ = ["NOT_SET", "ExperimentLog", "OutOfMemoryReport", "Run", "explain_oom"]
