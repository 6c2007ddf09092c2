"""An explanation as HTML: one section per image, figures embedded."""

from typing import TYPE_CHECKING, Any

from saccade.explanation.drawing.figure import Figure, Panel, encode_animation, encode_image
from saccade.reports.page import Thumbnail, data_url, render

if TYPE_CHECKING:
    from saccade.explanation.explain import Explanation
    from saccade.explanation.image_explanation import ImageExplanation


def page(explanation: "Explanation", fragment: bool = False) -> str:
    """The explanation as a complete HTML page, or as a fragment for a notebook."""
    images = [_image_section(image) for image in explanation.images]
    return render("explanation.html", fragment=fragment, explanation=explanation, images=images)


def figure_section(figure: Figure) -> dict[str, Any]:
    """A figure for the macro `figure` of the templates."""
    columns = max(min(figure.columns, len(figure.panels)), min(figure.columns, 3))
    return figure._asdict() | {"columns": columns, "panels": [thumbnail(panel) for panel in figure.panels]}


def thumbnail(panel: Panel) -> Thumbnail:
    """The panel with its image embedded: animations as WebP, matrices as PNG, photographs as JPEG."""
    kind = "webp" if panel.frames is not None else "png" if panel.sharp else "jpeg"
    content = encode_image(panel.image, kind.upper()) if panel.frames is None else encode_animation(panel.frames)
    return Thumbnail(data_url(content, kind), panel.label, panel.note, panel.colour, panel.sharp)


def _image_section(image: "ImageExplanation") -> dict[str, Any]:
    figures = list(image.figures.values())
    kinds = [(step["tokens"], "a map of " + " x ".join(map(str, step["grid"]))) for step in image.steps]
    return {
        "name": image.name,
        "original": thumbnail(Panel(figures[0].panels[0].image, image.name)),
        "predictions": image.predictions,
        "steps": [(*kind, kinds.count(kind)) for kind in dict.fromkeys(kinds)],
        "notes": image.notes,
        "figures": [figure_section(figure) for figure in figures],
    }
