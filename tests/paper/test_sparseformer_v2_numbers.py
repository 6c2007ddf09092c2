"""Parameters and multiply-adds of SparseFormer v2, exactly those of the authors' code.

The costs printed in the paper are not at hand: those of the code were counted by torch's counter, with all products.
"""

import pytest
import timm
import torch

from saccade.benchmark import count

BASE, LARGE = "sparseformer_btsp_augreg_base", "sparseformer_btsp_augreg_large"
CLIP_BASE, CLIP_LARGE = "sparseformer_btsp_clip_base", "sparseformer_btsp_clip_large"
COSTS = [  # parameters, multiply-adds at 224 and 384 px
    (BASE, 64_185_448, 3_778_357_248, 4_007_159_808),
    (LARGE, 212_426_984, 11_343_421_440, 11_572_224_000),
    (CLIP_BASE, 63_809_664, 3_777_982_464, 4_006_785_024),
    (CLIP_LARGE, 212_188_476, 14_822_715_392, 15_051_517_952),
]
PARTS = [  # parameters of the cortex blocks; of focusing unit, bridge and second sampling
    (BASE, 56_702_976, 6_701_120),
    (LARGE, 201_539_584, 9_849_152),
    (CLIP_BASE, 56_702_976, 6_701_120),
    (CLIP_LARGE, 201_539_584, 9_849_152),
]


@pytest.mark.parametrize(("name", "params", "at_224", "at_384"), COSTS)
def test_variants_have_the_costs_of_the_authors_code(name, params, at_224, at_384):
    assert count(name)[:2] == (params, at_224)
    assert count(name, 384).madds == at_384


@pytest.mark.parametrize(("name", "cortex", "focus"), PARTS)
def test_parts_have_the_parameters_of_the_authors_code(name, cortex, focus):
    with torch.device("meta"):
        model = timm.create_model(name)

    def params(*parts: str) -> int:
        return sum(value.numel() for key, value in model.named_parameters() if key.startswith(parts))

    assert params("cortex.") == cortex
    assert params("focus.", "bridge.", "resample.") == focus


@pytest.mark.parametrize("name", [BASE, CLIP_LARGE])
def test_only_the_early_convolution_depends_on_resolution(name):
    assert count(name, 384).madds - count(name).madds == 64 * 3 * 7**2 * (192**2 - 112**2)


def test_tokens_are_a_quarter_of_the_patches():
    """14 · 14 patches of ViT-B/16 and 16 · 16 of ViT-L/14 at 224 px; the class token is counted."""
    for name, patches in ((BASE, 14), (CLIP_BASE, 14), (CLIP_LARGE, 16)):
        with torch.device("meta"):
            assert len(timm.create_model(name).regions) + 1 == patches**2 // 4
