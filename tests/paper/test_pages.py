"""Pages of the families: limits and outlook that the papers name."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def section(page: str, title: str) -> str:
    """Return the text of a section, without line breaks."""
    text = (DOCS / f"{page}.md").read_text()
    match = re.search(rf"^##+ {title}[^\n]*\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"docs/{page}.md has no section {title}"
    return " ".join(match[1].split())


@pytest.mark.shows("VT-79", "VT-80", "PACA-71", "PACA-72", "SF-82", "SF-83", "SVIT-61", "SVIT-62")
@pytest.mark.parametrize(
    ("page", "limits", "outlook"),
    [
        ("vt", ("filters are fixed", "k-means", "over-fits"), ("agglomerative", "architecture search", "DETR")),
        ("paca", ("redundant and cluttered",), ("Barlow Twins", "foundation models", "per image", "other domains")),
        ("sparseformer", ("local and noisy", "raw RGB", "below DETR", "dense tasks"), ("scaling", "sparsification")),
        ("svit", ("`fold`, `unfold`", "depth-wise"), ("ImageNet-21K", "no direct negative social impact")),
    ],
)
def test_limits_and_outlook_of_the_paper_are_named(page, limits, outlook):
    assert all(words in section(page, "Limits") for words in limits)
    assert all(words in section(page, "Outlook") for words in outlook)
