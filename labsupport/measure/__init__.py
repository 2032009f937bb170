"""Measuring: time, memory, and what the machine can do at best."""

from labsupport.measure.roofline import Ceiling, Ceilings, measure_ceilings
from labsupport.measure.timing import PairedRatio, median_interval

__all__ = ["Ceiling", "Ceilings", "PairedRatio", "measure_ceilings", "median_interval"]
