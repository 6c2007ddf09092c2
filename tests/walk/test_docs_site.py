"""The built site: no warnings, nothing from other hosts, search offline, equations linked to their lines."""

import importlib
import inspect
import re
import shutil
import subprocess
import sys

import pytest

from saccade import __all__ as public_names
from tests.walk.doc_pages import PAGES, ROOT
from tools.make_equations import find_places

pytest.importorskip("sphinx")
pytest.importorskip("furo")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """`make docs` on a copy, without running the examples, which test_docs_gallery.py does."""
    folder = tmp_path_factory.mktemp("site")
    ignore = shutil.ignore_patterns("_build", "examples", "*.rst.bak")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=ignore)
    pages = "README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md CITATION.cff LICENSE Makefile pyproject.toml llms.txt"
    for name in ("saccade", "tools", "tests", "recipes", "benchmarks", "examples", *pages.split()):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)  # MyST follows symbolic links
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    options = ["-D", "sphinx_gallery_conf.plot_gallery=0", str(folder / "docs"), str(folder / "html")]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return folder / "html"


def test_pages_load_nothing_from_other_hosts(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text()
        assert not re.search(r"<(?:script|img|iframe|source)[^>]*\bsrc=\"(?:https?:)?//", text), page
        assert not re.search(r"<link[^>]*rel=\"(?:stylesheet|preload|preconnect)\"[^>]*href=\"(?:https?:)?//", text), (
            page
        )
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?https?:|@import\s+['\"]?http", style.read_text()), style


def test_api_reference_has_every_public_name(site):
    text = (site / "api" / "saccade.html").read_text()
    assert [name for name in public_names if f'id="saccade.{name}"' not in text] == []


def test_api_reference_has_what_pages_import(site):
    """Functions and classes that code of the pages and examples imports from packages of saccade."""
    reference = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    texts = [page.read_text() for page in (*PAGES, *(ROOT / "docs/gallery").glob("*.py"))]
    imports = {match for text in texts for match in re.findall(r"^from (saccade\.[\w.]+) import ([\w, ]+)", text, re.M)}
    objects = [
        getattr(importlib.import_module(module), name) for module, names in imports for name in names.split(", ")
    ]
    defined = [value for value in objects if inspect.isfunction(value) or inspect.isclass(value)]
    names = {
        f"{value.__module__}.{value.__qualname__}".replace("saccade.ops._dispatch", "saccade.ops") for value in defined
    }
    assert len(names) > 15
    assert [name for name in sorted(names) if f'id="{name}"' not in reference] == []
    assert "saccade.explanation.adapters.captum.feature_mask" in names


def test_signatures_of_the_api_reference_are_readable(site):
    for page in (site / "api").glob("*.html"):
        assert not re.search(r"~\w+\.|&lt;factory&gt;| object at 0x", page.read_text()), page.name


def test_equation_of_a_family_page_links_to_its_line(site):
    place = find_places()["VT Eq. 5"][0]
    link = f'href="source/saccade/{place.file}.html#L-{place.line}"'
    for page in ("vt", "equations"):
        assert link in (site / f"{page}.html").read_text()
    source = (site / "source" / "saccade" / f"{place.file}.html").read_text()
    assert f'id="L-{place.line}"' in source
    line = source.partition(f'id="L-{place.line}"')[2].partition(f'id="L-{place.line + 1}"')[0]
    assert "scaled_dot_product_attention" in line


def test_figures_link_to_their_files(site):
    for page, file in (("index", "overview.png"), ("vt", "vt.png"), ("results", "segments.jpg")):
        pattern = rf'<a class="figure-link[^"]*" href="_images/{re.escape(file)}"><img'
        assert re.search(pattern, (site / f"{page}.html").read_text()), page


def test_local_links_of_the_site_exist(site):
    for page in site.rglob("*.html"):
        for link in re.findall(r"href=\"([^\"#?:]+)(?:[#?][^\"]*)?\"", page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(site)}: {link}"


@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_search_finds_the_line_of_vt_eq_5(site):
    """Opened as files, without a server: search, page, line."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        requested = []
        page.on("request", lambda request: requested.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.fill("input[name=q]", "VT Eq. 5")
        page.press("input[name=q]", "Enter")
        page.wait_for_selector("#search-results li a", timeout=60_000)
        titles = page.locator("#search-results li > a").all_inner_texts()
        assert "Equations" in titles[:5], titles
        page.locator("#search-results li > a", has_text="Equations").first.click()
        page.locator("a.equation", has_text=re.compile(r"^VT Eq\. 5$")).first.click()
        page.wait_for_load_state()
        place = find_places()["VT Eq. 5"][0]
        assert page.url.endswith(f"source/saccade/{place.file}.html#L-{place.line}")
        box = "i => document.getElementById(`L-${i}`).getBoundingClientRect().toJSON()"
        lines = f"[{place.line}, {place.line + 1}].map({box})"
        marked, following = page.evaluate(lines)  # in one call: the page still scrolls
        assert 0 < following["y"] - marked["y"] < 2 * marked["height"], "the next line is below the marked one"
        assert abs(following["x"] - marked["x"]) < 2
        browser.close()
    assert all(url.startswith(("file:", "data:")) for url in requested), requested
