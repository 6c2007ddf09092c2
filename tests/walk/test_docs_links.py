"""Links, anchors and figures of the Markdown pages; the contents of the site; generated files."""

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from PIL import Image

import saccade
from tests.walk.doc_pages import PAGES, ROOT
from tools import make_llms

DOCS = ROOT / "docs"
FAMILIES = {"vt": "VT", "svit": "SViT", "paca": "PaCa", "sparseformer": "SparseFormer", "video": "VideoSparseFormer"}
SITE_ONLY = {"examples/index", "examples/06_new_tokenizer"}  # pages that sphinx-gallery writes


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def tokens_of(page: Path) -> list[Token]:
    """Inline tokens (text, links, images) of a page."""
    parsed = MarkdownIt("gfm-like", {"linkify": False}).parse(page.read_text())
    return [child for token in parsed for child in token.children or ()]


def links(page: Path) -> list[str]:
    return [str(token.attrs["href"]) for token in tokens_of(page) if token.type == "link_open"]


def figures(page: Path) -> list[tuple[str, str]]:
    """(file, alternative text) of every image."""
    return [(str(token.attrs["src"]), token.content) for token in tokens_of(page) if token.type == "image"]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub names them."""
    parsed = MarkdownIt("gfm-like", {"linkify": False}).parse(page.read_text())
    titles = [
        "".join(child.content for child in parsed[i + 1].children or ())
        for i, token in enumerate(parsed)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_pages_have_links_and_figures():
    assert sum(len(links(page)) for page in PAGES) > 300
    assert sum(len(figures(page)) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    for link in links(page):
        if re.match(r"https?://[\w.-]+\.\w+", link) or link in SITE_ONLY:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link}: outside the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


def test_links_to_examples_have_scripts():
    for name in SITE_ONLY - {"examples/index"}:
        assert (DOCS / "gallery" / f"{Path(name).name}.py").is_file()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_are_images_with_a_description(page):
    for file, description in figures(page):
        with Image.open(page.parent / file) as image:
            image.load()
            assert min(image.size) >= 100, file
        assert len(description) > 5, file


def test_every_figure_is_on_a_page():
    shown = {(page.parent / file).resolve() for page in PAGES for file, _ in figures(page)}
    assert set((DOCS / "figures").iterdir()) - shown == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_family_page_has_every_part(family):
    """Idea, figure, equations, variants, options, limits, citation."""
    page = DOCS / f"{family}.md"
    text = page.read_text()
    idea = text.split("\n\n")[2]  # after title and paper
    assert len(re.findall(r"[.;:](?:\s|$)", idea)) >= 3
    assert figures(page)
    titles = " ".join(re.findall(r"^##+ (.+)$", text, re.MULTILINE))
    expected = (
        ("Limits", "Citation", "Models")
        if family == "video"
        else ("Equations", "Variants", "Options", "Limits", "Citation")
    )
    assert all(title in titles for title in expected), titles
    if family != "video":
        assert f"| {FAMILIES[family]} Eq" in text
        assert "@article{" in text


def test_every_page_is_in_the_table_of_contents():
    pages = {page for pages in make_llms.sections().values() for page in pages}
    assert {page for page in PAGES if page.is_relative_to(DOCS)} - pages == {DOCS / "index.md"}


def test_llms_txt_is_current():
    text = make_llms.FILE.read_text()
    assert text == make_llms.render(), "run python tools/make_llms.py"
    assert all(f"saccade.{name}" in text for name in saccade.__all__)
    for path in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / path).is_file(), path


def test_tokenizer_of_the_page_is_that_of_the_example():
    """docs/extending.md shows the class of docs/gallery/06_new_tokenizer.py, in at most 40 lines."""
    pattern = re.compile(r"^class WindowTokenizer.*?tokens=tokens\)$", re.MULTILINE | re.DOTALL)
    (shown,) = pattern.findall((DOCS / "extending.md").read_text())
    assert pattern.findall((DOCS / "gallery/06_new_tokenizer.py").read_text()) == [shown]
    assert len(shown.splitlines()) <= 40
