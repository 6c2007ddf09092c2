"""metrics.csv and the status line."""

from types import SimpleNamespace

import pytest
import torch

from saccade.engine.clock import WARMUP_STEPS, Clock
from saccade.engine.logs import check_logger, make_logger, read_rows, status
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
    assert status(module)["left"] == "0:00:49"
    for step in range(3, WARMUP_STEPS + 11):
        module.clock.tick(3.0 + 0.5 * step)
    module.validation = {"loss": 1.25, "top1": 60.0}
    texts = status(module)
    assert (texts["images/s"], texts["left"]) == ("64", "0:00:40")
    assert (texts["val loss"], texts["top-1"]) == ("1.250", "60.00 %")


def test_progress_prints_one_line_per_validation_without_terminal(tmp_path, capsys):
    train(recipe("epochs=2"), tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert [line[:5] for line in lines if "val loss" in line] == ["50 % ", "100 %"]
    assert "epoch 1.00/2 · loss " in "".join(lines)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_logger_without_its_package_is_refused_before_training(name, tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.engine.logs.find_spec", lambda package: None)
    with pytest.raises(ImportError, match=rf"trainer\.logger={name} needs {name}, which is not installed\. Run pip"):
        train(recipe(f"trainer.logger={name}"), tmp_path, progress=False)
    assert not any(tmp_path.iterdir())
    assert make_logger("auto", tmp_path, 0) is None


def test_csv_needs_no_package(monkeypatch, tmp_path):
    monkeypatch.setattr("saccade.engine.logs.find_spec", lambda package: None)
    for name in ("csv", "auto"):
        check_logger(name)
    assert make_logger("csv", tmp_path, 0) is None


class FakeLogger:
    """Replaces Lightning's W&B and MLflow loggers, whose packages are not in the dev extra."""

    def __init__(self, *args, **kwargs):
        self.arguments, self.rows, self.status = (args, kwargs), [], ""

    def log_metrics(self, values, step):
        self.rows.append((step, values))

    def save(self):
        pass

    def finalize(self, status):
        self.status = status


@pytest.mark.parametrize(("name", "kind"), [("wandb", "WandbLogger"), ("mlflow", "MLFlowLogger")])
def test_lightning_logger_receives_every_row(name, kind, tmp_path, monkeypatch):
    created = []
    monkeypatch.setattr("saccade.engine.logs.find_spec", lambda package: True)
    monkeypatch.setattr(
        f"saccade.engine.logs.loggers.{kind}", lambda *a, **k: created.append(FakeLogger(*a, **k)) or created[-1]
    )
    train(recipe(f"trainer.logger={name}", "epochs=1"), tmp_path / "run", progress=False)
    (logger,) = created
    assert [step for step, _ in logger.rows] == [int(row["step"]) for row in rows(tmp_path / "run")] == [1, 2, 3, 3]
    assert "train_loss" in logger.rows[0][1]
    assert "val_top1" in logger.rows[-1][1]
    assert logger.status == "success"
    assert "run" in logger.arguments[0], "the name of the run's folder"
