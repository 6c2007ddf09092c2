"""Measure parameters, multiply-adds, time and memory of models."""

from saccade.benchmark.cost import Cost, count
from saccade.benchmark.machine import Ceiling, describe_machine, measure_ceiling
from saccade.benchmark.plot import plot_accuracy, plot_scaling, plot_trade_offs, published_accuracy
from saccade.benchmark.timing import DTYPES, Case, Measurement, interleave, loader_throughput, measure

__all__ = [
    "DTYPES",
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
    "plot_accuracy",
    "plot_scaling",
    "plot_trade_offs",
    "published_accuracy",
]
