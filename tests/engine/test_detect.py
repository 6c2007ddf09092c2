"""Detection in the loop: a small run from recipe to result files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import saccade
from saccade.data.object_loader import ObjectEvalLoader
from saccade.data.objects import SceneObjects
from saccade.data.source import DataError
from saccade.engine.evaluate_objects import evaluate_detector, evaluate_detector_checkpoint, metric_for, share_found
from saccade.engine.recipe import Recipe, RecipeError, load_recipe
from saccade.engine.train import assemble, train
from saccade.tasks.open import open_task_model
from tests.data.coco_files import write
from tests.engine.runs import rows

TINY = "model.kwargs={dims: [8, 16, 16, 16], depths: [1, 1, 1, 1], heads: [1, 1, 1, 1]}"
REGIONS = (
    "model.head_kwargs={width: 16, norm: group, min_size: 48, max_size: 96, anchor_sizes: [8, 16, 32, 64, 96], "
    "rpn_post_nms_top_n_train: 20, rpn_post_nms_top_n_test: 20, box_batch_size_per_image: 16, box_score_thresh: 0.0}"
)
SMALL = ["task=detection", "model.head=mask_rcnn", "data.path=scenes", "data.scenes=16", "data.image_size=48",
         "data.workers=0", "batch_size=4", "epochs=2", "augment.crop=none", "trainer.log_every=1",
         "trainer.accelerator=cpu", "optimizer.clip_grad=5.0", "trainer.deterministic=false"]  # fmt: skip


def recipe(*changes: str) -> Recipe:
    return load_recipe(None, [TINY, REGIONS, *SMALL, *changes])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    return train(recipe(), out, progress=False)


def test_a_run_leaves_weights_figures_results_and_a_page(run):
    result = json.loads((run.out / "result.json").read_text())
    assert result["model"] == "svit_nano+mask_rcnn"
    assert (result["task"], result["score"], result["classes"]) == ("detection", "box_ap", 10)
    assert {"box_ap", "box_ap50", "mask_ap", "box_ar"} <= result["final"].keys()
    log = rows(run.out)
    losses = [float(row["train_loss"]) for row in log if row["train_loss"]]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert [row["val_box_ap"] for row in log if row["val_box_ap"]]
    page = (run.out / "report.html").read_text()
    assert page.count("<figure>") == 24  # six worst, six best, each with its truth
    assert "Box AP of each class" in page


def test_the_result_files_are_worth_what_the_run_says(run, tmp_path):
    """pycocotools by hand on what was written."""
    source = SceneObjects(10, 48, "val")
    (tmp_path / "truth.json").write_text(json.dumps(source.ground_truth()))
    for prefix, kind in (("box", "bbox"), ("mask", "segm")):
        file = run.out / f"detections.{kind}.json"
        coco = COCO(str(tmp_path / "truth.json"))
        assert json.loads(file.read_text())
        judge = COCOeval(coco, coco.loadRes(str(file)), kind)
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
        assert run.result["final"][f"{prefix}_ap"] == pytest.approx(100 * judge.stats[0], abs=1e-4)
        assert run.result["final"][f"{prefix}_ap50"] == pytest.approx(100 * judge.stats[1], abs=1e-4)


def test_a_file_opens_as_the_detector_it_was(run):
    model, card = open_task_model(run.out / "last.safetensors")
    assert (card.task, card.head, card.name) == ("detection", "mask_rcnn", "svit_nano")
    assert card.classes == SceneObjects.classes
    assert model.transform.min_size == (48,)
    images = [torch.rand(3, 48, 60, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        for mine, theirs in zip(model(images), run.model.cpu().eval()(images), strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_detector_starts_another_with_other_classes(run):
    model = saccade.create_detector(
        "svit_nano",
        "mask_rcnn",
        3,
        checkpoint=run.out / "last.safetensors",
        backbone_kwargs=recipe().model.kwargs,
        **recipe().model.head_kwargs,
    )
    ours, theirs = model.state_dict(), run.model.state_dict()
    same = {
        name for name in ours if ours[name].shape == theirs[name].shape and torch.equal(ours[name], theirs[name].cpu())
    }
    assert {name.split(".")[-2] for name in set(ours) - same} == {"cls_score", "bbox_pred", "mask_fcn_logits"}


def test_the_same_seed_gives_the_same_run_and_a_stopped_one_continues(tmp_path):
    """Two epochs in one go, and one epoch, a stop and another."""
    changes = ["trainer.save_every=4", "data.scenes=8", "regularize.drop_path=0.2", "ema.decay=0.9"]
    whole = train(recipe(*changes), tmp_path / "whole", progress=False)

    class Halt(Exception):
        pass

    from saccade.engine import callbacks

    save = callbacks.Keeper.save

    def halting(self, trainer, module):
        save(self, trainer, module)
        if module.clock.steps == 2:
            raise Halt

    callbacks.Keeper.save = halting
    try:
        with pytest.raises(Halt):
            train(recipe(*changes), tmp_path / "parts", progress=False)
    finally:
        callbacks.Keeper.save = save
    parts = train(recipe(*changes), tmp_path / "parts", resume=True, progress=False)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, parts.model.state_dict()[name]), name


@pytest.mark.slow
def test_two_processes_measure_together_and_one_of_them_writes_the_results(tmp_path):
    """What both found in validation is what the first one, alone, finds in the end."""
    words = [TINY, REGIONS, *SMALL, "epochs=1", "data.scenes=8", "trainer.devices=2", "trainer.strategy=ddp"]
    command = [sys.executable, "-m", "saccade.cli", "train", "--model", "svit_nano", "--out", str(tmp_path), "--quiet"]
    command += [word for change in words for word in ("--set", change)]
    own = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    final = json.loads((tmp_path / "result.json").read_text())["final"]
    (row,) = [row for row in rows(tmp_path) if row["val_box_ap"]]
    assert final["count"] == 10
    for name in ("box_ap", "box_ap50", "mask_ap"):
        assert float(row[f"val_{name}"]) == pytest.approx(final[name], abs=0.01)
    ids = {entry["image_id"] for entry in json.loads((tmp_path / "detections.bbox.json").read_text())}
    assert ids == set(range(1, 11))


def test_the_sparse_detector_in_the_loop(tmp_path):
    changes = ["model.name=sparseformer_nano", "model.kwargs={}", "model.head=sparse", "epochs=1", "data.scenes=8"]
    options = "model.head_kwargs={num_tokens: 16, detect_tokens: 9, min_size: 48, max_size: 96}"
    done = train(recipe(*changes, options), tmp_path, progress=False)
    assert "mask_ap" not in done.result["final"]
    assert (tmp_path / "detections.bbox.json").is_file()
    assert not (tmp_path / "detections.segm.json").exists()
    assert not [row for row in rows(tmp_path) if row["val_mask_ap"]]


def test_boxes_without_masks_train_a_detector_without_a_mask_head(tmp_path):
    def change(found):
        for note in found["annotations"]:
            del note["segmentation"]

    write(tmp_path, change)
    made = assemble(recipe(f"data.path={tmp_path}", "data.val_fraction=0.34"))
    assert not made.model.roi_heads.has_mask()
    assert made.card.head_kwargs["masks"] is False
    assert made.sources.classes == ["cat", "dog", "bird"]


def test_a_detector_is_measured_on_a_set_of_its_own_classes_only(run, tmp_path):
    path = write(tmp_path)
    with pytest.raises(DataError, match="categories the training set has not"):
        evaluate_detector_checkpoint(run.out, path)


@pytest.mark.parametrize(("head", "lacking"), [("mask_rcnn", "pycocotools"), ("sparse", "scipy")])
def test_what_is_not_installed_is_told_before_the_first_update(monkeypatch, head, lacking):
    for name in [name for name in sys.modules if name.partition(".")[0] == lacking] + [lacking]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"{lacking} is not installed. Run pip install 'saccade\[train\]'"):
        assemble(recipe(f"model.head={head}"))


def test_a_set_without_objects_is_worth_nothing_and_no_exception():
    class Empty(SceneObjects):
        def objects(self, index, size=None):
            return super().objects(index).take(np.array([], int))

    source, model = Empty(2, 48, "val"), assemble(recipe()).model
    found = evaluate_detector(model, ObjectEvalLoader(source, 2, 0), source, metric_for(model, source, 100))
    assert found.figures == {"box_ap": 0.0}
    assert found.per_class == [None] * 10


def test_a_recipe_for_detection_needs_a_head():
    with pytest.raises(RecipeError, match=r"needs model\.head"):
        load_recipe(None, ["task=detection"])


def test_how_much_of_a_picture_was_found():
    true = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]])
    assert share_found(true, true) == 1.0
    assert share_found(true[:1], true) == 0.5
    assert share_found(torch.cat([true, true + 50]), true) == 0.5  # two found, two wrong
    assert share_found(true[:0], true) == 0.0
    assert share_found(true[:0], true[:0]) == 1.0
    assert share_found(true, true[:0]) == 0.0
