"""The page in a browser, at desktop and phone size: upload, click, compare, errors."""

import shutil

import numpy as np
import pytest

from saccade.data.synthetic.photos import photo_paths
from saccade.explanation.inspection import default_token, token_at

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
pytest.importorskip("gradio", reason="the page needs the web extra: pip install 'saccade[web]'")
sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
CAT = str(photo_paths()["cat"])
TIMEOUT = 60_000  # ms; only a failing test waits this long
# Gradio posts an event to queue/join and reads its result from queue/data, which closes after the last pending event.
COUNT_EVENTS = """
window.pendingEvents = 0; window.lastEvent = 0;
const send = window.fetch;
const finish = () => { window.pendingEvents--; window.lastEvent = performance.now(); };
window.fetch = async (...request) => {
    if (!String(request[0].url ?? request[0]).includes("/queue/")) return send(...request);
    window.pendingEvents++;
    try {
        const response = await send(...request);
        response.clone().text().then(finish, finish);
        return response;
    } catch (error) { finish(); throw error; }
};
"""


@pytest.fixture(scope="module")
def browser():
    sync_api.expect.set_options(timeout=TIMEOUT)
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
    tab.set_default_timeout(TIMEOUT)
    tab.add_init_script(COUNT_EVENTS)
    tab.goto(server.url)
    tab.wait_for_selector("#map-a img", state="attached")  # of the example
    wait_until_idle(tab)
    yield tab
    context.close()
    assert not errors


def upload(page, path):
    page.set_input_files("#image input[type=file]", str(path))


def wait_until_idle(page):
    """Wait until no event has been pending for half a second: Gradio starts a dependent event after a short gap."""
    page.wait_for_function("performance.now() > 500 + (window.pendingEvents ? performance.now() : window.lastEvent)")


def wait_for_predictions(page, service, path=CAT, side="a", model="svit_nano"):
    """Wait until the classes of an image are shown."""
    inspection = service.inspect(str(path), model)
    shown = page.locator(f"#predictions-{side} .bars .class")
    sync_api.expect(shown).to_have_text([name for name, _ in inspection.predictions])
    height, width = inspection.image.shape[:2]
    loaded = f"i => i && i.complete && i.naturalWidth === {width} && i.naturalHeight === {height}"
    page.wait_for_function(f"({loaded})(document.querySelector('#mosaic-{side} img'))")
    page.wait_for_selector(f"#map-{side} img", state="attached")
    wait_until_idle(page)


def source(page, name):
    return page.get_attribute(f"#{name} img", "src")


@pytest.mark.parametrize("page", SIZES, indirect=True)
def test_upload_shows_predictions_and_click_selects_a_token(page, service):
    upload(page, CAT)
    wait_for_predictions(page, service)
    inspection = service.inspect(CAT, "svit_nano")
    last = len(inspection.stages)
    assert f"Token {default_token(inspection, last)} of" in page.inner_text("#summary-a")

    mosaic = page.locator("#mosaic-a img")
    mosaic.scroll_into_view_if_needed()
    sync_api.expect(mosaic).to_be_visible()
    before, mosaic_before, box = source(page, "map-a"), source(page, "mosaic-a"), mosaic.bounding_box()
    labels = inspection.stages[-1].labels
    uniform = np.ones_like(labels, bool)  # positions at least 4 px from a border
    for axis in (0, 1):
        for shift in range(-4, 5):
            uniform &= np.roll(labels, shift, axis) == labels
    rows, columns = np.nonzero(uniform & (labels >= 0) & (labels != default_token(inspection, last)))
    middle = np.hypot(rows - labels.shape[0] / 2, columns - labels.shape[1] / 2).argmin()
    x, y = (columns[middle] + 0.5) / labels.shape[1], (rows[middle] + 0.5) / labels.shape[0]
    mosaic.click(position={"x": x * box["width"], "y": y * box["height"]})
    expected = token_at(inspection, last, x, y)
    page.wait_for_function(f"document.querySelector('#summary-a').innerText.startsWith('Token {expected} of')")
    page.wait_for_function(f"document.querySelector('#map-a img').src !== {before!r}")
    page.wait_for_function(f"document.querySelector('#mosaic-a img').src !== {mosaic_before!r}")  # its outline
    assert page.input_value("#token-a input") == str(expected)
    assert "Importance rank" in page.inner_text("#summary-a")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


def test_stage_and_opacity_redraw_the_mosaic(page, service):
    upload(page, CAT)
    wait_for_predictions(page, service)
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
    wait_for_predictions(page, service)
    page.click("#model-b input")
    page.get_by_role("option", name="vt_nano").click()
    wait_for_predictions(page, service, side="b", model="vt_nano")
    left, right = (page.locator(f"#pane-{side}").bounding_box() for side in "ab")
    if page.viewport_size["width"] > 1000:
        assert right["x"] > left["x"] + left["width"] / 2
    else:
        assert right["y"] > left["y"]


def test_downloads_are_png_and_json(page, service, tmp_path):
    from PIL import Image

    upload(page, CAT)
    wait_for_predictions(page, service)
    for button, suffix in (("png-a", ".png"), ("json-a", ".json")):
        with page.expect_download() as download:
            page.click(f"#{button}")
        assert download.value.suggested_filename == f"cat-svit_nano{suffix}"
        download.value.save_as(tmp_path / f"downloaded{suffix}")
    assert np.array(Image.open(tmp_path / "downloaded.png")).std() > 20
    assert '"predictions"' in (tmp_path / "downloaded.json").read_text()


@pytest.mark.parametrize("page", SIZES, indirect=True)
def test_page_rejects_a_file_that_is_not_an_image(page, service, tmp_path):
    (tmp_path / "notes.txt").write_text("dear diary")
    upload(page, tmp_path / "notes.txt")
    sync_api.expect(page.get_by_text("notes.txt")).to_be_visible()  # Gradio's client checks the file type
    message = page.locator("#message .notice.error")
    for name in ("holiday.jpg", "beach.jpg"):  # Gradio builds the component anew after its first change
        (tmp_path / name).write_bytes(np.random.default_rng(0).bytes(20_000))
        upload(page, tmp_path / name)
        text = f"{name} is not an image. Supported: JPEG, PNG, WebP, GIF, BMP and TIFF."
        sync_api.expect(message).to_have_text(text)
        page.wait_for_selector("#image input[type=file]", state="attached")
    assert page.locator(".toast-body").count() <= 1  # of notes.txt
    upload(page, CAT)  # the page still works
    wait_for_predictions(page, service)
    sync_api.expect(message).to_have_count(0)


def test_tiff_is_shown_as_png(page, service, tmp_path):
    from PIL import Image

    with Image.open(CAT) as cat:
        cat.save(tmp_path / "scan.tiff")
    upload(page, tmp_path / "scan.tiff")
    wait_for_predictions(page, service, tmp_path / "scan.tiff")
    page.wait_for_function("document.querySelector('#image img')?.naturalWidth > 0")


def test_page_opens_with_an_analysed_example(page, service):
    wait_for_predictions(page, service, service.photos["coffee"])
    sync_api.expect(page.locator("#message .notice.hint")).to_contain_text("An example is shown: coffee.")
    sync_api.expect(page.locator("#predictions-a")).to_contain_text("Randomly initialised weights")


def test_impossible_token_gives_a_message(page, service):
    count = service.inspect(str(service.photos["coffee"]), "svit_nano").stages[-1].step.count
    for given in ("500", "-3"):
        page.fill("#token-a input", given)
        page.press("#token-a input", "Tab")
        notice = page.locator("#summary-a .notice.error")
        sync_api.expect(notice).to_have_text(f"expected a token from 0 to {count - 1}, got {given}.")
    page.fill("#token-a input", "1")
    page.press("#token-a input", "Tab")
    sync_api.expect(page.locator("#summary-a")).to_contain_text(f"Token 1 of {count}")
    assert page.locator(".toast-body").count() == 0


def test_focus_of_a_dropdown_does_not_reset_the_token(page, service):
    page.fill("#token-a input", "1")
    page.press("#token-a input", "Tab")
    sync_api.expect(page.locator("#summary-a")).to_contain_text("Token 1 of")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.focus("#model-a input")
    page.focus("#token-a input")
    page.fill("#token-a input", "2")
    page.press("#token-a input", "Tab")
    sync_api.expect(page.locator("#summary-a")).to_contain_text("Token 2 of")
    wait_until_idle(page)
    assert sum("/queue/join" in url for url in requests) <= 2  # token 2 and its downloads
    assert page.input_value("#token-a input") == "2"


def test_failure_of_a_model_gives_a_message(page, service, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(service, "token", fail)
    page.fill("#token-a input", "1")
    page.press("#token-a input", "Tab")
    toast = page.locator(".toast-body")
    sync_api.expect(toast).to_contain_text("The model failed (RuntimeError). The server's log has the details.")
    assert "/secret/path" not in toast.inner_text()
    assert "/secret/path" in caplog.text


@pytest.mark.parametrize("page", ["phone"], indirect=True)
def test_results_come_below_the_input_on_a_phone(page):
    tops = [
        page.locator(name).first.bounding_box()["y"] for name in ("#image", "#photos", "#predictions-a", "#model-a")
    ]
    assert tops == sorted(tops)
    assert tops[2] < 844  # on the first screen
    for title in ("Tokens", "Segmentation", "Detection", "Video"):  # none is hidden in a menu
        sync_api.expect(page.get_by_role("tab", name=title)).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


def test_page_rejects_a_large_upload(page, tmp_path):
    (tmp_path / "huge.jpg").write_bytes(b"\0" * 11_000_000)
    upload(page, tmp_path / "huge.jpg")
    sync_api.expect(page.get_by_text("size", exact=False).filter(has_text="maximum")).to_be_visible()


def test_task_tabs_draw_and_list_predictions(page, images, video):
    files = {"Segmentation": images[0], "Detection": images[0], "Video": video}
    for title, path in files.items():
        task = title.lower()
        page.get_by_role("tab", name=title).click()
        page.wait_for_selector(f"#{task}-upload input[type=file]", state="attached")
        page.set_input_files(f"#{task}-upload input[type=file]", str(path))
        if task == "detection":  # scores of an untrained detector
            page.wait_for_selector("#detection-drawing img")
            page.fill("#detection-slider input[type=number]", "0.05")
            page.press("#detection-slider input[type=number]", "Tab")
        page.wait_for_selector(f"#{task}-drawing img")
        sync_api.expect(page.locator(f"#{task}-rows .bars li").first).to_be_visible()
    sync_api.expect(page.locator("#video-rows")).to_contain_text("motions knows 2 classes of motions, 91 % top-1")


def test_video_tab_rejects_random_bytes(page, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(np.random.default_rng(0).bytes(20_000))
    page.get_by_role("tab", name="Video").click()
    page.wait_for_selector("#video-upload input[type=file]", state="attached")
    page.set_input_files("#video-upload input[type=file]", str(tmp_path / "clip.mp4"))
    sync_api.expect(page.locator("#video-message .notice.error")).to_contain_text("clip.mp4 is not a video")
