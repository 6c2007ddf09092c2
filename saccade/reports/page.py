"""Self-contained HTML pages from the Jinja2 templates in templates/: inline stylesheet, embedded images, no script."""

import base64
import io
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from saccade._extras import require

STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


class Thumbnail(NamedTuple):
    """An image of a page with its caption."""

    url: str
    label: str = ""
    note: str = ""  # further lines
    colour: tuple[int, int, int] | None = None  # of a chip beside the label
    sharp: bool = False  # enlarge with visible pixels
    name: str = ""  # of the file, as a tooltip


@cache
def environment() -> Any:
    """Return the Jinja2 environment; values are escaped, an undefined one is an error."""
    jinja2 = require("jinja2", "train")
    folder = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    options = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    templates = jinja2.Environment(loader=folder, autoescape=True, **options)
    templates.globals["style"] = STYLE
    return templates


def render(template: str, *, fragment: bool = False, **values: Any) -> str:
    """Return a page; with `fragment`, its content and stylesheet alone, for a notebook."""
    text = environment().get_template(template).render(fragment=fragment, **values)
    return text.encode("utf-8", "replace").decode()  # file names that are not UTF-8 have surrogates


def part(name: str, *values: Any, **options: Any) -> Any:
    """Return a macro of parts.html as markup."""
    return getattr(environment().get_template("parts.html").module, name)(*values, **options)


def data_url(content: bytes, kind: str) -> str:
    """Return an image file as a data URL; `kind` is png, jpeg or webp."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image_figure(image: Image.Image, name: str, label: str, note: str = "", side: int = 128) -> Thumbnail:
    """Return a Pillow image, resized to `side` px, with its caption; a smaller one is enlarged with visible pixels."""
    factor = side / max(image.size)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    buffer = io.BytesIO()
    resampling = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    image.resize(size, resampling).save(buffer, "JPEG", quality=85)
    return Thumbnail(data_url(buffer.getvalue(), "jpeg"), label, note, name=name)
