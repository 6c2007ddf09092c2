"""Training of detectors: a short run from recipe to result files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from safetensors.torch import load_file

import saccade
from saccade.data.sources.base import DataError
from saccade.data.synthetic.scenes import SceneObjects
from saccade.engine.recipe import Data, Recipe, RecipeError, load_recipe
from saccade.engine.tasks.detect import detector_sizes
from saccade.engine.train import assemble, train
from saccade.tasks.load import card_of, load
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


def test_run_writes_metrics_and_report(run):
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
    assert page.count("<figure>") == 24  # six worst, six best, each with its ground truth
    assert "Box AP per class" in page


def test_pycocotools_confirms_result_files(run, tmp_path):
    """pycocotools run on the written files."""
    source = SceneObjects(10, 48, "val")
    (tmp_path / "truth.json").write_text(json.dumps(source.ground_truth()))
    for prefix, kind in (("box", "bbox"), ("mask", "segm")):
        file = run.out / f"detections.{kind}.json"
        coco = COCO(str(tmp_path / "truth.json"))
        assert json.loads(file.read_text())
        coco_eval = COCOeval(coco, coco.loadRes(str(file)), kind)
        coco_eval.evaluate()
        coco_eval.accumulate()
        coco_eval.summarize()
        assert run.result["final"][f"{prefix}_ap"] == pytest.approx(100 * coco_eval.stats[0], abs=1e-4)
        assert run.result["final"][f"{prefix}_ap50"] == pytest.approx(100 * coco_eval.stats[1], abs=1e-4)


def test_weights_file_opens_as_detector(run):
    model = load(run.out)
    card = card_of(model)
    assert (card.task, card.head, card.name) == ("detection", "mask_rcnn", "svit_nano")
    assert card.classes == SceneObjects.classes
    assert model.transform.min_size == (48,)
    images = [torch.rand(3, 48, 60, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        for mine, theirs in zip(model(images), run.model.cpu().eval()(images), strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_detector_initialises_another_with_other_classes(run):
    model = saccade.create_detector(
        "svit_nano",
        "mask_rcnn",
        3,
        checkpoint=run.weights,
        backbone_kwargs=recipe().model.kwargs,
        **recipe().model.head_kwargs,
    )
    ours, theirs = model.state_dict(), run.model.state_dict()
    same = {
        name for name in ours if ours[name].shape == theirs[name].shape and torch.equal(ours[name], theirs[name].cpu())
    }
    assert {name.split(".")[-2] for name in set(ours) - same} == {"cls_score", "bbox_pred", "mask_fcn_logits"}


def test_stopped_run_ends_with_same_weights(tmp_path):
    """Two epochs, and one epoch, a stop and another."""
    changes = ["trainer.save_every=4", "data.scenes=8", "regularize.drop_path=0.2", "ema.decay=0.9"]
    uninterrupted = train(recipe(*changes), tmp_path / "uninterrupted", progress=False)

    class Halt(Exception):
        pass

    from saccade.engine import checkpointing

    save = checkpointing.Checkpointer.save

    def halting(self, trainer, module):
        save(self, trainer, module)
        if module.clock.steps == 2:
            raise Halt

    checkpointing.Checkpointer.save = halting
    try:
        with pytest.raises(Halt):
            train(recipe(*changes), tmp_path / "parts", progress=False)
    finally:
        checkpointing.Checkpointer.save = save
    parts = train(recipe(*changes), tmp_path / "parts", resume=True, progress=False)
    ours, theirs = load_file(parts.out / "last.safetensors"), load_file(uninterrupted.out / "last.safetensors")
    for name, value in theirs.items():
        assert torch.equal(value, ours[name]), name


@pytest.mark.slow
def test_two_processes_gather_detections(tmp_path):
    """The validation over both processes equals the final evaluation on one."""
    words = [TINY, REGIONS, *SMALL, "epochs=1", "data.scenes=8", "trainer.devices=2", "trainer.strategy=ddp"]
    command = [sys.executable, "-m", "saccade.cli", "train", "--model", "svit_nano", "--out", str(tmp_path), "--quiet"]
    command += [word for change in words for word in ("--set", change)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    final = json.loads((tmp_path / "result.json").read_text())["final"]
    (row,) = [row for row in rows(tmp_path) if row["val_box_ap"]]
    assert final["count"] == 10
    for name in ("box_ap", "box_ap50", "mask_ap"):
        assert float(row[f"val_{name}"]) == pytest.approx(final[name], abs=0.01)
    ids = {entry["image_id"] for entry in json.loads((tmp_path / "detections.bbox.json").read_text())}
    assert ids == set(range(1, 11))


def test_sparse_detector_trains(tmp_path):
    changes = ["model.name=sparseformer_nano", "model.kwargs={}", "model.head=sparse", "epochs=1", "data.scenes=8"]
    options = "model.head_kwargs={num_tokens: 16, detect_tokens: 9, min_size: 48, max_size: 96}"
    done = train(recipe(*changes, options), tmp_path, progress=False)
    assert "mask_ap" not in done.result["final"]
    assert (tmp_path / "detections.bbox.json").is_file()
    assert not (tmp_path / "detections.segm.json").exists()
    assert not [row for row in rows(tmp_path) if row["val_mask_ap"]]


def test_data_without_masks_gives_no_mask_head(tmp_path):
    def change(result_value):
        for note in result_value["annotations"]:
            del note["segmentation"]

    write(tmp_path, change)
    built = assemble(recipe(f"data.path={tmp_path}", "data.val_fraction=0.34"))
    assert not built.model.roi_heads.has_mask()
    assert built.card.head_kwargs["masks"] is False
    assert built.sources.classes == ["cat", "dog", "bird"]


@pytest.mark.parametrize("crop", ["none", "resized"])
def test_backbone_sees_images_of_the_recipe_size(crop):
    options = "model.head_kwargs={width: 16, norm: group}"
    built = assemble(load_recipe(None, [TINY, options, *SMALL, "data.image_size=64", f"augment.crop={crop}"]))
    sizes = set()
    built.model.backbone.register_forward_pre_hook(lambda _, inputs: sizes.add(tuple(inputs[0].shape[2:])))
    with torch.inference_mode():
        for side in (64, 128):
            built.model.eval()([torch.rand(3, side, side)])
        built.model([torch.rand(3, 50, 100)])
    assert sizes == {(64, 64), (64, 128) if crop == "none" else (32, 64)}
    assert built.card.preprocess.size == 64
    assert built.card.head_kwargs["min_size"] == 64
    built = assemble(load_recipe(None, [TINY, REGIONS, *SMALL, "data.image_size=64"]))
    assert built.card.head_kwargs["min_size"] == 48  # options of the head win


def test_detector_without_a_size_uses_that_of_coco_or_of_the_scenes():
    sizes = [detector_sizes(Data(path=path, image_size=side), "none") for path, side in (("a", None), ("scenes", None))]
    assert sizes == [{}, {"min_size": 128, "max_size": 213}]


def test_other_categories_are_refused(run, tmp_path):
    path = write(tmp_path)
    with pytest.raises(DataError, match="classes that are not in the training set: bird, cat, dog"):
        saccade.evaluate(run.out, path)


@pytest.mark.parametrize(("head", "lacking"), [("mask_rcnn", "pycocotools"), ("sparse", "scipy")])
def test_missing_package_is_named_before_training(monkeypatch, head, lacking):
    for name in [name for name in sys.modules if name.partition(".")[0] == lacking] + [lacking]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"{lacking} is not installed. Run pip install 'saccade\[train\]'"):
        assemble(recipe(f"model.head={head}"))


def test_detection_needs_head():
    with pytest.raises(RecipeError, match=r"needs model\.head"):
        load_recipe(None, ["task=detection"])
