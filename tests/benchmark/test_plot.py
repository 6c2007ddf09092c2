"""Plots and tables of measurements."""

from saccade.benchmark.plot import plot_accuracy, plot_scaling, published_accuracy
from saccade.cli.bench import noisy, table_row


def row(model="svit_small", size=224, **values):
    base = {"model": model, "size": size, "batch": 2, "images_per_second": 10.0, "seconds": 0.2, "madds": 4.4e9}
    base |= {"mode": "inference", "compiled": False, "cuda_graph": False, "dtype": "float32", "channels_last": False}
    base |= {"optimized": False, "spread": 0.05, "ratio": 1.0, "tflops": 0.1, "fraction_of_ceiling": 0.5}
    return base | {"peak_bytes": None, "options": {}} | values


def test_accuracy_belongs_to_the_published_size_and_model():
    assert published_accuracy(row()) == 83.6
    assert published_accuracy(row("swin_tiny_patch4_window7_224")) == 81.3
    assert published_accuracy(row(size=128)) is None
    assert published_accuracy(row(options={"num_tokens": 8})) is None
    assert published_accuracy(row("svit_nano")) is None
    assert published_accuracy(row("video_sparseformer_tiny")) is None  # Kinetics


def test_accuracy_plot_has_the_published_models_only():
    figure = plot_accuracy([row(), row("svit_nano"), row("paca_small", images_per_second=12.0)], "title")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["svit_small", "paca_small"]
    assert plot_accuracy([row(size=64), row("paca_small", 64)], "title") is None


def test_scaling_plot_has_a_line_per_model():
    rows = [row(size=size, seconds=size / 1000) for size in (448, 224)] + [row("vt_nano", 224)]
    left, right = plot_scaling(rows, "title").axes
    assert [line.get_label() for line in left.lines] == ["svit_small", "vt_nano"]
    assert list(left.lines[0].get_xdata()) == [224, 448]
    assert list(left.lines[0].get_ydata()) == [112.0, 224.0]  # milliseconds per image, batch 2
    assert list(right.lines[1].get_ydata()) == [4.4]


def test_large_spread_is_flagged():
    assert table_row(row(spread=0.2))[5] == "20"
    assert table_row(row(spread=0.21))[5] == "21!"
    assert noisy([row(spread=0.3), row("vt_nano"), row(spread=0.4)]) == ["svit_small"]
