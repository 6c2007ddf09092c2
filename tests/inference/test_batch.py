"""Batch prediction: rows of every task, bad files as rows, and runs that are killed and continued."""

import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import saccade
from saccade.data.decode.image import read_mask_values
from saccade.inference.batch import BatchError, predict_batch, weights_hash
from saccade.tasks.predict import predict

COUNT = 23


def write_images(folder, count=COUNT):
    """Noise of different sizes; every seventh file is damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        pixels = rng.integers(0, 255, (40 + i, 48, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        (folder / f"{i:03d}.png").write_bytes(buffer.getvalue()[:50] if i % 7 == 3 else buffer.getvalue())
    return folder


def make_classifier():
    torch.manual_seed(0)
    return saccade.create_model("svit_nano", num_classes=7).eval()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def classifier():
    return make_classifier()


def table(out):
    return pq.read_table(out)  # _job.json and _summary.json are ignored


def test_rows_equal_predictions_and_errors_have_reasons(images, classifier, tmp_path):
    summary = predict_batch(classifier, images, tmp_path, batch_size=4, part_rows=8)
    assert (summary.rows, summary.errors, summary.predicted) == (COUNT, 3, COUNT)
    rows = table(tmp_path).to_pylist()
    assert [row["id"] for row in rows] == list(range(COUNT))
    assert [row["name"] for row in rows] == [str(images / f"{i:03d}.png") for i in range(COUNT)]
    assert sorted(path.name for path in tmp_path.glob("part*")) == [f"part-{i:08d}.parquet" for i in range(3)]
    bad = [row for row in rows if row["error"] is not None]
    assert [row["id"] for row in bad] == [3, 10, 17]
    assert all("003.png: " in row["error"] and row["label"] is None for row in bad[:1])
    expected = {result.name: result for result in predict(classifier, images, batch_size=4)}
    for row in rows:
        if row["error"] is None:
            result = expected[os.path.basename(row["name"])]
            assert row["label"] == result.label
            assert row["probability"] == pytest.approx(result.probability, rel=1e-4)
            assert row["classes"] == [entry.index for entry in result.classes]
    assert json.loads((tmp_path / "_summary.json").read_text())["errors"] == 3


def test_content_does_not_depend_on_workers(images, classifier, tmp_path):
    for workers in (1, 5):
        predict_batch(classifier, images, tmp_path / str(workers), batch_size=4, part_rows=8, workers=workers)
    assert table(tmp_path / "1").equals(table(tmp_path / "5"))


def test_embeddings_are_the_features_before_the_classifier(images, classifier, tmp_path):
    predict_batch(classifier, images, tmp_path, task="embed")
    rows = table(tmp_path).to_pylist()
    (result,) = predict(classifier, images / "000.png", embed=True)
    np.testing.assert_allclose(rows[0]["embedding"], result.embedding, rtol=1e-3, atol=1e-4)
    assert rows[3]["embedding"] is None


def test_masks_are_palette_images_of_classes(tmp_path, images):
    torch.manual_seed(0)
    model = saccade.create_segmenter("svit_nano", "fpn", num_classes=4).eval()
    files = [images / "000.png", images / "003.png"]
    predict_batch(model, files, tmp_path)
    first, second = table(tmp_path).to_pylist()
    (result,) = predict(model, files[0])
    np.testing.assert_array_equal(read_mask_values(first["mask"], "mask"), result.labels)
    assert (first["width"], first["height"]) == (48, 40)
    assert (second["mask"], "003.png" in second["error"]) == (None, True)


def test_detections_have_boxes_labels_and_masks(tmp_path, images):
    torch.manual_seed(0)
    options = {"min_size": 64, "max_size": 96, "width": 16, "box_score_thresh": 0.0, "box_detections_per_img": 5}
    model = saccade.create_detector("svit_nano", "mask_rcnn", 3, **options).eval()
    predict_batch(model, [images / "000.png"], tmp_path, threshold=0.0)
    (row,) = table(tmp_path).to_pylist()
    (result,) = predict(model, images / "000.png", threshold=0.0)
    assert len(row["boxes"]) == len(result) == 5
    np.testing.assert_allclose(row["boxes"], result.boxes.numpy(), rtol=1e-4, atol=1e-3)
    assert row["labels"] == [str(label) for label in row["classes"]]
    assert len(row["masks"]) == 5


def test_finished_job_predicts_nothing_again(images, classifier, tmp_path):
    predict_batch(classifier, images, tmp_path, part_rows=8)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("part*")}
    summary = predict_batch(classifier, images, tmp_path)
    assert (summary.rows, summary.errors, summary.predicted) == (COUNT, 3, 0)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("part*")} == before


def test_other_jobs_in_the_folder_are_refused(images, classifier, tmp_path):
    out = tmp_path / "out"
    predict_batch(classifier, images, out, part_rows=8)
    with pytest.raises(BatchError, match="holds another job: options changed"):
        predict_batch(classifier, images, out, top=3)
    with pytest.raises(BatchError, match="holds another job: task changed"):
        predict_batch(classifier, images, out, task="embed")
    with pytest.raises(BatchError, match="holds another job: source changed"):
        predict_batch(classifier, [images / "000.png"], out)
    other = make_classifier()
    next(other.parameters()).data[0] += 1
    with pytest.raises(BatchError, match="holds another job: weights changed"):
        predict_batch(other, images, out)
    (out / "_job.json").unlink()
    with pytest.raises(BatchError, match=r"expected _job\.json beside"):
        predict_batch(classifier, images, out)


def test_wrong_tasks_and_empty_sources_are_refused(images, classifier, tmp_path):
    with pytest.raises(ValueError, match="expected task classify or embed for classification, got detect"):
        predict_batch(classifier, images, tmp_path, task="detect")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"expected images at .*empty, got none"):
        predict_batch(classifier, tmp_path / "empty", tmp_path / "out")


def test_folder_in_use_is_refused(images, classifier, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BatchError, match="is being written by another process"):
            predict_batch(classifier, images, tmp_path)


def test_image_that_the_model_refuses_is_an_error_row(images, classifier, tmp_path, monkeypatch):
    forward = classifier.forward

    def refuse(pixels):
        if (pixels[:, 0] > 2.2).flatten(1).all(1).any():
            raise RuntimeError("a white\nimage")
        return forward(pixels)

    monkeypatch.setattr(classifier, "forward", refuse)
    Image.new("RGB", (64, 64), "white").save(tmp_path / "white.png")
    predict_batch(classifier, [images / "000.png", tmp_path / "white.png", images / "001.png"], tmp_path / "out")
    errors = table(tmp_path / "out").column("error").to_pylist()
    assert errors == [None, f"{tmp_path}/white.png: a white image", None]


KILLED = """
import os, signal, sys
import pyarrow.parquet as pq
import torch
from saccade.inference.batch import predict_batch
from tests.inference.test_batch import make_classifier
torch.set_num_threads(1)
images, out, where, moment = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
def die():
    os.kill(os.getpid(), signal.SIGKILL)
write, calls = pq.write_table, []
def write_and_die(*args, **options):
    write(*args, **options)
    calls.append(1)
    if where == "write" and len(calls) == moment:
        die()
pq.write_table = write_and_die
def progress(done, total):
    if where == "row" and done == moment:
        die()
predict_batch(make_classifier(), images, out, batch_size=4, part_rows=8, on_progress=progress)
"""


def kill_at(images, out, where, moment):
    command = [sys.executable, "-c", KILLED, str(images), str(out), where, str(moment)]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def test_killed_run_continues_without_losing_or_repeating_rows(images, classifier, tmp_path):
    predict_batch(classifier, images, tmp_path / "whole", batch_size=4, part_rows=8)
    out = tmp_path / "killed"
    kill_at(images, out, "write", 2)  # before the second part is complete
    assert [path.name for path in out.glob("part*")] == ["part-00000000.parquet"]
    assert len(list(out.glob(".*.parquet"))) == 1
    summary = predict_batch(classifier, images, out, batch_size=4)
    assert (summary.rows, summary.predicted, summary.errors) == (COUNT, COUNT - 8, 3)
    assert not list(out.glob(".*.parquet"))
    assert table(out).equals(table(tmp_path / "whole"))


@pytest.mark.slow
def test_twenty_kills_at_random_moments(images, classifier, tmp_path):
    predict_batch(classifier, images, tmp_path / "whole", batch_size=4, part_rows=8)
    rng = np.random.default_rng(0)
    for number in range(20):
        out = tmp_path / str(number)
        where = "row" if rng.random() < 0.7 else "write"
        kill_at(images, out, where, int(rng.integers(1, COUNT + 1 if where == "row" else 4)))
        predict_batch(classifier, images, out, batch_size=4)
        assert table(out).equals(table(tmp_path / "whole"))


def test_weights_hash_depends_on_every_value():
    model = torch.nn.Linear(3, 2)
    before = weights_hash(model)
    assert weights_hash(model) == before
    model.bias.data[1] += 1e-3
    assert weights_hash(model) != before


def test_progress_bar_runs(images, classifier, tmp_path, capsys):
    predict_batch(classifier, images, tmp_path, progress=True)
    assert "23/23" in capsys.readouterr().err
