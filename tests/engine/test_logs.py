"""metrics.csv and the status line."""

from types import SimpleNamespace

import pytest
import torch

from saccade.engine.clock import WARMUP_STEPS, Clock
from saccade.engine.logs import format_duration, read_rows, status
from saccade.engine.train import train
from tests.engine.runs import recipe, rows


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


def test_status_has_epoch_loss_and_time_left_from_the_first_step():
    module = SimpleNamespace(clock=Clock(100, now=0.0), recipe=SimpleNamespace(batch_size=32, epochs=10), epoch=0.1,
                             monitor="top1", validation={}, last_loss=torch.tensor(2.5))  # fmt: skip
    module.clock.tick(3.5)  # starting the loader takes 3 s
    assert status(module) == {"epoch": "0.10/10", "loss": "2.500"}
    module.clock.tick(4.0)
    assert status(module)["left"] == "00:00:49"
    for step in range(3, WARMUP_STEPS + 11):
        module.clock.tick(3.0 + 0.5 * step)
    module.validation = {"loss": 1.25, "top1": 60.0}
    texts = status(module)
    assert (texts["images/s"], texts["left"]) == ("64", "00:00:40")
    assert (texts["val loss"], texts["top-1"]) == ("1.250", "60.00 %")


def test_duration_counts_days():
    assert format_duration(2 * 86400 + 3661) == "2 d 01:01:01"


def test_progress_prints_one_line_per_validation_without_terminal(tmp_path, capsys):
    train(recipe("epochs=2"), tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert [line[:5] for line in lines if "val loss" in line] == ["50 % ", "100 %"]
    assert "epoch 1.00/2 · loss " in "".join(lines)
