"""Measure parameters, multiply-adds, time and memory of models."""

from saccade.benchmark.cost import Cost, count
from saccade.benchmark.machine import Ceiling, describe_machine, measure_ceiling
from saccade.benchmark.timing import Case, Measurement, interleave, loader_throughput, measure

__all__ = [
    "Case",
    "Ceiling",
    "Cost",
    "Measurement",
    "count",
    "describe_machine",
    "interleave",
    "loader_throughput",
    "measure",
    "measure_ceiling",
]
