"""Measuring: time, memory, and what the machine can do at best."""

from labsupport.measure.comparison import Comparison, compare_apart
from labsupport.measure.measurement import Measurement
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
    "PairedRatio",
    "Stalls",
    "compare",
    "compare_apart",
    "find_stalls",
    "find_warmup",
    "measure",
    "measure_ceilings",
    "median_interval",
    "throughput",
]
