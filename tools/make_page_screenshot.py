"""Take the screenshot of `saccade serve` in docs/serve.md: python tools/make_page_screenshot.py (needs chromium)."""

import io
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from PIL import Image
from playwright.sync_api import sync_playwright

from saccade.data.synthetic.photos import photo_paths
from saccade.web.catalogue import Catalogue
from saccade.web.server import start
from saccade.web.service import Service

COFFEE = (0.5, 0.35)  # position of the coffee in coffee.jpg
OUT = Path(__file__).parent.parent / "docs/figures/serve.jpg"


def main() -> None:
    server = start(Service(Catalogue()))
    names = server.service.catalogue.names()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(server.url)
            page.wait_for_selector("#image input[type=file]", state="attached")
            page.set_input_files("#image input[type=file]", str(photo_paths()["coffee"]))
            page.wait_for_selector("#map-a img")
            page.click("#model-b input")
            page.get_by_role("option", name=names[1], exact=True).click()
            page.wait_for_selector("#map-b img", state="attached")
            mosaic = page.locator("#mosaic-a img")
            box, before = mosaic.bounding_box(), page.get_attribute("#map-a img", "src")
            assert box is not None  # the mosaic is visible
            mosaic.click(position={"x": COFFEE[0] * box["width"], "y": COFFEE[1] * box["height"]})
            page.wait_for_function(f"document.querySelector('#map-a img').src !== {before!r}")
            page.mouse.move(0, 0)
            page.locator("#png-b").scroll_into_view_if_needed()
            page.locator("#png-b:enabled").wait_for()
            page.wait_for_load_state("networkidle")
            shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
            browser.close()
    finally:
        server.close()
    shot.save(OUT, quality=76, optimize=True)
    print(f"wrote {OUT} {shot.size}")


if __name__ == "__main__":
    main()
