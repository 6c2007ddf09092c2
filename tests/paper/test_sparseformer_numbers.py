"""Parameters and multiply-adds that the SparseFormer paper prints (Tables 1, 2, 3a to 3e, 4, 9).

The printed costs leave out the two matrix products of the adaptive mixing: counted without them, every number agrees;
counted with them, as `saccade.benchmark.count` does, the models cost 2 % (Base) to 9 % (Tiny) more.
"""

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import saccade
from saccade.benchmark import Cost, count
from saccade.benchmark.paper import REPORTED
from tests.paper.precision import agrees, check_madds, check_params

TINY, BASE = "sparseformer_tiny", "sparseformer_base"
SIZES = [  # Tables 1 and 2: parameters, multiply-adds, recounted
    ("sparseformer_tiny", "32", "2.0", 31.5, 2.07),
    ("sparseformer_small", "48", "3.8", 47.6, 3.86),
    ("sparseformer_base", "81", "7.8", 81.1, 7.82),
]
ABLATIONS = [  # of Tiny
    *((dict(num_tokens=n), p) for n, p in zip((9, 16, 25, 36, 49), ("0.5", "0.8", "1.1", "1.6", "2.0"), strict=True)),
    *((dict(num_tokens=n), p) for n, p in zip((64, 81), ("2.7", "3.3"), strict=True)),  # Table 3a
    *((dict(repeats=n), p) for n, p in zip((0, 1, 4, 8), ("1.6", "1.7", "2.0", "2.5"), strict=True)),  # 3b
    *((dict(points=n), p) for n, p in zip((16, 36, 64), ("1.9", "2.0", "2.3"), strict=True)),  # 3c
    *((dict(image_features=f), p) for f, p in (("rgb", "1.5"), ("vit8", "1.9"), ("early_conv", "2.0"))),  # 3d
    *((dict(decoding=d), p) for d, p in (("linear", "1.9"), ("static", "1.9"), ("adaptive", "2.0"))),  # 3e
    *((dict(region_init=i), "2.0") for i in ("half", "cell", "whole")),  # Table 9
]
SCALING = [(224, 81, "7.8"), (384, 81, "8.2"), (512, 81, "8.6"), (384, 144, "14.2"), (384, 196, "19.4")]  # Table 4


def without_mixing(name: str, shape: int | tuple[int, ...] = 224, **options) -> Cost:
    """The paper's count: all but the products of sampled features with the token's two matrices."""
    shape = (3, shape, shape) if isinstance(shape, int) else shape
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        model = timm.create_model(name, **options).eval()
        model(torch.empty(1, *shape))
    mixing = counter.get_flop_counts()["Global"].get(torch.ops.aten.baddbmm, 0)
    params = sum(parameter.numel() for parameter in model.parameters())
    return Cost(params, (counter.get_total_flops() - mixing) // 2)


@pytest.mark.shows("SF-34", "SF-35", "SF-36")
@pytest.mark.parametrize(("name", "params", "madds", "recounted_params", "recounted_madds"), SIZES)
def test_variants_have_printed_costs(name, params, madds, recounted_params, recounted_madds):
    cost = without_mixing(name)
    check_params(cost.params, params)
    check_madds(cost.madds, madds)
    assert cost.params / 1e6 == pytest.approx(recounted_params, rel=0.005)
    assert cost.madds / 1e9 == pytest.approx(recounted_madds, rel=0.005)
    reported = REPORTED[name]
    assert (reported.params, reported.madds) == (params, madds)


@pytest.mark.shows("SF-37", "SF-38", "SF-39", "SF-56")
@pytest.mark.parametrize(("options", "madds"), ABLATIONS)
def test_ablations_have_printed_costs(options, madds):
    check_madds(without_mixing(TINY, **options).madds, madds)


@pytest.mark.shows("SF-40")
@pytest.mark.parametrize(("size", "num_tokens", "madds"), SCALING)
def test_larger_images_and_more_tokens_have_printed_costs(size, num_tokens, madds):
    check_madds(without_mixing(BASE, size, num_tokens=num_tokens).madds, madds)


@pytest.mark.shows("SF-03", "SF-80")
def test_only_the_early_convolution_depends_on_resolution():
    """384 px cost Base 5 % more than 224, all of it in 7x7 convolutions."""
    small, large = without_mixing(BASE, 224).madds, without_mixing(BASE, 384).madds
    assert large - small == 96 * 3 * 7**2 * (192**2 - 112**2)
    assert large / small < 1.05


@pytest.mark.shows("SF-24", "SF-46")
def test_parameters_are_independent_of_repeats_and_region_init():
    options = (dict(), dict(repeats=1), dict(repeats=8), dict(region_init="cell"), dict(region_init="whole"))
    with torch.device("meta"):
        models = [timm.create_model(TINY, **option) for option in options]
    assert {sum(parameter.numel() for parameter in model.parameters()) for model in models} == {31522212}


def test_uncounted_mixing_is_two_products_per_sampling_step():
    """P C² + P² C multiply-adds per token and sampling step: by so much the full count exceeds the printed one."""
    full, printed = count(TINY).madds, without_mixing(TINY).madds
    assert full - printed == 49 * 5 * (36 * 96**2 + 36**2 * 96)
    assert not agrees(full / 1e9, "2.0", 0.02)
    assert full / 1e9 == pytest.approx(2.182, rel=0.005)  # a second counter, which includes the products


@pytest.mark.shows("SF-41")
def test_latent_space_is_smaller_than_the_image():
    """N d_c is 81 · 768 at most, below 3 · 224²; Perceiver's 512 · 1024 is above."""
    with torch.device("meta"):
        model = saccade.create_model(BASE, num_classes=0)
    assert len(model.embeddings) * model.num_features == 81 * 768 < 3 * 224**2 < 512 * 1024
