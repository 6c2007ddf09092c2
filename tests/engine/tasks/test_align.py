"""Alignment of a bootstrapped SparseFormer with its source ViT, without labels."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file

import saccade
from saccade.data.synthetic.scenes import Scenes
from saccade.engine.recipe import RecipeError, load_recipe
from saccade.engine.train import train
from saccade.models.card import Card, Preprocess, save_model
from tests.engine.runs import SMALL, rows

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
STUDENT = "model.kwargs={num_tokens: 5, focus_dim: 32, repeats: 1, channels: 16, points: 4}"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A ViT of three classes with randomly initialised weights, as a saccade file."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **VIT)
    torch.nn.init.normal_(model.head.weight)
    path = tmp_path_factory.mktemp("vit") / "vit.safetensors"
    preprocess = Preprocess(32, (0.1, 0.2, 0.3), (0.5,) * 3)
    save_model(model, path, Card("vit_tiny_patch16_224", 3, VIT, ["a", "b", "c"], preprocess))
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of images without class folders."""
    folder, scenes = tmp_path_factory.mktemp("images"), Scenes(48, 32, "train")
    for i in range(len(scenes)):
        scenes.read(i).save(folder / f"{i}.png")
    return folder


def recipe(source, *changes):
    common = ["model.name=sparseformer_btsp_augreg_base", STUDENT, f"distill.teacher={source}", "distill.features=true"]
    return load_recipe(None, [*SMALL, *common, "augment.crop=none", "schedule.warmup_epochs=0", *changes])


def test_final_token_approaches_that_of_the_source(source, images, tmp_path):
    plan = recipe(source, f"data.path={images}", "epochs=12", "optimizer.lr=5e-3", "data.val_fraction=0.2")
    run = train(plan, tmp_path / "run", progress=False)
    losses = [float(row["train_loss"]) for row in rows(run.out) if row["train_loss"]]
    assert losses[0] > 0.5
    assert losses[-1] < 0.3 * losses[0]
    final = json.loads((run.out / "result.json").read_text())["final"]
    assert (final["count"], final["bad"]) == (10, 0)
    vit, model = saccade.load(source), saccade.load(run.out)
    assert model.card.classes == ["a", "b", "c"]
    assert model.card.preprocess.mean == (0.1, 0.2, 0.3)
    tensors = load_file(run.out / "last.safetensors")
    theirs = vit.state_dict()
    assert torch.equal(tensors["cortex.blocks.1.attn.qkv.weight"], theirs["blocks.2.attn.qkv.weight"])  # frozen
    assert torch.equal(tensors["head.fc.weight"], theirs["head.weight"])
    assert not torch.equal(tensors["cortex.blocks.0.attn.qkv.weight"], theirs["blocks.1.attn.qkv.weight"])  # tuned
    checkpoint = torch.load(run.out / "last.ckpt", weights_only=True)
    assert not any("teacher" in name for name in checkpoint["state_dict"])
    inputs = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        tokens = [owner.forward_head(owner.forward_features(inputs), pre_logits=True) for owner in (vit, model)]
    assert torch.cosine_similarity(*tokens).mean() > 0.7


def test_alignment_continues_from_a_checkpoint(source, images, tmp_path):
    first = train(recipe(source, f"data.path={images}", "epochs=1"), tmp_path / "first", progress=False)
    plan = recipe(source, f"data.path={images}", "epochs=1", f"model.checkpoint={first.weights}", "optimizer.lr=1e-9")
    second = train(plan, tmp_path / "second", progress=False)
    before, after = load_file(first.weights), load_file(second.weights)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.name=svit_nano", "expected task classification and model.name sparseformer_btsp_"),
        ("distill.teacher=a,b", "expected one ViT as distill.teacher, got 'a,b'"),
        ("regularize.label_smoothing=0.1", "leave out regularize.label_smoothing"),
        ("distill.temperature=2", "leave out distill.temperature"),
        ("model.pretrained=true", "leave out model.pretrained"),
        ("model.kwargs={depth: 3}", "depth come from the ViT"),
        ("model.kwargs={tokens: 3}", "unexpected keyword argument 'tokens'"),
    ],
)
def test_keys_that_alignment_cannot_honour_are_refused(source, tmp_path, change, message):
    with pytest.raises(RecipeError, match=message):
        train(recipe(source, change), tmp_path, progress=False)


def test_source_that_is_no_vit_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="at least 3 blocks, got ResNet with 0"):
        train(recipe("resnet10t", "distill.kwargs={pretrained: false}"), tmp_path, progress=False)
