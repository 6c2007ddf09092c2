"""report.html and its charts."""

import re

import torch

from saccade.reports.charts import classes_section, most_confused, thin


def test_report_is_one_self_contained_page(finished):
    page = (finished.out / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "http" not in page.replace("http-equiv", "")
    sections = re.findall("<h2>(.*?)</h2>", page)
    assert sections == ["Curves", "Classes", "Errors with the highest loss", "Most confident correct predictions",
                        "Environment", "Recipe"]  # fmt: skip
    assert "Accuracy per class, %" in page
    charts = page[page.index("Curves") : page.index("Classes")].split("<svg")[1:]
    lines = [len(set(re.findall(r"stroke: var\(--line-\d\)", chart))) for chart in charts]
    assert lines == [2, 2, 1, 1]  # training and validation: loss, top-1; learning rate, throughput
    correct = round(0.15 * finished.result["final"]["top1"])  # of 15 images
    assert page.count("data:image/jpeg") == min(12, 15 - correct) + min(12, correct)
    assert "drop_path: 0.0" in page
    assert torch.__version__ in page
    assert f"{finished.result['final']['top1']:.2f} %" in page


def test_thinned_rows_keep_first_and_last():
    rows = [{"step": step} for step in range(1000)]
    shown = thin(rows, limit=400)
    assert (len(shown), shown[0], shown[-1]) == (334, rows[0], rows[-1])
    assert thin(rows[:400], limit=400) == rows[:400]
    assert thin([]) == []


def test_confusions_are_sorted_by_count():
    confused = most_confused([[5, 1, 0], [3, 4, 0], [0, 0, 2]], ["a", "b", "c"])
    assert confused == [("b", "a", 3), ("a", "b", 1)]


def test_classes_without_value_have_no_bar():
    section = classes_section([50.0, None, 20.0], [], ["a", "<b>", "c"], "IoU")
    assert re.findall('class="class">(.*?)</span><span class="value">(.*?)<', section) == [("c", "20.0"), ("a", "50.0")]
