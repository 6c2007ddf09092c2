"""Any shape, dtype, stride and batch: the same result as on contiguous copies, image by image; NaN and Inf stay in
their image."""

import inspect
import pkgutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import saccade
import saccade.tokens
from saccade import ops
from saccade.layers.mlp import ConvMlp
from saccade.layers.norm import ChannelNorm
from saccade.models.sparseformer import PixelNorm
from saccade.ops import attention, conv, layer_norm, linear, pooling, roi_sampling
from saccade.ops import mlp as conv_mlp
from saccade.ops import super_tokens as cell_ops
from saccade.tokens import clusters, locate, projector, regions, super_tokens, trace, visual_tokens

C, M, P = 8, 4, 6  # channels, tokens, points

# Name -> kinds of its tensor arguments, and how to build the function. Kinds: "features" (B, C, H, W), "images"
# (B, 3, H, W), "pixels" (B, N, C), "tokens" (B, M, C), "scores" (B, M, N), "regions" (B, M, 4), "points" (B, M, P, 2),
# "qkv" (B, M, 3 C), "key_value" (B, M, 2 C), "pixel_key_value" (B, N, 2 C), "deltas" (B, M, 4), "offsets" (B, M, 2 P),
# "mixing" (B, M, C C + P P), "grid" (B, H, W, C), "cells" (B, H, W, 4, C), "association" (B, H, W, 9, 4), "parts"
# (B, H, W, 9, C), "neighbours" (B, N, 9), "head_scores" (B, 2, M, N), "rows" (B, 4), "tube_points" (B, M, P, 3).
CASES: dict[str, tuple[tuple[str, ...], Callable[[], Callable[..., Any]]]] = {
    "ops.add": (("features", "features"), lambda: ops.add),
    "ops.add_norm": (
        ("features", "features"),
        lambda: (lambda norm: lambda x, u: ops.add_norm(x, u, norm.to(x.dtype)))(module(ChannelNorm(C))),
    ),
    "ops.clamp_gradient": (("points",), lambda: lambda x: ops.clamp_gradient(x, torch.tensor(0.1, dtype=x.dtype))),
    "ops.conv": (("features",), lambda: with_layers(conv.conv, nn.Conv2d(C, C, 3, padding=1))),
    "ops.conv_norm_act": (
        ("features",),
        lambda: with_layers(ops.conv_norm_act, nn.Conv2d(C, C, 3, padding=1), nn.BatchNorm2d(C)),
    ),
    "ops.conv_norm_relu_pool": (
        ("images",),
        lambda: with_layers(
            ops.conv_norm_relu_pool, nn.Conv2d(3, C, 7, 2, 3, bias=False), nn.BatchNorm2d(C), nn.MaxPool2d(3, 2, 1)
        ),
    ),
    "ops.conv_pool_relu": (
        ("images",),
        lambda: with_layers(ops.conv_pool_relu, nn.Conv2d(3, C, 7, 2, 3), PixelNorm()),
    ),
    "ops.depthwise_conv": (("features",), lambda: with_layer(nn.Conv2d(C, C, 3, padding=1, groups=C), _depthwise)),
    "ops.depthwise_gelu": (
        ("features",),
        lambda: with_layers(ops.depthwise_gelu, nn.Conv2d(C, C, 5, padding=2, groups=C)),
    ),
    "ops.grouped_linear": (
        ("pixels",),
        lambda: lambda x: ops.grouped_linear(x, torch.linspace(-1, 1, C * C // 2).reshape(2, C // 2, C // 2).to(x)),
    ),
    "ops.linear_gelu": (("pixels",), lambda: with_layers(ops.linear_gelu, nn.Linear(C, C))),
    "ops.norm_act": (("features",), lambda: with_layers(ops.norm_act, nn.BatchNorm2d(C))),
    "ops.place_points": (
        ("regions", "deltas", "offsets"),
        lambda: lambda r, d, o: ops.place_points(r, d, o, torch.linspace(-1, 1, 2 * P).to(r), 1.0, 1e-5),
    ),
    "ops.sample": (("features", "points"), lambda: ops.sample),
    "ops.self_attention": (("qkv",), lambda: lambda x: ops.self_attention(x, 2)),
    "ops.sample_and_mix": (
        ("features", "points", "mixing"),
        lambda: lambda x, p, w: ops.sample_and_mix(x, p, w, torch.ones(C).to(x), torch.ones(P).to(x)),
    ),
    "ops.cross_attention": (
        ("pixels", "key_value"),
        lambda: lambda x, kv: attention.cross_attention(x, kv, 2),
    ),
    "ops.pixel_pooling_attention": (
        ("tokens", "pixel_key_value"),
        lambda: lambda x, kv: attention.pixel_pooling_attention(x, kv, 2, 0.5),
    ),
    "ops.token_attention": (("tokens", "tokens"), lambda: lambda qk, v: attention.token_attention(qk, v, 2)),
    "ops.layer_norm": (("pixels",), lambda: with_layer(nn.LayerNorm(C), _layer_norm)),
    "ops.linear": (("pixels",), lambda: with_layer(nn.Linear(C, M), lambda x, f: linear.linear(x, f.weight, f.bias))),
    "ops.linear_fixed_layout": (("pixels",), lambda: with_layers(linear.linear_fixed_layout, nn.Linear(C, M))),
    "ops.max_pool": (("features",), lambda: with_layers(pooling.max_pool, nn.MaxPool2d(3, 2, 1))),
    "ops.conv_mlp": (("features",), lambda: with_layers(conv_mlp.conv_mlp, ConvMlp(C, 2 * C))),
    "ops.plain_norm": (("pixels",), lambda: lambda x: layer_norm.plain_norm(x, 1e-6)),
    "ops.spread_points": (
        ("points", "regions"),
        lambda: lambda o, r: roi_sampling.spread_points(o, r, 1.0, 1e-5),
    ),
    "ops.pad_pixels": (("grid",), lambda: lambda x: cell_ops.pad_pixels(x, x.shape[1] + 1, x.shape[2] + 2)),
    "ops.crop_pixels": (("grid",), lambda: lambda x: cell_ops.crop_pixels(x, x.shape[1], (x.shape[2] + 1) // 2)),
    "clusters.ToScore": (("pixels",), lambda: module(clusters.ToScore(C, M))),
    "clusters.ConvClustering": (("features",), lambda: module(clusters.ConvClustering(C, M))),
    "clusters.MlpClustering": (("features",), lambda: module(clusters.MlpClustering(C, M))),
    "clusters.LinearClustering": (("features",), lambda: module(clusters.LinearClustering(C, M))),
    "clusters.ClusterTokenizer": (
        ("features",),
        lambda: module(clusters.ClusterTokenizer(C, clusters.MlpClustering(C, M))),
    ),
    "clusters.SharedTokenizer": (("features", "scores"), lambda: module(clusters.SharedTokenizer(C))),
    "clusters.TokenToClusterAttention": (("pixels",), lambda: module(clusters.TokenToClusterAttention(C, 2, M))),
    "clusters.StridedTokenizer": (("features",), lambda: module(clusters.StridedTokenizer(C, 2))),
    "clusters.PooledTokenizer": (("features",), lambda: module(clusters.PooledTokenizer(C, 2))),
    "clusters.to_sequence": (("features",), lambda: clusters.to_sequence),
    "locate.LocationAttention": (
        ("features", "tokens", "regions"),
        lambda: module(locate.LocationAttention(C, C)),
    ),
    "locate.locate": (("tokens", "regions"), lambda: lambda t, r: locate.locate(t, r, 5, 7)),
    "locate.location_bias": (("regions",), lambda: lambda r: locate.location_bias(r, 5, 7)),
    "projector.TokenProjector": (("features", "tokens"), lambda: module(projector.TokenProjector(C, C, C, 2))),
    "regions.RegionTokenizer": (
        ("tokens", "regions", "features"),
        lambda: module(
            regions.RegionTokenizer(
                regions.RegionAdjuster(C), regions.PointPlacer(C, P), regions.AdaptiveDecoder(C, C, P), True
            )
        ),
    ),
    "regions.RegionAdjuster": (("tokens",), lambda: module(regions.RegionAdjuster(C))),
    "regions.PointPlacer": (("tokens", "regions"), lambda: module(regions.PointPlacer(C, P))),
    "regions.FixedPoints": (("tokens", "regions"), lambda: module(regions.FixedPoints(P))),
    "regions.AdaptiveDecoder": (("tokens", "features", "points"), lambda: module(regions.AdaptiveDecoder(C, C, P))),
    "regions.ProductDecoder": (
        ("tokens", "features", "points"),
        lambda: module(regions.ProductDecoder(C, C, P, P, 4)),
    ),
    "regions.MlpAdjuster": (("tokens", "regions"), lambda: module(regions.MlpAdjuster(C))),
    "regions.RegionPosition": (("tokens", "regions"), lambda: module(regions.RegionPosition(C))),
    "regions.StaticDecoder": (("tokens", "features", "points"), lambda: module(regions.StaticDecoder(C, C, P))),
    "regions.LinearDecoder": (("tokens", "features", "points"), lambda: module(regions.LinearDecoder(C, C, P))),
    "regions.clamp_to_border": (("points", "features"), lambda: regions.clamp_to_border),
    "regions.region_tubes": (
        ("rows",),
        lambda: lambda r: regions.region_tubes(r, 2).unflatten(0, (2, -1) if len(r) else (2, 0)).transpose(0, 1),
    ),
    "super_tokens.SuperTokenizer": (("features",), lambda: module(super_tokens.SuperTokenizer(2))),
    "super_tokens.DenseSuperTokenizer": (("features",), lambda: module(super_tokens.DenseSuperTokenizer(2))),
    "super_tokens.group": (("features",), lambda: lambda x: super_tokens.group(x, 2)),
    "super_tokens.to_cells": (("features",), lambda: lambda x: super_tokens.to_cells(x, 2)),
    "super_tokens.from_cells": (("cells",), lambda: lambda x: super_tokens.from_cells(x, 2, *_sides(x))),
    "super_tokens.associate": (("cells", "grid"), lambda: lambda x, t: super_tokens.associate(x, t, True)),
    "super_tokens.gather": (("cells", "association"), lambda: super_tokens.gather),
    "super_tokens.spread": (
        ("grid", "association"),
        lambda: lambda t, a: super_tokens.spread(t, a, 2, *_sides(t)),
    ),
    "super_tokens.neighbours": (("grid",), lambda: super_tokens.neighbours),
    "super_tokens.collect": (("parts",), lambda: super_tokens.collect),
    "trace.AssignmentTrace": (("scores",), lambda: lambda x: trace.AssignmentTrace(x, (1, x.shape[2])).maps()),
    "trace.AssociationTrace": (
        ("neighbours",),
        lambda: lambda x: trace.AssociationTrace(x, (1, x.shape[1]), (1, (x.shape[1] + 1) // 2), 2).maps(),
    ),
    "trace.RegionTrace": (
        ("regions", "points"),
        lambda: lambda r, p: trace.RegionTrace(r, p, (5, 7)).maps(0.2),
    ),
    "trace.TubeTrace": (
        ("deltas", "tube_points"),  # the maps do not depend on the regions
        lambda: lambda r, p: trace.TubeTrace(r, p, (3, 5, 7)).maps(0.2),
    ),
    "visual_tokens.FilterTokenizer": (("features",), lambda: module(visual_tokens.FilterTokenizer(C, C, M))),
    "visual_tokens.KMeansTokenizer": (("features",), lambda: module(visual_tokens.KMeansTokenizer(C, C, M))),
    "visual_tokens.PoolTokenizer": (("features",), lambda: module(visual_tokens.PoolTokenizer(C, C, M))),
    "visual_tokens.RecurrentTokenizer": (
        ("features", "tokens"),
        lambda: module(visual_tokens.RecurrentTokenizer(C, C, 2)),
    ),
    "visual_tokens.RepeatedTokenizer": (
        ("features", "tokens"),
        lambda: module(visual_tokens.RepeatedTokenizer(visual_tokens.FilterTokenizer(C, C, M))),
    ),
    "visual_tokens.KeepTokenizer": (("features", "tokens"), lambda: module(visual_tokens.KeepTokenizer())),
    "visual_tokens.PositionEncoding": (
        ("head_scores",),
        lambda: with_layer(visual_tokens.PositionEncoding(2, 4, 1), lambda x, encoding: encoding(x, (1, x.shape[3]))),
    ),
    "visual_tokens.kmeans": (("pixels", "tokens"), lambda: lambda x, t: visual_tokens.kmeans(x, t, 2)),
    "visual_tokens.previous": (("tokens",), lambda: visual_tokens.previous),
    "visual_tokens.TokenEmbedding": (("tokens",), lambda: module(visual_tokens.TokenEmbedding(C, C))),
}
EXEMPT = {
    # no tensor arguments, no floating-point result, or (`cell_weights`) a result that depends on sizes alone
    "ops.REGISTRY", "ops.disabled", "ops.enabled", "ops.fixed_shapes", "ops.model_pass", "ops.interpreted",
    "ops.plain_layer", "ops.record_implementations",
    "regions.point_grid", "regions.region_grid", "regions.padded_region_grid", "visual_tokens.token_grid",
    "visual_tokens.grid_size", "visual_tokens.pixel_groups", "visual_tokens.cell_weights", "trace.expect_trace",
    "trace.num_tokens",
    "visual_tokens.AssignmentTokenizer",  # the base class of the tokenizers with an assignment
    # of modules of ops: decorators, predicates, arguments of kernels, and gradients, which tests/ops compares with
    # autograd; steps of a registered operation, which need a GPU or Triton's interpreter
    "ops.FixedNorm", "ops.block_weight", "ops.convolve", "ops.depthwise_forward",
    "ops.depthwise_gradients", "ops.depthwise_onednn", "ops.epilogue", "ops.fixed_norm", "ops.fused_group",
    "ops.fused_spread", "ops.is_eager_inference", "ops.is_fixed_norm", "ops.is_stem_conv", "ops.linear_onednn",
    "ops.weight_gradient", "ops.without_autocast",
}  # fmt: skip
BATCH_FREE = {"locate.location_bias"}  # no features whose values could be NaN


def layers(*modules: nn.Module) -> list[nn.Module]:
    for each in modules:
        module(each)
    return list(modules)


def module(each: nn.Module) -> nn.Module:
    """In float64 and eval mode, with parameters that are not constant."""
    generator = torch.Generator().manual_seed(0)
    each.double().eval()
    for parameter in each.parameters():
        with torch.no_grad():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return each


def with_layers(function: Callable, *modules: nn.Module) -> Callable:
    built = layers(*modules)

    def call(x: Tensor) -> Tensor:
        return function(x, *(each.to(x.dtype) for each in built))

    return call


def with_layer(layer: nn.Module, function: Callable) -> Callable:
    module(layer)
    return lambda x: function(x, layer.to(x.dtype))


def _depthwise(x: Tensor, conv: Any) -> Tensor:
    return ops.depthwise_conv(x, conv.weight, conv.bias)


def _layer_norm(x: Tensor, norm: Any) -> Tensor:
    return layer_norm.layer_norm(x, norm.weight, norm.bias, 1e-6)


def _sides(grid: Tensor) -> tuple[int, int]:
    """Height and width of features with cells of 2 x 2; the last row is padding."""
    return 2 * grid.shape[1] - 1, 2 * grid.shape[2]


def make(kind: str, batch: int, height: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = {
        "features": (batch, C, height, width),
        "images": (batch, 3, 4 * height, 4 * width),
        "pixels": (batch, height * width, C),
        "tokens": (batch, M, C),
        "scores": (batch, M, height * width),
        "regions": (batch, M, 4),
        "points": (batch, M, P, 2),
        "qkv": (batch, M, 3 * C),
        "deltas": (batch, M, 4),
        "offsets": (batch, M, 2 * P),
        "key_value": (batch, M, 2 * C),
        "pixel_key_value": (batch, height * width, 2 * C),
        "mixing": (batch, M, C * C + P * P),
        "grid": (batch, height, width, C),
        "cells": (batch, height, width, 4, C),
        "association": (batch, height, width, 9, 4),
        "parts": (batch, height, width, 9, C),
        "neighbours": (batch, height * width, 9),
        "head_scores": (batch, 2, M, height * width),
        "rows": (batch, 4),
        "tube_points": (batch, M, P, 3),
    }[kind]
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "regions":
        corner = torch.rand(batch, M, 2, generator=generator, dtype=torch.float64) * 0.6
        values = torch.cat((corner, corner + 0.3), -1)
    if kind in ("points", "tube_points", "association"):  # from 0 to 1
        values = torch.rand(shape, generator=generator, dtype=torch.float64)
    return values


def strided(values: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout."""
    if layout == "channels-last" and values.ndim == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "sliced":  # every second element of the last axis, with an offset
        wide = torch.full((*values.shape[:-1], 2 * values.shape[-1] + 1), torch.nan, dtype=values.dtype)
        wide[..., 1::2] = values
        return wide[..., 1::2]
    if layout == "transposed":
        return values.transpose(1, -1).contiguous().transpose(1, -1)
    return values


def outputs(result: Any) -> list[Tensor]:
    return [each for each in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(each, Tensor)]


sizes = st.integers(1, 7)


@pytest.mark.parametrize("name", CASES)
@given(batch=st.sampled_from([0, 1, 3]), height=sizes, width=sizes, seed=st.integers(0, 99), data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_layout_and_batch_do_not_change_the_result(name, batch, height, width, seed, data):
    kinds, build = CASES[name]
    function = build()
    inputs = [make(kind, batch, height, width, seed + i) for i, kind in enumerate(kinds)]
    layouts = [data.draw(st.sampled_from(["contiguous", "channels-last", "sliced", "transposed"])) for _ in kinds]
    with torch.no_grad():
        expected = outputs(function(*inputs))
        results = outputs(function(*(strided(each, layout) for each, layout in zip(inputs, layouts, strict=True))))
        assert expected
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-9)
            assert reference.shape[0] == batch
        for index in range(batch):
            alone = outputs(function(*(each[index : index + 1] for each in inputs)))
            for result, reference in zip(alone, expected, strict=True):
                torch.testing.assert_close(result, reference[index : index + 1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [name for name in CASES if name not in BATCH_FREE])
def test_nan_and_inf_stay_in_their_image(name, value):
    """The other images of the batch are unchanged; no error, and no endless loop."""
    kinds, build = CASES[name]
    function = build()
    inputs = [make(kind, 3, 4, 5, i) for i, kind in enumerate(kinds)]
    damaged = [each.clone() for each in inputs]
    for each in damaged:
        each[1] = value
    with torch.no_grad():
        for result, reference in zip(outputs(function(*damaged)), outputs(function(*inputs)), strict=True):
            torch.testing.assert_close(result[[0, 2]], reference[[0, 2]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_dtypes_approximate_float64(name, dtype):
    """Modules are cast, too. Coordinates stay float32."""
    kinds, build = CASES[name]
    function = build()
    inputs = [make(kind, 2, 4, 5, i) for i, kind in enumerate(kinds)]
    exact = [kind in ("regions", "points", "tube_points") for kind in kinds]
    cast = [
        each.to(torch.float32 if is_exact else dtype).double() for each, is_exact in zip(inputs, exact, strict=True)
    ]
    with torch.no_grad():
        expected = outputs(function(*cast))
        if isinstance(function, nn.Module):
            function.to(dtype)
        low = [each.to(torch.float32 if is_exact else dtype) for each, is_exact in zip(cast, exact, strict=True)]
        results = outputs(function(*low))
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}[dtype]
    for result, reference in zip(results, expected, strict=True):
        scale = float(reference.abs().max()) + 1
        assert float((result.double() - reference).abs().max()) <= tolerance * scale


FUNCTIONS_OF = {"super_token_group": "super_tokens.group", "super_token_spread": "super_tokens.spread"}


def public_names() -> set[str]:
    """Operations, and functions and classes of every module of ops and tokens without the references of operations."""
    names = {f"ops.{name}" for name in ops.__all__}
    for package in (ops, saccade.tokens):
        for name in (each.name for each in pkgutil.iter_modules(package.__path__) if not each.name.startswith("_")):
            source = import_module(f"{package.__name__}.{name}")
            names |= {
                f"{'ops' if package is ops else name}.{member}"
                for member, value in vars(source).items()
                if not member.startswith("_")
                and (inspect.isclass(value) or inspect.isfunction(value))
                and value.__module__ == source.__name__
            }
    references = {f"ops.{name}_reference" for name in ops.REGISTRY}
    return (names - references) | {FUNCTIONS_OF.get(name, f"ops.{name}") for name in ops.REGISTRY}


def test_every_public_name_has_a_case():
    assert public_names() == set(CASES) | EXEMPT
    assert not set(CASES) & EXEMPT


@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano"])
def test_eight_threads_on_one_model_get_equal_results(name):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=7).eval()
    images = [torch.rand(1 + number % 2, 3, 64, 64 + 32 * (number % 3)) for number in range(16)]
    with torch.no_grad():
        expected = [model(image) for image in images]

    def predict(image: Tensor) -> Tensor:
        with torch.no_grad():
            return model(image)

    with ThreadPoolExecutor(8) as pool:
        for result, reference in zip(pool.map(predict, images * 2), expected * 2, strict=True):
            torch.testing.assert_close(result, reference, rtol=0, atol=0)
