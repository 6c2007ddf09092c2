"""The Gradio page: components and events. Their content comes from `service`, `inspection` and `fragments`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from saccade._extras import require
from saccade.web import fragments
from saccade.web.api import add_api
from saccade.web.image_input import image_input
from saccade.web.inspection import (
    Inspection,
    clamp_token,
    default_token,
    get_stage,
    mosaic_image,
    token_at,
    token_image,
)
from saccade.web.service import Service
from saccade.web.uploads import BadUpload

NO_MODEL = "none"
MODEL_QUEUE = {"concurrency_id": "models", "concurrency_limit": 2, "api_visibility": "private"}
HEAD = """<div id="head"><h1>A few tokens instead of every pixel</h1>
<p>Upload an image. The model groups its pixels into a few tokens and predicts from them. Every pixel of the mosaic has
the colour of its strongest token; click on it to see the map of that token.</p></div>"""
HINT = "Drop or paste an image, or choose a photograph."
SEGMENTATION_HINT = "Drop an image of a street."


class Pane(NamedTuple):
    """The components of one model."""

    model: Any
    predictions: Any
    mosaic: Any
    stage: Any
    token: Any
    summary: Any
    map: Any
    png: Any
    json: Any

    @property
    def outputs(self) -> list[Any]:
        """Components that change with the image."""
        return [self.predictions, self.mosaic, self.stage, self.token, self.summary, self.map, self.png, self.json]


def build_page(service: Service) -> Any:
    """Return the page as gr.Blocks, not yet launched."""
    gr = require("gradio", "web")
    with gr.Blocks(title="saccade", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.HTML(HEAD)
        with gr.Tabs():
            with gr.Tab("Tokens", id="tokens"):
                _tokens_tab(gr, service)
            with gr.Tab("Segmentation", id="segmentation"):
                _segmentation_tab(gr, service)
        add_api(gr, service)
    return page


def _tokens_tab(gr: Any, service: Service) -> None:
    names = service.catalogue.names()
    photos = list(service.photos.items())
    with gr.Row(equal_height=False):
        with gr.Column(scale=1, min_width=290):
            image = image_input(gr, label="Image", height=250, elem_id="image")
            gallery = gr.Gallery(
                [(str(path), name) for name, path in photos],
                label="Photographs",
                columns=4,
                allow_preview=False,
                show_label=False,
                height="auto",
                object_fit="cover",
                interactive=False,
                buttons=[],
                elem_id="photos",
                elem_classes="photos",
            )
            first = gr.Dropdown(names, value=names[0], label="Model", elem_id="model-a")
            second = gr.Dropdown([NO_MODEL, *names], value=NO_MODEL, label="Compare with", elem_id="model-b")
            opacity = gr.Slider(0, 1, 1, step=0.05, label="Overlay opacity", elem_id="opacity")
        with gr.Column(scale=3, min_width=290):
            message = gr.HTML(fragments.notice(HINT, "hint"), elem_id="message")
            with gr.Row(equal_height=False, elem_classes="side-by-side"):
                pane_a, column_a = _pane(gr, first, "a")
                pane_b, column_b = _pane(gr, second, "b")

    def show(path: str | None, model: str, opacity: float) -> list[Any]:
        return _show_inspection(gr, service, path, model, opacity)

    photo_chosen = gallery.select(_choose_photo(gr, photos), None, image, api_visibility="private", queue=False)
    for pane, column in ((pane_a, column_a), (pane_b, column_b)):
        inputs, outputs = [image, pane.model, opacity], [message, image, column, *pane.outputs]
        events = [
            image.input(show, inputs, outputs, **MODEL_QUEUE),
            pane.model.input(show, inputs, outputs, **MODEL_QUEUE),
            photo_chosen.then(show, inputs, outputs, **MODEL_QUEUE),
            *_connect_pane(gr, service, pane, image, opacity),
        ]
        inputs = [image, pane.model, pane.stage, pane.token]
        for event in events:
            event.then(_downloads(gr, service), inputs, [pane.png, pane.json], show_progress="hidden", **MODEL_QUEUE)


def _pane(gr: Any, model: Any, side: str) -> tuple[Pane, Any]:
    with gr.Column(visible=False, elem_id=f"pane-{side}", elem_classes="pane", min_width=280) as column:
        predictions = gr.HTML(elem_id=f"predictions-{side}")
        with gr.Row(equal_height=False):
            with gr.Column(min_width=260):
                mosaic = _drawing(gr, "Mosaic: click on a token", f"mosaic-{side}", "mosaic")
                stage = gr.Slider(1, 2, 1, step=1, label="Stage", elem_id=f"stage-{side}")
            with gr.Column(min_width=260):
                token_map = _drawing(gr, "Token map", f"map-{side}", "map")
                with gr.Row(equal_height=False):
                    with gr.Column(scale=1, min_width=84):
                        token = gr.Number(0, label="Token", precision=0, minimum=0, elem_id=f"token-{side}")
                    with gr.Column(scale=4, min_width=200):
                        summary = gr.HTML(elem_id=f"summary-{side}", elem_classes="summary", min_height=60)
        with gr.Row():
            png, json = (
                gr.DownloadButton(
                    f"Download {kind.upper()}", size="sm", elem_id=f"{kind}-{side}", min_width=100, interactive=False
                )
                for kind in ("png", "json")
            )
    return Pane(model, predictions, mosaic, stage, token, summary, token_map, png, json), column


def _drawing(gr: Any, label: str, name: str, kind: str, **options: Any) -> Any:
    """Return a read-only image component."""
    return gr.Image(
        label=label,
        interactive=False,
        format="webp",
        buttons=["fullscreen"],
        elem_id=name,
        elem_classes=["drawing", kind],
        **options,
    )


def _show_inspection(gr: Any, service: Service, path: str | None, model: str, opacity: float) -> list[Any]:
    """Return the message, the image, the column of a pane, and `Pane.outputs` for a new image or model."""
    unchanged = [gr.skip()] * 8
    if model == NO_MODEL:
        return [gr.skip(), gr.skip(), gr.update(visible=False), *unchanged]
    if not path:
        return [_message(gr, HINT, "hint"), gr.skip(), gr.update(visible=False), *unchanged]
    try:
        inspection = service.inspect(path, model)
    except BadUpload as error:
        return [_message(gr, str(error)), None, gr.update(visible=False), *unchanged]
    last = len(inspection.stages)
    token = default_token(inspection, last)
    title = f"{inspection.subject.name}: mosaic, click on a token"
    return [
        gr.update(visible=False),
        gr.skip(),
        gr.update(visible=True),
        fragments.predictions_list(inspection),
        gr.update(value=mosaic_image(inspection, last, opacity), label=title),
        gr.update(
            minimum=1, maximum=max(last, 2), value=last, interactive=last > 1, label=_stage_label(inspection, last)
        ),
        gr.update(value=token, maximum=get_stage(inspection, last).step.count - 1),
        fragments.token_summary(service.token(inspection, last, token)),
        token_image(inspection, last, token, opacity),
        gr.update(interactive=False),  # until `_downloads` has written the files
        gr.update(interactive=False),
    ]


def _message(gr: Any, text: str, kind: str = "error") -> Any:
    return gr.update(value=fragments.notice(text, kind), visible=True)


def _stage_label(inspection: Inspection, number: int) -> str:
    stage = get_stage(inspection, number)
    return f"{stage.title[:1].upper()}{stage.title[1:]}: {stage.step.count} tokens"


def _connect_pane(gr: Any, service: Service, pane: Pane, image: Any, opacity: Any) -> list[Any]:
    """Connect stage, token, click and opacity to what depends on them; return the events that change the token."""

    def with_inspection(handler: Callable[..., Any]) -> Callable[..., Any]:
        def run(path: str | None, model: str, *values: Any) -> Any:
            if not path or model == NO_MODEL:
                return gr.skip()
            try:
                return handler(service.inspect(path, model), *values)
            except BadUpload as error:
                raise gr.Error(str(error)) from error

        return run

    @with_inspection
    def change_stage(inspection: Inspection, stage: float, opacity: float) -> list[Any]:
        number, token = int(stage), default_token(inspection, int(stage))
        return [
            mosaic_image(inspection, number, opacity),
            gr.update(label=_stage_label(inspection, number)),
            gr.update(value=token, maximum=get_stage(inspection, number).step.count - 1),
            fragments.token_summary(service.token(inspection, number, token)),
            token_image(inspection, number, token, opacity),
        ]

    @with_inspection
    def change_token(inspection: Inspection, stage: float, token: float | None, opacity: float) -> list[Any]:
        index = clamp_token(inspection, int(stage), int(token or 0))
        return [
            fragments.token_summary(service.token(inspection, int(stage), index)),
            token_image(inspection, int(stage), index, opacity),
        ]

    @with_inspection
    def change_opacity(inspection: Inspection, stage: float, token: float | None, opacity: float) -> list[Any]:
        index = clamp_token(inspection, int(stage), int(token or 0))
        return [mosaic_image(inspection, int(stage), opacity), token_image(inspection, int(stage), index, opacity)]

    def click_mosaic(path: str | None, model: str, stage: float, opacity: float, event: Any) -> Any:
        if not path or model == NO_MODEL:
            return gr.skip()
        inspection = service.inspect(path, model)
        height, width = inspection.image.shape[:2]
        x, y = event.index  # pixels of the mosaic
        token = token_at(inspection, int(stage), (x + 0.5) / width, (y + 0.5) / height)
        return [token, *change_token(path, model, stage, token, opacity)]

    click_mosaic.__annotations__["event"] = gr.SelectData  # Gradio passes the event by this annotation
    source = [image, pane.model]
    quiet = MODEL_QUEUE | {"trigger_mode": "always_last", "show_progress": "hidden"}
    changed = [pane.token, pane.summary, pane.map]
    opacity.input(change_opacity, [*source, pane.stage, pane.token, opacity], [pane.mosaic, pane.map], **quiet)
    return [
        pane.stage.input(change_stage, [*source, pane.stage, opacity], [pane.mosaic, pane.stage, *changed], **quiet),
        pane.token.input(change_token, [*source, pane.stage, pane.token, opacity], changed[1:], **quiet),
        pane.mosaic.select(click_mosaic, [*source, pane.stage, opacity], changed, **quiet),
    ]


def _choose_photo(gr: Any, photos: list[tuple[str, Any]]) -> Callable[..., str]:
    def choose(event: Any) -> str:
        return str(photos[event.index][1])

    choose.__annotations__["event"] = gr.SelectData
    return choose


def _downloads(gr: Any, service: Service) -> Callable[..., Any]:
    def downloads(path: str | None, model: str, stage: float, token: float | None) -> Any:
        if not path or model == NO_MODEL:
            return gr.skip()
        try:
            files = service.write_inspection(service.inspect(path, model), int(stage), int(token or 0))
            return [gr.update(value=file, interactive=True) for file in files]
        except BadUpload:
            return gr.skip()

    return downloads


def _segmentation_tab(gr: Any, service: Service) -> None:
    names = service.catalogue.names("segmentation")
    if not names:
        gr.HTML(
            fragments.notice(
                "No segmentation model is available. Train one with recipes/small/paca_nano_paca_camvid.yaml, then run "
                "saccade serve --checkpoint runs/paca_nano_camvid.",
                "hint",
            ),
            elem_id="no-segmenter",
        )
        return
    with gr.Row(equal_height=False):
        with gr.Column(scale=1, min_width=290):
            image = image_input(gr, label="Image", height=250, elem_id="segment-image")
            model = gr.Dropdown(names, value=names[0], label="Model", elem_id="segment-model")
            opacity = gr.Slider(0, 1, 0.55, step=0.05, label="Overlay opacity", elem_id="segment-opacity")
        with gr.Column(scale=3, min_width=290):
            message = gr.HTML(fragments.notice(SEGMENTATION_HINT, "hint"), elem_id="segment-message")
            drawing = _drawing(gr, "Segmentation", "segment-map", "map", visible=False)
            areas = gr.HTML(elem_id="segment-areas")
            with gr.Row():
                png = gr.DownloadButton("Download PNG", size="sm", visible=False)
                json = gr.DownloadButton("Download JSON", size="sm", visible=False)

    def show(path: str | None, name: str, opacity: float) -> list[Any]:
        hidden = gr.update(visible=False)
        if not path:
            return [_message(gr, SEGMENTATION_HINT, "hint"), gr.skip(), hidden, "", hidden, hidden]
        try:
            segmentation = service.segment(path, name)
        except BadUpload as error:
            return [_message(gr, str(error)), None, hidden, "", hidden, hidden]
        files = service.write_segmentation(segmentation, opacity)
        return [
            hidden,
            gr.skip(),
            gr.update(value=segmentation.draw(opacity), visible=True),
            fragments.areas_list(segmentation.areas()),
            *(gr.update(value=file, visible=True) for file in files),
        ]

    inputs, outputs = [image, model, opacity], [message, image, drawing, areas, png, json]
    for trigger in (image.input, model.input):
        trigger(show, inputs, outputs, **MODEL_QUEUE)
    opacity.input(show, inputs, outputs, trigger_mode="always_last", show_progress="hidden", **MODEL_QUEUE)
