"""The HTTP API: four named endpoints for Gradio's client and curl. See docs/serve.md."""

from collections.abc import Callable
from typing import Any

from saccade.web.image_input import image_input
from saccade.web.inspection import mosaic_image, summarize, token_at, token_image
from saccade.web.service import Service
from saccade.web.uploads import BadUpload


def add_api(gr: Any, service: Service) -> None:
    """Add the endpoints /inspect, /mosaic, /token and /segment, without visible components."""
    names = service.catalogue.names()
    image = image_input(gr, label="image", visible=False)
    model = gr.Dropdown(names, value=names[0], label="model", visible=False, allow_custom_value=True)
    stage = gr.Number(99, label="stage", visible=False, precision=0)
    opacity = gr.Number(1, label="opacity", visible=False)
    x, y = gr.Number(0.5, label="x", visible=False), gr.Number(0.5, label="y", visible=False)
    result = gr.JSON(label="result", visible=False)
    drawing = gr.Image(label="drawing", format="png", visible=False)

    def inspect(image: str, model: str) -> dict[str, Any]:
        """Top five classes, stages, and the importance of every token."""
        return summarize(checked(lambda: service.inspect(image, model)))

    def mosaic(image: str, model: str, stage: int, opacity: float) -> Any:
        """The strongest token of every pixel at a stage (counted from 1, clamped to the last)."""
        return mosaic_image(checked(lambda: service.inspect(image, model)), int(stage), opacity)

    def token(image: str, model: str, stage: int, x: float, y: float) -> Any:
        """The strongest token at x, y (in [0, 1]): its map and its importance."""
        inspection = checked(lambda: service.inspect(image, model))
        index = token_at(inspection, int(stage), x, y)
        return token_image(inspection, int(stage), index), service.token(inspection, int(stage), index)

    def segment(image: str, model: str, opacity: float) -> Any:
        """The segmentation overlay and the area of every class."""
        segmentation = checked(lambda: service.segment(image, model))
        return segmentation.draw(opacity), {"model": segmentation.model, "areas": segmentation.areas()}

    def checked(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (BadUpload, ValueError) as error:  # their messages are written for users
            raise gr.Error(str(error), print_exception=False) from error

    limit = {"concurrency_id": "models", "concurrency_limit": 2}
    trigger = gr.Button(visible=False)  # Gradio needs an event to attach an endpoint to
    trigger.click(inspect, [image, model], result, api_name="inspect", **limit)
    trigger.click(mosaic, [image, model, stage, opacity], drawing, api_name="mosaic", **limit)
    trigger.click(token, [image, model, stage, x, y], [drawing, result], api_name="token", **limit)
    if service.catalogue.names("segmentation"):
        segmenters = service.catalogue.names("segmentation")
        segmenter = gr.Dropdown(segmenters, value=segmenters[0], label="model", visible=False, allow_custom_value=True)
        trigger.click(segment, [image, segmenter, opacity], [drawing, result], api_name="segment", **limit)
