"""The Ray engine: manifest, decoding and rows without Ray; whole jobs with Ray in the slow tier."""

import importlib.util
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from saccade.data.open.inputs import Inputs
from saccade.inference.batch import BatchError, predict_batch
from saccade.inference.ray_engine import (
    _decode_batches,
    _PredictRows,
    count_committed,
    pack_batch,
    unpack_batch,
    write_manifest,
)
from saccade.inference.rows import RowPredictor, make_reader
from saccade.tasks.load import card_of
from saccade.tasks.predict import PredictOptions, Sample
from tests.inference.test_batch import COUNT, make_classifier, table, write_images

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs saccade[scale]")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


def test_manifest_has_one_row_per_image_and_is_written_once(images, tmp_path):
    folder = tmp_path / "_manifest"
    write_manifest(Inputs(images), folder, 8)
    assert sorted(file.name for file in folder.iterdir()) == [f"part-{i:08d}.parquet" for i in range(3)]
    manifest = pq.read_table(folder)
    assert str(manifest.schema.field("id").type) == "int64"
    assert manifest["id"].to_pylist() == list(range(COUNT))
    assert manifest["path"][0].as_py() == os.fsencode(images / "000.png")
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    write_manifest(Inputs(images), folder, 8)
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_packed_samples_survive_the_way_to_an_actor(images):
    reader = make_reader(card_of(make_classifier()), PredictOptions())
    items = list(Inputs(images))[:5]
    samples = [reader.read(item) for item in items]
    unpacked = unpack_batch(pack_batch(zip(items, samples, strict=True)))
    assert [sample.source.id for sample in unpacked] == list(range(5))
    assert unpacked[3].error == samples[3].error  # the damaged file
    for before, after in zip(samples, unpacked, strict=True):
        if isinstance(before, Sample):
            assert torch.equal(before.pixels, after.pixels)
            assert before.size == after.size


def test_rows_equal_those_of_the_local_engine(images, tmp_path):
    """Decoding and prediction as the tasks and actors run them, on blocks whose rows are not in order."""
    model, options = make_classifier(), PredictOptions()
    predict_batch(model, images, tmp_path / "local", batch_size=4, part_rows=8)
    write_manifest(Inputs(images), tmp_path / "_manifest", 8)
    actor = _PredictRows.__new__(_PredictRows)
    actor.predictor = RowPredictor(model, "classify", options)
    manifest = pq.read_table(tmp_path / "_manifest")
    blocks = [manifest.slice(8), manifest.slice(0, 8).take(list(reversed(range(8))))]
    rows = [
        row
        for block in blocks
        for batch in _decode_batches(block, card_of(model), options, 4, None)
        for row in actor(batch).to_pylist()
    ]
    assert sorted(rows, key=lambda row: row["id"]) == table(tmp_path / "local").to_pylist()


def test_flags_of_the_other_engine_are_refused(images, tmp_path):
    model = make_classifier()
    with pytest.raises(ValueError, match="workers applies to engine local, not to ray"):
        predict_batch(model, images, tmp_path, engine="ray", workers=2)
    with pytest.raises(ValueError, match="actors applies to engine ray, not to local"):
        predict_batch(model, images, tmp_path, actors=2)
    with pytest.raises(ValueError, match="expected engine local or ray, got spark"):
        predict_batch(model, images, tmp_path, engine="spark")
    with pytest.raises(ValueError, match="expected part_rows of at least 1, got 0"):
        predict_batch(model, images, tmp_path, part_rows=0)


RUN = """
import sys
from saccade.inference.batch import predict_batch
from tests.inference.test_batch import make_classifier
print(predict_batch(make_classifier(), sys.argv[1], sys.argv[2], engine="ray", batch_size=4, part_rows=8).predicted)
"""


def start(images, out):
    command = [sys.executable, "-c", RUN, str(images), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@needs_ray
@pytest.mark.slow
def test_ray_job_has_the_rows_of_the_local_engine_and_is_done_once(images, tmp_path):
    model = make_classifier()
    predict_batch(model, images, tmp_path / "local", batch_size=4, part_rows=8)
    out = tmp_path / "ray"
    first = start(images, out).communicate()
    assert first[0].strip() == str(COUNT), first[1]
    rows, local = table(out).sort_by("id"), table(tmp_path / "local")
    scores = ["probability", "probabilities"]  # the last bit depends on the other images of a batch
    assert rows.drop_columns(scores).equals(local.drop_columns(scores))
    for name in scores:
        ours, theirs = (np.array(list(filter(None, part[name].to_pylist()))) for part in (rows, local))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert count_committed(out) == COUNT
    files = {file: file.stat().st_mtime_ns for file in (out / "rows").iterdir()}
    summary = predict_batch(model, images, out, engine="ray", batch_size=4)  # Ray is not started
    assert (summary.rows, summary.errors, summary.predicted) == (COUNT, 3, 0)
    assert {file: file.stat().st_mtime_ns for file in (out / "rows").iterdir()} == files
    with pytest.raises(BatchError, match="engine changed"):
        predict_batch(model, images, out, batch_size=4)
    with pytest.raises(BatchError, match="options changed"):
        predict_batch(model, images, out, engine="ray", top=2)


@needs_ray
@pytest.mark.slow
def test_killed_ray_driver_continues_without_losing_or_repeating_rows(images, tmp_path):
    """Killed as soon as the first file is complete; `benchmarks/batch_kills.py` kills at random moments."""
    out = tmp_path / "ray"
    process = start(images, out)
    while process.poll() is None and not count_committed(out):
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    process.send_signal(signal.SIGKILL)
    process.communicate()
    output, errors = start(images, out).communicate()
    assert output.strip().isdigit(), errors
    rows = table(out)
    assert sorted(rows["id"].to_pylist()) == list(range(COUNT))
