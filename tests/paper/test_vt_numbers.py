"""Costs that the VT paper prints (Tables 1 to 8), and its claims about cost."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import saccade
from saccade.benchmark import count
from saccade.benchmark.paper import REPORTED
from saccade.layers.relation import VisualTokenTransformer
from saccade.tokens.projector import TokenProjector
from saccade.tokens.visual_tokens import FilterTokenizer, pixel_groups
from tests.paper import vt_tables
from tests.paper.precision import agrees, check_madds, check_params
from tests.paper.vt_tables import RATIOS, ROWS


@pytest.mark.shows(
    "VT-08",
    "VT-19",
    "VT-20",
    "VT-28",
    "VT-37",
    "VT-38",
    "VT-39",
    "VT-40",
    "VT-41",
    "VT-44",
    "VT-45",
    "VT-46",
    "VT-47",
    "VT-48",
    "VT-49",
    "VTR-09",
    "VTR-10",
    "VTR-11",
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.table}-{row.label}")
def test_costs_match_printed_tables(row):
    cost = vt_tables.cost(row)
    if row.params:
        check_params(cost.params, row.params)
    if row.exception:
        assert not agrees(cost.madds / 1e9, row.madds, 0.02), "no longer an exception"
    else:
        check_madds(cost.madds, row.madds)


@pytest.mark.shows("VTR-10")
def test_vt_r50_is_the_only_exception():
    assert [row.label for row in ROWS if row.exception] == ["VT-R50"]
    assert len(ROWS) == 41


@pytest.mark.shows("VT-76", "VTR-12")
@pytest.mark.parametrize("row", RATIOS, ids=lambda row: row.label)
def test_reductions_match_table_1(row):
    for i, (ratio, printed) in enumerate(zip(vt_tables.ratios(row), row.printed, strict=True)):
        if printed:
            assert agrees(ratio, printed, 0.02) == (i not in row.exceptions), (i, ratio, printed)


@pytest.mark.shows(
    "VT-28", "VT-34", "VT-37", "VT-38", "VT-45", "VT-47", "VTR-04", "VTR-05", "VTR-06", "VTR-09", "VTR-10", "VTR-11"
)
@pytest.mark.parametrize(
    ("name", "options", "madds", "params"),
    [  # the digits of the reconstruction, finer than the paper's
        ("vt_resnet18", {}, 1568.96, 11.673),
        ("vt_resnet18", dict(recurrence="full"), 1578.95, 11.673),
        ("vt_resnet18", dict(recurrence="full", num_tokens=64), 1979.74, 11.685),
        ("vt_resnet18", dict(recurrence="none"), 1585.60, None),
        ("vt_resnet18", dict(projector=False), 1494.02, None),
        ("vt_resnet34", {}, 3279.02, 21.894),
        ("vt_resnet34", dict(recurrence="none"), 3333.11, None),
        ("vt_resnet34", dict(relation=("transformer", "transformer", "skip")), 3236.68, 19.265),
        ("vt_resnet50", {}, 3542.51, 21.379),
        ("vt_resnet50", dict(pool=True), 3455.80, 21.379),
        ("vt_resnet50", dict(num_tokens=4), 3412.03, 21.367),
        ("vt_resnet101", dict(num_tokens=4, value_projection=True), 7128.97, 41.539),
        ("vt_resnet101", dict(num_tokens=4, key_groups=8, project_last=True), 7130.05, 41.412),
    ],
)
def test_reconstruction_costs_are_exact(name, options, madds, params):
    cost = count(name, 224, **options)
    assert cost.madds / 1e6 == pytest.approx(madds, abs=0.006)
    assert params is None or cost.params / 1e6 == pytest.approx(params, abs=0.001)


@pytest.mark.shows("VTR-05")
def test_equations_3_and_4_as_printed_cost_the_same():
    """Keys and queries a quarter as wide, no values, two feed-forward matrices: 2.5 C_T² weights, too."""
    ours, letter = count("vt_resnet18"), count("vt_resnet18", relation="equations")
    assert letter.madds == pytest.approx(ours.madds, rel=1e-4)
    assert letter.params == pytest.approx(ours.params, rel=2e-3)


def test_reported_costs_match_the_tables():
    names = saccade.list_models("vt_resnet*")
    assert len(names) == 4
    assert all(REPORTED[name].paper.startswith("2006.03677") for name in names)
    for row in ROWS:
        if row.model in names and not row.options and row.params and row.madds == REPORTED[row.model].madds:
            assert row.params == REPORTED[row.model].params


def stage_cost(size):
    """Multiply-adds of VT-R18's two modules, per part of a module."""
    with torch.device("meta"):
        model = saccade.create_model("vt_resnet18", project_last=True).eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.empty(1, 3, size, size, device="meta"))
    by_module = {name: sum(ops.values()) // 2 for name, ops in counter.get_flop_counts().items()}
    modules = {name.partition("layer4.")[2]: madds for name, madds in by_module.items() if ".layer4." in name}
    return {name: modules[name] for name in modules if name.startswith("blocks.") and name.count(".") == 2}


@pytest.mark.shows("VT-69", "VT-77")
def test_relation_cost_is_constant_and_pixel_cost_is_linear():
    small, large, huge = stage_cost(224), stage_cost(448), stage_cost(896)
    assert {"blocks.0.tokenizer", "blocks.0.relation", "blocks.1.projector"} <= set(small)
    for name in small:
        if name.endswith(".relation"):
            assert small[name] == large[name] == huge[name]
        else:
            assert huge[name] - large[name] == 4 * (large[name] - small[name])  # linear in pixels, plus a constant


@pytest.mark.shows("VT-68", "VTR-13")
@pytest.mark.parametrize(
    ("size", "tokens", "madds"),
    [  # the paper prints 8.5 and 2.0
        ((800, 1216), (16, 16, 8, 8), 8.502),
        ((800, 1216), (8, 8, 8, 8), 7.750),
        ((473, 473), (16, 16, 8, 8), 2.168),
        ((473, 473), (8, 8, 8, 8), 1.941),
    ],
)
def test_vt_fpn_layer_has_the_cost_of_its_modules(size, tokens, madds):
    """A tokenizer and a projector per level of ResNet-50, one transformer over all tokens."""
    dims, strides = (256, 512, 1024, 2048), (4, 8, 16, 32)
    with torch.device("meta"):
        tokenizers = [
            FilterTokenizer(dim, 1024, n, pixel_groups(dim, 16)).eval() for dim, n in zip(dims, tokens, strict=True)
        ]
        transformer = VisualTokenTransformer(1024).eval()
        projectors = [TokenProjector(dim, 256, 1024).eval() for dim in dims]
        maps = [torch.empty(1, d, -(-size[0] // s), -(-size[1] // s)) for d, s in zip(dims, strides, strict=True)]
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            grouped = [tokenizer(features)[0] for tokenizer, features in zip(tokenizers, maps, strict=True)]
            related = transformer(torch.cat(grouped, dim=1)).split(tokens, dim=1)
            for projector, features, own in zip(projectors, maps, related, strict=True):
                assert projector(features, own).shape == (1, 256, *features.shape[2:])
    assert counter.get_total_flops() / 2e9 == pytest.approx(madds, abs=0.001)
    params = sum(p.numel() for module in (*tokenizers, transformer, *projectors) for p in module.parameters())
    assert params / 1e6 == pytest.approx(10.61, abs=0.005)


def test_tables_of_the_vt_page_are_current():
    page = vt_tables.PAGE.read_text()
    assert vt_tables.cost_table() in page, "run python -m tests.paper.vt_tables"
    assert vt_tables.ratio_table() in page, "run python -m tests.paper.vt_tables"
