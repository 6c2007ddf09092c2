"""The HTTP API: four named functions, for Gradio's client and for curl. See docs/serve.md."""

from typing import Any

from saccade.web.look import facts, mosaic_picture, token_at, token_picture
from saccade.web.picture_input import picture_input
from saccade.web.service import Service
from saccade.web.uploads import BadUpload


def add_api(gr: Any, service: Service) -> None:
    """Doors without a place on the page: /look, /mosaic, /token and /segment."""
    names = service.catalogue.names()
    picture = picture_input(gr, label="image", visible=False)
    model = gr.Dropdown(names, value=names[0], label="model", visible=False, allow_custom_value=True)
    stage = gr.Number(99, label="stage", visible=False, precision=0)
    opacity = gr.Number(1, label="opacity", visible=False)
    x, y = gr.Number(0.5, label="x", visible=False), gr.Number(0.5, label="y", visible=False)
    found = gr.JSON(label="facts", visible=False)
    drawn = gr.Image(label="picture", format="png", visible=False)

    def look(image: str, model: str) -> dict[str, Any]:
        """What a model says about a picture: first five classes, stages, importance of every token."""
        return facts(_ask(lambda: service.look(image, model)))

    def mosaic(image: str, model: str, stage: int, opacity: float):
        """Which token leads where, at a stage (from 1; beyond the last is the last)."""
        return mosaic_picture(_ask(lambda: service.look(image, model)), int(stage), opacity)

    def token(image: str, model: str, stage: int, x: float, y: float):
        """The token that leads at x, y (from 0 to 1): its map and its importance."""
        looked = _ask(lambda: service.look(image, model))
        number = token_at(looked, int(stage), x, y)
        return token_picture(looked, int(stage), number), service.token(looked, int(stage), number)

    def segment(image: str, model: str, opacity: float):
        """A class for every pixel: the overlay, and the area of every class."""
        segmented = _ask(lambda: service.segment(image, model))
        return segmented.draw(opacity), {"model": segmented.model, "areas": segmented.areas()}

    def _ask(work: Any) -> Any:
        try:
            return work()
        except (BadUpload, ValueError) as error:  # ours: they say what to do
            raise gr.Error(str(error), print_exception=False) from error

    limit = {"concurrency_id": "models", "concurrency_limit": 2}
    door = gr.Button(visible=False)
    door.click(look, [picture, model], found, api_name="look", **limit)
    door.click(mosaic, [picture, model, stage, opacity], drawn, api_name="mosaic", **limit)
    door.click(token, [picture, model, stage, x, y], [drawn, found], api_name="token", **limit)
    if service.catalogue.names("segmentation"):
        segmenters = service.catalogue.names("segmentation")
        which = gr.Dropdown(segmenters, value=segmenters[0], label="model", visible=False, allow_custom_value=True)
        door.click(segment, [picture, which, opacity], [drawn, found], api_name="segment", **limit)
