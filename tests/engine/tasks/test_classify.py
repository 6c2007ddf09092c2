"""Training of classifiers: it trains, distils, fine-tunes."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from saccade.engine.train import train
from tests.engine.runs import recipe, rows


def test_svit_nano_trains_on_scenes(tmp_path):
    """Chance is 10 %, a linear model reaches 14 %."""
    plan = recipe("model={name: svit_nano}", "data.scenes=1280", "batch_size=32", "epochs=6", "trainer.log_every=20",
                  "augment.crop=none", "schedule.warmup_epochs=0.5")  # fmt: skip
    result = train(plan, tmp_path, progress=False).result
    losses = [float(row["train_loss"]) for row in rows(tmp_path) if row["train_loss"]]
    assert losses[0] == pytest.approx(np.log(10), abs=0.35)
    assert losses[-1] < 1.5
    assert result["final"]["top1"] > 40


@pytest.mark.shows("VT-56")
def test_distillation_approaches_teacher(tmp_path, finished):
    """With weight 1 the loss is a divergence from the teacher, which goes to 0; a cross-entropy would not."""
    teacher = f"distill.teacher={finished.out}/last.safetensors"
    common = ["augment.crop=none", "augment.flip=0", "epochs=8", "optimizer.lr=3e-3"]
    run = train(recipe(teacher, "distill.weight=1.0", *common), tmp_path, progress=False)
    losses = [float(row["train_loss"]) for row in rows(run.out) if row["train_loss"]]
    assert losses[-1] < 0.5 * losses[0]
    assert losses[-1] < 0.2
    checkpoint = torch.load(run.out / "last.ckpt", weights_only=True)
    assert not any("teacher" in name for name in checkpoint["state_dict"])


@pytest.mark.shows("SVIT-44")
def test_fine_tuning_with_frozen_norms_and_new_classifier(finished, tmp_path):
    for number, name in enumerate(("a", "b", "c")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (32, 32), (40 * number, 9 * i, 90)).save(tmp_path / "data" / name / f"{i}.png")
    plan = recipe(f"data.path={tmp_path}/data", f"model.checkpoint={finished.out}/last.safetensors", "batch_size=8",
                  "epochs=1", "regularize.freeze_norm=true")  # fmt: skip
    tuned = train(plan, tmp_path / "run", progress=False)
    before, after = load_file(finished.out / "last.safetensors"), load_file(tuned.out / "last.safetensors")
    assert after["head.fc.weight"].shape[0] == 3
    assert all(torch.equal(before[name], after[name]) for name in before if "running" in name)
    assert any(not torch.equal(before[name], after[name]) for name in before if name.endswith("conv.weight"))
