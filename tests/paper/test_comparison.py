"""Rows of the papers' comparison tables, and what the package says about them."""

import pytest

from saccade.benchmark.paper import COMPARED, REPORTED, comparison_rows
from saccade.benchmark.plot import pareto_front, plot_trade_offs
from saccade.reports.charts import COLOURS

PRINTED = {  # timm's name -> as the tables call it
    "resnet18": ("R18",),
    "resnet50": ("R50",),
    "deit_small_patch16_224": ("DeiT-S", "DeiT-S/16"),
    "swin_tiny_patch4_window7_224": ("Swin-T", "SWin-T"),
    "swin_small_patch4_window7_224": ("Swin-S", "SWin-S"),
    "pvt_v2_b2": ("PVTv2-B2",),
    "convnext_tiny": ("ConvNeXt-T",),
}
OWN = {"vt_resnet": "VT-R{} (ours)", "paca_": "PaCa-{}", "sparseformer_": "SparseFormer-{}", "svit_": "SViT-{}"}
SIZES = {"tiny": "T", "small": "S", "base": "B", "large": "L"}


def test_rows_are_those_of_four_tables():
    rows = comparison_rows()
    assert {row["source"] for row in rows} == {
        "2006.03677 Table 8", "2203.11987 Table 1", "2304.03768 Table 2", "2211.11167 Table 2"
    }  # fmt: skip
    assert len(rows) == 129
    assert {row["family"] for row in rows} == {"vt", "paca", "sparseformer", "svit", None}


def test_compared_models_have_a_printed_accuracy():
    assert PRINTED.keys() == COMPARED.keys()
    for name, top1 in COMPARED.items():
        printed = {row["top1"] for row in comparison_rows() if row["model"] in PRINTED[name] and row["size"] == 224}
        assert top1 in printed, name
    accuracies = {row["model"]: row["top1"] for row in comparison_rows() if row["model"] in ("R50", "ResNet-50")}
    assert accuracies == {"R50": 76.0, "ResNet-50": 80.4}


def test_reported_accuracies_are_those_of_the_tables():
    rows = {row["model"]: row for row in comparison_rows() if row["size"] == 224}
    compared = 0
    for name, reported in REPORTED.items():
        prefix = next((prefix for prefix in OWN if name.startswith(prefix)), None)
        if prefix is None or "btsp" in name or name == "vt_resnet34":  # Table 8 has another VT-R34
            continue
        size = name.removeprefix(prefix)
        words = [SIZES.get(word, word) if "PaCa" not in OWN[prefix] else word for word in size.split("_")]
        title = "-".join(word if word in ("mlp", "ec") or len(word) == 1 else word.title() for word in words)
        assert rows[OWN[prefix].format(title)]["top1"] == reported.top1, name
        compared += 1
    assert compared == 15


def test_front_has_the_points_that_none_beats():
    points = [(1, 70.0), (2, 72.0), (2, 71.0), (3, 71.5), (4, 75.0), (4, 75.0)]
    assert pareto_front(points) == [(1, 70.0), (2, 72.0), (4, 75.0)]
    assert pareto_front(points, less_is_better=False) == [(4, 75.0)]
    assert pareto_front([(10, 80.0), (5, 81.0), (7, 79.0)], less_is_better=False) == [(5, 81.0), (10, 80.0)]


@pytest.mark.shows("SVIT-58")
def test_svit_is_on_the_front_of_multiply_adds():
    """SViT Fig. 1: nothing that the papers compare has fewer multiply-adds and a higher accuracy."""
    rows = [row for row in comparison_rows() if row["madds"]]
    front = pareto_front([(row["madds"], row["top1"]) for row in rows])
    for row in rows:
        if row["family"] == "svit" and row["size"] == 224:
            assert (row["madds"], row["top1"]) in front, row["model"]


@pytest.mark.shows("VT-75", "SVIT-58")
def test_plot_marks_every_own_model(monkeypatch):
    """Three panels; own models are named, no name covers another, and points of a family have its colour."""
    from matplotlib.axes import Axes

    scatter = []
    draw = Axes.scatter
    monkeypatch.setattr(Axes, "scatter", lambda self, *a, **k: scatter.append(k["color"]) or draw(self, *a, **k))
    figure = plot_trade_offs(comparison_rows(), ["svit", "vt"])
    assert len(figure.axes) == 3
    named = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert named.count("SViT-S") == 3
    assert named.count("VT-R50") == 2  # without images per second
    assert "PaCa-Small" not in named
    assert scatter.count(COLOURS[0]) == 3 * 6 + 3  # SViT at 224 and 384 px, and the legend


def test_names_in_the_plot_of_all_families_do_not_overlap():
    figure = plot_trade_offs(comparison_rows(), ["paca", "sparseformer", "svit", "vt"])
    own = {row["model"].removesuffix(" (ours)") for row in comparison_rows() if row["family"]}
    for axes in figure.axes[:2]:
        assert own <= {text.get_text().removesuffix(" 384") for text in axes.texts}
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
