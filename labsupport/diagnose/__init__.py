"""What is wrong with this run: the log of experiments that knows what changed."""

from labsupport.diagnose.experiments import ExperimentLog
from labsupport.diagnose.runs import NOT_SET, Run

__all__ = ["NOT_SET", "ExperimentLog", "Run"]
