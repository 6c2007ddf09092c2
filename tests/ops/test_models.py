"""Whole models on their kernels: outputs and gradients of the references, and nothing compiled per image size."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade
from saccade import ops
from saccade.ops._launch import HAS_TRITON, record_specializations
from tests.ops.compare import DEVICE, HALF, kernels_allowed, needs_triton

pytestmark = needs_triton
NAMES = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano")
# Specialisations in inference and in training, over all image and batch sizes. Some operations choose among up to three
# tiles by size, and short attention is used for few tokens only: so a few more than at one size.
MAX_VARIANTS = {"svit_nano": (32, 81), "paca_nano": (31, 61), "sparseformer_nano": (10, 29), "vt_nano": (15, 49)}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return saccade.create_model(name, num_classes=3).to(DEVICE).to(memory_format=torch.channels_last)


def images_of(batch: int, height: int, width: int) -> Tensor:
    images = torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(0))
    return images.to(DEVICE).contiguous(memory_format=torch.channels_last)


def train_step(model: nn.Module, images: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        logits = model(images)
    F.cross_entropy(logits.float(), torch.zeros(len(images), dtype=torch.long, device=DEVICE)).backward()
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_no_kernel_is_compiled_per_image_or_batch_size(name):
    """Over hundreds of sizes, with launches logged instead of run, the specialisations are those of the first sizes."""
    model = build(name)
    sizes = [(1 + i % 3, 64 + 37 * i % 160, 64 + 29 * i % 160) for i in range(100)]
    for mode, count, most in zip(("inference", "training"), (100, 10), MAX_VARIANTS[name], strict=True):
        model.train(mode == "training")
        with kernels_allowed(), record_specializations(execute=False) as variants:
            for size in sizes[:count]:
                if mode == "training":
                    train_step(model, images_of(*size))
                else:
                    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
                        model(images_of(*size))
        assert len(variants) <= most, mode


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("svit_nano", "paca_nano")]  # in the interpreter


@pytest.mark.parametrize("name", [*SLOW, "sparseformer_nano", "vt_nano"])
def test_model_on_kernels_equals_references(name):
    model, images = build(name).eval(), images_of(2, 64, 48)
    with torch.no_grad():
        with ops.enabled(False):
            expected = model(images)
        with kernels_allowed(), ops.record_implementations() as used:
            result = model(images)
    assert bool({"triton", "epilogue"} & {implementation for _, implementation in used}) == HAS_TRITON
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_on_kernels_equals_references(name):
    model, images = build(name).train(), images_of(2, 64, 48)

    def gradients(model: nn.Module) -> list[Tensor]:
        model(images).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    with ops.enabled(False):
        expected = gradients(deepcopy(model))
    with kernels_allowed():
        result = gradients(deepcopy(model))
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3 * float(b.abs().max()) + 1e-6)


def test_export_contains_no_operator_of_ours():
    class Model(nn.Module):
        def forward(self, qkv: Tensor) -> Tensor:
            return ops.self_attention(qkv, 2)

    qkv = torch.randn(1, 9, 96, device=DEVICE, dtype=HALF)
    with kernels_allowed():
        assert ops.self_attention.implementation(qkv, 2) == "triton"
        for strict in (False, True):
            program = torch.export.export(Model(), (qkv,), strict=strict)
            assert not [node for node in program.graph.nodes if "saccade" in str(node.target)]
