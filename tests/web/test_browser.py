"""The page in a real browser: upload, see, click, compare, be refused. Desktop and phone."""

import shutil

import numpy as np
import pytest

from saccade.data.synthetic.photos import photo_paths
from saccade.web.look import first_token, token_at

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: apt-get install chromium")
pytest.importorskip("gradio", reason="the page needs the web extra: pip install 'saccade[web]'")
sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
CAT = str(photo_paths()["cat"])


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, running, request):
    """A fresh visitor; errors of the page's scripts fail the test."""
    width, height = SIZES[getattr(request, "param", "desktop")]
    context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True)
    visitor = context.new_page()
    errors: list[str] = []
    visitor.on("pageerror", lambda error: errors.append(str(error)))
    visitor.set_default_timeout(20_000)
    visitor.goto(running.url)
    visitor.wait_for_selector("#picture input[type=file]", state="attached")
    yield visitor
    context.close()
    assert not errors


def upload(page, path):
    page.set_input_files("#picture input[type=file]", str(path))


def seen(page, side="a"):
    """Until the answer is there."""
    page.wait_for_selector(f"#answers-{side} .answers li")
    page.wait_for_selector(f"#map-{side} img", state="attached")


def source(page, name):
    return page.get_attribute(f"#{name} img", "src")


@pytest.mark.parametrize("page", SIZES, indirect=True)
def test_a_photograph_is_answered_and_its_tokens_can_be_clicked(page, service):
    upload(page, CAT)
    seen(page)
    look = service.look(CAT, "svit_nano")
    last = len(look.stages)
    shown = page.locator("#answers-a .answers .class").all_inner_texts()
    assert shown == [name for name, _ in look.answers]
    assert f"Token {first_token(look, last)} of" in page.inner_text("#facts-a")

    mosaic = page.locator("#mosaic-a img")
    mosaic.scroll_into_view_if_needed()
    sync_api.expect(mosaic).to_be_visible()
    before, box = source(page, "map-a"), mosaic.bounding_box()
    # a place whose token is another one than is shown
    places = [(x, y) for x in (0.15, 0.5, 0.85) for y in (0.3, 0.6, 0.85)]
    x, y = next(p for p in places if token_at(look, last, *p) != first_token(look, last))
    mosaic.click(position={"x": x * box["width"], "y": y * box["height"]})
    wanted = token_at(look, last, x, y)
    page.wait_for_function(f"document.querySelector('#facts-a').innerText.startsWith('Token {wanted} of')")
    page.wait_for_function(f"document.querySelector('#map-a img').src !== {before!r}")
    assert page.input_value("#token-a input") == str(wanted)
    assert "in importance for" in page.inner_text("#facts-a")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


def test_stage_and_opacity_draw_anew(page):
    upload(page, CAT)
    seen(page)
    before = source(page, "mosaic-a")
    page.fill("#stage-a input[type=number]", "1")
    page.press("#stage-a input[type=number]", "Tab")
    page.wait_for_function(f"document.querySelector('#mosaic-a img').src !== {before!r}")
    sync_api.expect(page.locator("#stage-a")).to_contain_text("Stage 1, block 1")
    before = source(page, "mosaic-a")
    page.fill("#opacity input[type=number]", "0.4")
    page.press("#opacity input[type=number]", "Tab")
    page.wait_for_function(f"document.querySelector('#mosaic-a img').src !== {before!r}")


@pytest.mark.parametrize("page", SIZES, indirect=True)
def test_two_models_side_by_side_on_a_bundled_photograph(page, service):
    page.locator("#photos button.thumbnail-item, #photos .thumbnail-item").nth(3).click()  # the cat
    seen(page)
    page.click("#model-b input")
    page.get_by_role("option", name="vt_nano").click()
    seen(page, "b")
    first, second = (page.locator(f"#answers-{side} .class").first.inner_text() for side in "ab")
    assert first == service.look(CAT, "svit_nano").answers[0][0]
    assert second == service.look(CAT, "vt_nano").answers[0][0]
    left, right = (page.locator(f"#pane-{side}").bounding_box() for side in "ab")
    if page.viewport_size["width"] > 1000:
        assert right["x"] > left["x"] + left["width"] / 2
    else:
        assert right["y"] > left["y"]


def test_downloads(page, tmp_path):
    from PIL import Image

    upload(page, CAT)
    seen(page)
    for side, suffix in (("png-a", ".png"), ("json-a", ".json")):
        sync_api.expect(page.locator(f"#{side}")).to_be_enabled()
        with page.expect_download() as caught:
            page.click(f"#{side}")
        assert caught.value.suggested_filename == f"cat-svit_nano{suffix}"
        caught.value.save_as(tmp_path / f"got{suffix}")
    assert np.array(Image.open(tmp_path / "got.png")).std() > 20
    assert '"answers"' in (tmp_path / "got.json").read_text()


@pytest.mark.parametrize("page", SIZES, indirect=True)
def test_what_is_not_a_picture_is_refused_on_the_page(page, tmp_path):
    (tmp_path / "notes.txt").write_text("dear diary")
    upload(page, tmp_path / "notes.txt")
    sync_api.expect(page.get_by_text("notes.txt")).to_be_visible()  # the browser's side sees the kind of file
    (tmp_path / "holiday.jpg").write_text("a text that calls itself a picture")
    upload(page, tmp_path / "holiday.jpg")
    message = page.locator("#message .notice.error")
    sync_api.expect(message).to_have_text(
        "holiday.jpg is not a picture. JPEG, PNG, WebP, GIF, BMP and TIFF can be read here."
    )
    upload(page, CAT)  # and the page goes on
    seen(page)
    sync_api.expect(message).to_have_count(0)


def test_an_upload_that_is_too_large_is_refused_on_the_page(page, tmp_path):
    (tmp_path / "huge.jpg").write_bytes(b"\0" * 11_000_000)
    upload(page, tmp_path / "huge.jpg")
    sync_api.expect(page.get_by_text("size", exact=False).filter(has_text="maximum")).to_be_visible()


def test_the_segmentation_tab(page, pictures):
    page.get_by_role("tab", name="Segmentation").click()
    page.wait_for_selector("#segment-picture input[type=file]", state="attached")
    page.set_input_files("#segment-picture input[type=file]", str(pictures[0]))
    page.wait_for_selector("#segment-map img")
    assert page.locator("#segment-areas .areas li").count() >= 1
