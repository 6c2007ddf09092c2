"""metrics.csv and the status line."""

from types import SimpleNamespace

import pytest

from saccade.engine.clock import WARMUP_STEPS, Clock
from saccade.engine.logs import format_status, read_rows
from tests.engine.runs import rows


@pytest.mark.shows("VT-61", "X-05")
def test_training_and_validation_metrics_are_logged(finished):
    logged = rows(finished.out)
    assert [int(row["step"]) for row in logged if row["train_top1"]] == [1, 2, 3, 4, 5, 6]
    assert [int(row["step"]) for row in logged if row["val_top1"]] == [3, 6]
    assert all(row["lr"] for row in logged if row["train_loss"])


def test_truncated_last_row_is_dropped(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,lr,val_top1\n1,0.5,\n2,0.25,40.0\n3,0.1e")
    assert read_rows(tmp_path / "metrics.csv") == [{"step": 1, "lr": 0.5}, {"step": 2, "lr": 0.25, "val_top1": 40.0}]
    assert read_rows(tmp_path / "missing.csv") == []


def test_status_line():
    clock = Clock(100, now=0.0)
    for step in range(1, WARMUP_STEPS + 11):
        clock.tick(0.5 * step)
    recipe = SimpleNamespace(batch_size=32)
    module = SimpleNamespace(clock=clock, recipe=recipe, monitor="top1", validation={"loss": 1.25, "top1": 60.0})
    assert format_status(module) == "64 images/s · 00:00:40 left · val loss 1.250 · top-1 60.00 %"
