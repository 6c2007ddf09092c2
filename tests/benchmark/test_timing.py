"""Interleaved measurements: order, medians, conditions, errors."""

from itertools import count as count_from
from types import SimpleNamespace

import pytest
import torch
from timm.models import create_model

from saccade.benchmark import Case, Ceiling, Measurement, count, interleave, measure, measure_ceiling, timing
from saccade.benchmark.machine import PeakMemory, best_time
from saccade.benchmark.timing import loader_throughput, prepare


def test_steps_are_interleaved():
    calls: list[str] = []
    rounds = list(interleave([lambda: calls.append("a"), lambda: calls.append("b")], ["cpu", "cpu"], 3, 0))
    assert "".join(calls) == "ab" * 4  # one pass to find the number of repeats, then the rounds
    assert [len(times) for times in rounds] == [2, 2, 2]


@pytest.mark.shows("SF-55", "SVIT-46", "X-05")
def test_measurement_reports_median_spread_and_throughput():
    result = Measurement(Case("svit_nano", batch=4), 10, 10**9, [1.0, 2.0, 3.0, 4.0, 9.0], None, ceiling_tflops=1.0)
    assert result.median == 3
    assert result.images_per_second == pytest.approx(4 / 3)
    assert result.tflops == pytest.approx(2 * 4 / 3 * 1e-3)
    assert result.spread == pytest.approx((6.5 - 1.5) / 2 / 3)
    assert result.to_dict()["fraction_of_ceiling"] == pytest.approx(result.tflops)
    short = Measurement(Case("svit_nano"), 10, 10, [1.0, 3.0], None)
    assert short.spread == pytest.approx(0.5)
    assert short.to_dict()["fraction_of_ceiling"] is None


def test_training_counts_three_passes():
    forward, training = (Measurement(Case("m", mode=mode), 1, 10**6, [1.0], None) for mode in ("inference", "train"))
    assert training.tflops == pytest.approx(3 * forward.tflops)


def test_measure_runs_every_case():
    cases = [Case("svit_nano", 32, 2, mode, channels_last=last) for mode in ("inference", "train") for last in (0, 1)]
    messages: list[str] = []
    results = measure(cases, 2, 0, Ceiling(1.0, 1.0), messages.append)
    assert [result.case for result in results] == cases
    assert all(len(result.seconds) == 2 for result in results)
    assert messages.count("timing") == 2
    assert sum(message == "building svit_nano at 32 px" for message in messages) == 4


def test_inference_step_is_repeatable_and_parameter_bytes_are_reported():
    step, size = prepare(Case("vt_nano", 32, 2))
    assert torch.equal(step(), step())
    assert size == 4 * count("vt_nano", 32).params


def test_training_step_updates_the_weights(monkeypatch):
    models = []

    def create_and_store(*args, **kwargs):
        models.append(create_model(*args, **kwargs))
        return models[-1]

    monkeypatch.setattr(timing, "create_model", create_and_store)
    step, _ = prepare(Case("vt_nano", 32, 2, "train"))
    weight = next(models[0].parameters())
    before = weight.detach().clone()
    step()
    assert not torch.equal(weight, before)
    assert weight.grad is None  # gradients are released


def test_optimized_training_is_an_error():
    with pytest.raises(ValueError, match="optimised copies are inference-only, got mode train"):
        prepare(Case("svit_nano", 32, 1, "train", optimized=True))


def test_ceiling_is_positive_and_best_time_is_the_minimum():
    durations = iter([1, 1, 1])
    assert best_time(lambda: next(durations), "cpu", repeats=2) >= 0
    assert next(durations, None) is None  # one warm-up run and two repeats
    ceiling = measure_ceiling("cpu")
    assert ceiling.tflops > 0
    assert ceiling.gbytes > 0


def test_peak_memory_sees_a_temporary_allocation():
    with PeakMemory("cpu") as peak:
        torch.ones(16 * 2**20)  # 64 MiB
    assert peak.bytes is None or peak.bytes > 32 * 2**20


def test_loader_throughput_leaves_out_the_first_batch_and_stops_after_its_time(monkeypatch):
    """A clock that advances by a second per reading: batch 0 starts it, 1 and 2 are counted, 3 is never read."""
    clock = count_from(100)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    batches = iter([SimpleNamespace(labels=[0] * size) for size in (50, 3, 6, 7)])
    prepared = []
    assert loader_throughput(batches, prepared.append, seconds=1.5) == (3 + 6) / 3
    assert [len(batch.labels) for batch in prepared] == [50, 3, 6]
