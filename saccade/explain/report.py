"""An explanation as HTML: one section per image, figures embedded."""

import base64
from html import escape
from typing import TYPE_CHECKING

from saccade.explain.drawing.figure import Figure, Panel, encode_animation, encode_image
from saccade.reports.page import STYLE, document, table

if TYPE_CHECKING:
    from saccade.explain.explanation import Explanation
    from saccade.explain.image_explanation import ImageExplanation


def page(explanation: "Explanation") -> str:
    """The explanation as a complete HTML page."""
    return document(f"{explanation.model} explained", _body(explanation))


def fragment(explanation: "Explanation") -> str:
    """The explanation as an HTML fragment, for a notebook."""
    return f'<style>{STYLE}</style><div class="saccade">{_body(explanation)}</div>'


def figure_html(figure: Figure) -> str:
    """A figure as a grid of panels, with fewer columns on a narrow screen."""
    columns = max(min(figure.columns, len(figure.panels)), min(figure.columns, 3))
    narrow = 2 if columns > 2 else 1
    panels = "".join(_panel(panel) for panel in figure.panels)
    return (
        f'<div class="figure" id="{escape(figure.name)}"><h3>{escape(figure.title)}</h3>'
        f'<p class="soft">{escape(figure.caption)}</p>'
        f'<div class="panels" style="--columns: {columns}; --narrow: {narrow}">{panels}</div></div>'
    )


def image_html(panel: Panel) -> str:
    """The panel as an <img>: animations as WebP, matrices as PNG, photographs as JPEG."""
    kind = "webp" if panel.frames is not None else "png" if panel.sharp else "jpeg"
    content = encode_image(panel.image, kind.upper()) if panel.frames is None else encode_animation(panel.frames)
    text = base64.b64encode(content).decode()
    alt = escape(" ".join((panel.label, panel.note)).strip() or "image", quote=True)
    crisp = ' class="crisp"' if panel.sharp else ""
    return f'<img{crisp} loading="lazy" alt="{alt}" src="data:image/{kind};base64,{text}">'


def _panel(panel: Panel) -> str:
    chip = ""
    if panel.colour is not None:
        chip = f'<span class="chip" style="background: rgb{tuple(panel.colour)}"></span>'
    note = "".join(f"<small>{escape(line)}</small>" for line in panel.note.splitlines())
    caption = f"<figcaption>{chip}{escape(panel.label)}{note}</figcaption>" if panel.label or note else ""
    return f"<figure>{image_html(panel)}{caption}</figure>"


def _body(explanation: "Explanation") -> str:
    parts = [
        f"<main><h1>Tokens of {escape(explanation.model)}</h1>",
        f'<p class="soft">{explanation.parameters / 1e6:.1f} million parameters, weights: '
        f"{escape(explanation.weights)}. {_plural(len(explanation.images), 'image')}.</p>",
    ]
    if not explanation.trained:
        parts.append(
            '<p class="warn">The weights are randomly initialised, not trained: the figures show how the model groups '
            "pixels, and its predictions are meaningless.</p>"
        )
    if explanation.skipped:
        lines = "".join(f"<br>{escape(name)}: {escape(reason)}" for name, reason in explanation.skipped.items())
        parts.append(f'<p class="warn">Skipped:{lines}</p>')
    if len(explanation.images) > 1:
        links = "".join(f'<a href="#image-{i}">{escape(image.name)}</a>' for i, image in enumerate(explanation.images))
        parts.append(f"<nav>{links}</nav>")
    parts += [_image_section(image, i) for i, image in enumerate(explanation.images)]
    return "\n".join([*parts, "</main>"])


def _image_section(image: "ImageExplanation", number: int) -> str:
    figures = list(image.figures.values())
    original = Panel(figures[0].panels[0].image, image.name)
    predictions = ""
    if image.predictions:
        rows = [
            (escape(name), f"{value:.1%}", f'<span class="bar" style="width: {value * 140:.0f}px"></span>')
            for name, value in image.predictions
        ]
        predictions = table(("class", "probability", ""), rows, numeric=(1,))
    steps = table(("tokens", "from", "steps"), _step_rows(image), numeric=(0, 2))
    notes = "".join(f'<p class="warn">{escape(note)}</p>' for note in image.notes)
    return (
        f'<section class="image" id="image-{number}"><h2>{escape(image.name)}</h2><div class="head">'
        f"{image_html(original)}<div>{predictions}</div><div>{steps}</div></div>{notes}"
        + "".join(figure_html(figure) for figure in figures)
        + "</section>"
    )


def _step_rows(image: "ImageExplanation") -> list[tuple[str, str, str]]:
    """Number of tokens, map size, and number of steps with both, for a table."""
    kinds = [(step["tokens"], "a map of " + " x ".join(map(str, step["grid"]))) for step in image.steps]
    return [(str(kind[0]), kind[1], str(kinds.count(kind))) for kind in dict.fromkeys(kinds)]


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
