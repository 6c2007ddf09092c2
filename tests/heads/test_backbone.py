"""Methods that task models forward to their backbone."""

import pytest
import torch
from torch import nn

import saccade
from saccade.heads.backbone import BackboneMethods
from saccade.tokens.regions import RegionTokenizer

SMALL = dict(min_size=64, max_size=64)
MODELS = {
    "segmenter": lambda: saccade.create_segmenter("sparseformer_nano", "sparse", 3, head_kwargs={"dim": 8}),
    "segmenter of a pyramid": lambda: saccade.create_segmenter(
        "sparseformer_nano", "fpn", 3, head_kwargs={"dim": 8, "branch_dim": 8}
    ),
    "sparse detector": lambda: saccade.create_detector(
        "sparseformer_nano", "sparse", 3, num_tokens=16, detect_tokens=8, **SMALL
    ),
    "mask r-cnn": lambda: saccade.create_detector("sparseformer_nano", "mask_rcnn", 3, width=8, **SMALL),
}
PREFIXES = {
    "segmenter": "backbone.model.",
    "segmenter of a pyramid": "backbone.model.",
    "sparse detector": "backbone.",
    "mask r-cnn": "backbone.body.model.",
}


@pytest.mark.parametrize("kind", MODELS)
def test_prefix_is_where_the_backbone_is(kind):
    model = MODELS[kind]()
    assert model.backbone_prefix == PREFIXES[kind]
    assert model.get_submodule(model.backbone_prefix.removesuffix(".")) is model.backbone_model


@pytest.mark.parametrize("kind", MODELS)
def test_no_weight_decay_names_the_regions(kind):
    model = MODELS[kind]()
    assert model.no_weight_decay() == {f"{PREFIXES[kind]}regions"}
    assert model.no_weight_decay() <= dict(model.named_parameters()).keys()


@pytest.mark.parametrize("kind", MODELS)
def test_gradient_checkpointing_is_forwarded(kind):
    model = MODELS[kind]()
    for enable in (True, False):
        model.set_grad_checkpointing(enable)
        assert model.backbone_model.focus.grad_checkpointing is enable
        assert model.backbone_model.cortex.grad_checkpointing is enable


@pytest.mark.shows("SF-12")
@pytest.mark.parametrize("kind", MODELS)
def test_loss_scale_reaches_every_region_tokenizer(kind):
    model = MODELS[kind]()
    tokenizers = [module for module in model.modules() if isinstance(module, RegionTokenizer)]
    assert len(tokenizers) == 2  # focusing transformer, first block of the cortex transformer
    model.set_loss_scale(65536.0)
    assert [float(module.loss_scale) for module in tokenizers] == [65536.0, 65536.0]


def test_loss_scale_is_ignored_by_other_backbones():
    model = saccade.create_segmenter("svit_nano", "fpn", 3, head_kwargs={"dim": 8, "branch_dim": 8})
    model.set_loss_scale(65536.0)


def test_backbone_without_exemptions_has_an_empty_set():
    class Model(BackboneMethods):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Conv2d(3, 3, 1)

    assert Model().no_weight_decay() == set()
    assert Model().backbone_prefix == "backbone."


@pytest.mark.shows("SF-12")
@pytest.mark.parametrize("kind", ["segmenter", "sparse detector"])
def test_scaled_loss_gives_the_same_region_gradient_as_an_unscaled_one(kind):
    """Under float16 the loss is multiplied by 65536: without the scale, the bound would cut almost every gradient."""
    scale, gradients = 65536.0, []
    for factor in (1.0, scale):
        torch.manual_seed(0)
        model = MODELS[kind]().train()
        for parameter in model.parameters():  # zero-initialised layers would hide the gradient
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        model.set_loss_scale(factor)
        images = torch.rand(2, 3, 64, 64)
        if kind == "segmenter":
            losses = model.loss(images, torch.randint(3, (2, 64, 64)))
        else:
            target = {"boxes": torch.tensor([[8.0, 8, 40, 40]]), "labels": torch.tensor([2])}
            losses = model(list(images), [target, target])
        (factor * torch.stack(list(losses.values())).sum()).backward()
        gradients.append(model.backbone_model.regions.grad / factor)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)
    assert gradients[0].norm() > 1e-4
