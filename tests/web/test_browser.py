"""The page in a browser, at desktop and phone size: upload, click, compare, errors."""

import shutil

import numpy as np
import pytest

from saccade.data.synthetic.photos import photo_paths
from saccade.web.inspection import default_token, token_at

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
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
def page(browser, server, request):
    """A new browser session; a JavaScript error fails the test."""
    width, height = SIZES[getattr(request, "param", "desktop")]
    context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True)
    tab = context.new_page()
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.set_default_timeout(20_000)
    tab.goto(server.url)
    tab.wait_for_selector("#image input[type=file]", state="attached")
    yield tab
    context.close()
    assert not errors


def upload(page, path):
    page.set_input_files("#image input[type=file]", str(path))


def wait_for_predictions(page, side="a"):
    page.wait_for_selector(f"#predictions-{side} .predictions li")
    page.wait_for_selector(f"#map-{side} img", state="attached")


def source(page, name):
    return page.get_attribute(f"#{name} img", "src")


@pytest.mark.parametrize("page", SIZES, indirect=True)
def test_upload_shows_predictions_and_click_selects_a_token(page, service):
    upload(page, CAT)
    wait_for_predictions(page)
    inspection = service.inspect(CAT, "svit_nano")
    last = len(inspection.stages)
    shown = page.locator("#predictions-a .predictions .class").all_inner_texts()
    assert shown == [name for name, _ in inspection.predictions]
    assert f"Token {default_token(inspection, last)} of" in page.inner_text("#summary-a")

    mosaic = page.locator("#mosaic-a img")
    mosaic.scroll_into_view_if_needed()
    sync_api.expect(mosaic).to_be_visible()
    before, box = source(page, "map-a"), mosaic.bounding_box()
    # a position with another token than the one that is shown
    positions = [(x, y) for x in (0.15, 0.5, 0.85) for y in (0.3, 0.6, 0.85)]
    x, y = next(p for p in positions if token_at(inspection, last, *p) != default_token(inspection, last))
    mosaic.click(position={"x": x * box["width"], "y": y * box["height"]})
    expected = token_at(inspection, last, x, y)
    page.wait_for_function(f"document.querySelector('#summary-a').innerText.startsWith('Token {expected} of')")
    page.wait_for_function(f"document.querySelector('#map-a img').src !== {before!r}")
    assert page.input_value("#token-a input") == str(expected)
    assert "Importance rank" in page.inner_text("#summary-a")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


def test_stage_and_opacity_redraw_the_mosaic(page):
    upload(page, CAT)
    wait_for_predictions(page)
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
def test_two_models_are_compared_on_a_photograph(page, service):
    page.locator("#photos button.thumbnail-item, #photos .thumbnail-item").nth(3).click()  # the cat
    wait_for_predictions(page)
    page.click("#model-b input")
    page.get_by_role("option", name="vt_nano").click()
    wait_for_predictions(page, "b")
    first, second = (page.locator(f"#predictions-{side} .class").first.inner_text() for side in "ab")
    assert first == service.inspect(CAT, "svit_nano").predictions[0][0]
    assert second == service.inspect(CAT, "vt_nano").predictions[0][0]
    left, right = (page.locator(f"#pane-{side}").bounding_box() for side in "ab")
    if page.viewport_size["width"] > 1000:
        assert right["x"] > left["x"] + left["width"] / 2
    else:
        assert right["y"] > left["y"]


def test_downloads_are_png_and_json(page, tmp_path):
    from PIL import Image

    upload(page, CAT)
    wait_for_predictions(page)
    for button, suffix in (("png-a", ".png"), ("json-a", ".json")):
        sync_api.expect(page.locator(f"#{button}")).to_be_enabled()
        with page.expect_download() as download:
            page.click(f"#{button}")
        assert download.value.suggested_filename == f"cat-svit_nano{suffix}"
        download.value.save_as(tmp_path / f"downloaded{suffix}")
    assert np.array(Image.open(tmp_path / "downloaded.png")).std() > 20
    assert '"predictions"' in (tmp_path / "downloaded.json").read_text()


@pytest.mark.parametrize("page", SIZES, indirect=True)
def test_page_rejects_a_file_that_is_not_an_image(page, tmp_path):
    (tmp_path / "notes.txt").write_text("dear diary")
    upload(page, tmp_path / "notes.txt")
    sync_api.expect(page.get_by_text("notes.txt")).to_be_visible()  # Gradio's client checks the file type
    (tmp_path / "holiday.jpg").write_text("text with the suffix of an image")
    upload(page, tmp_path / "holiday.jpg")
    message = page.locator("#message .notice.error")
    sync_api.expect(message).to_have_text("holiday.jpg is not an image. Supported: JPEG, PNG, WebP, GIF, BMP and TIFF.")
    upload(page, CAT)  # the page still works
    wait_for_predictions(page)
    sync_api.expect(message).to_have_count(0)


def test_page_rejects_a_large_upload(page, tmp_path):
    (tmp_path / "huge.jpg").write_bytes(b"\0" * 11_000_000)
    upload(page, tmp_path / "huge.jpg")
    sync_api.expect(page.get_by_text("size", exact=False).filter(has_text="maximum")).to_be_visible()


def test_segmentation_tab_lists_areas(page, images):
    page.get_by_role("tab", name="Segmentation").click()
    page.wait_for_selector("#segment-image input[type=file]", state="attached")
    page.set_input_files("#segment-image input[type=file]", str(images[0]))
    page.wait_for_selector("#segment-map img")
    assert page.locator("#segment-areas .areas li").count() >= 1
