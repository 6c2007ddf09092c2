"""Throughput of batch prediction: the same number of images in the loop and in the files."""

import json

from saccade.benchmark.batch import BatchThroughput, measure_batch
from saccade.cli import main


def test_measure_batch_predicts_every_file_of_every_round():
    messages: list[str] = []
    result = measure_batch("vt_nano", 32, 2, rounds=2, seconds=0, progress=messages.append)
    assert result.images == 16
    assert len(result.rounds) == 2
    assert min(result.loop, result.predict) > 0
    assert messages[-1] == "timing vt_nano, round 2 of 2"


def test_ratio_is_the_median_of_the_rounds():
    result = BatchThroughput("m", 32, 2, 16, 10.0, 8.0, [(10.0, 9.0), (100.0, 95.0), (10.0, 1.0)])
    assert result.ratio == 0.9
    assert result.to_dict()["ratio"] == 0.9


def test_bench_reports_the_mode_and_refuses_what_does_not_apply(capsys):
    flags = ["--mode", "batch", "--sizes", "32", "--batch", "1", "--rounds", "1", "--seconds", "0"]
    assert main(["bench", "vt_nano", *flags, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["mode"], row["model"], row["images"]) == ("batch", "vt_nano", 8)
    for extra, message in (
        (["--run", "compiled"], "--run does not apply to --mode batch"),
        (["--mode", "batch", "train"], "--mode does not apply to --mode batch"),
    ):
        assert main(["bench", "vt_nano", *flags, *extra]) == 2
        assert message in capsys.readouterr().err
    assert main(["bench", "resnet18", *flags]) == 2
    assert "expected saccade's models" in capsys.readouterr().err
