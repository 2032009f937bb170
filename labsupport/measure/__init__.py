"""Measuring: time, memory, and what the machine can do at best."""

from labsupport.measure.budget import is_out_of_memory, memory_budget
from labsupport.measure.comparison import Comparison, compare_apart
from labsupport.measure.measurement import Measurement
from labsupport.measure.memory import MemoryLedger, cuda_memory, graph_nodes
from labsupport.measure.roofline import Ceiling, Ceilings, measure_ceilings
from labsupport.measure.state import KeptState
from labsupport.measure.statistics import PairedRatio, Stalls, find_stalls, find_warmup, median_interval, throughput
from labsupport.measure.timing import compare, measure

__all__ = [
    "Ceiling",
    "Ceilings",
    "Comparison",
    "KeptState",
    "Measurement",
    "MemoryLedger",
    "PairedRatio",
    "Stalls",
    "compare",
    "compare_apart",
    "cuda_memory",
    "find_stalls",
    "find_warmup",
    "graph_nodes",
    "is_out_of_memory",
    "measure",
    "measure_ceilings",
    "median_interval",
    "memory_budget",
    "throughput",
]
