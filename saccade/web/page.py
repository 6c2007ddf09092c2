"""The Gradio page: components and events. Their content comes from `service`, `inspection` and `saccade.reports`."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import gradio as gr
import numpy as np

from saccade import Classification, Detections, Prediction, Segmentation
from saccade.explanation import (
    Inspection,
    clamp_token,
    default_token,
    get_stage,
    mosaic_image,
    token_at,
    token_image,
)
from saccade.reports import part
from saccade.web.service import Service, above
from saccade.web.uploads import BadUpload

NO_MODEL = "none"
EXAMPLE = "coffee"  # analysed when the page opens, and while there is no upload
MODEL_QUEUE = {"concurrency_id": "models", "concurrency_limit": 2, "api_visibility": "private"}
HINT = f"An example is shown: {EXAMPLE}. Drop or paste your own image, or choose a photograph."


class TaskTab(NamedTuple):
    """What differs between the tabs of the tasks other than classification."""

    title: str
    task: str
    hint: str
    training: str  # how to get such a model


TABS = (
    TaskTab(
        "Segmentation",
        "segmentation",
        "Drop an image of a street.",
        "Train one with recipes/small/paca_nano_paca_camvid.yaml, then run saccade serve --checkpoint runs/mine.",
    ),
    TaskTab(
        "Detection",
        "detection",
        "Drop an image with objects.",
        "Train one with saccade train --model svit_nano --head mask_rcnn --data coco/ --out runs/mine, then run "
        "saccade serve --checkpoint runs/mine.",
    ),
    TaskTab(
        "Video",
        "video",
        "Drop a short video.",
        "Train one on a folder of videos, then run saccade serve --checkpoint runs/mine.",
    ),
)


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
    with gr.Blocks(title="saccade", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.HTML(part("web_head"), elem_classes="saccade")
        with gr.Tabs():
            with gr.Tab("Tokens", id="tokens"):
                _tokens_tab(service, page)
            for tab in TABS:
                with gr.Tab(tab.title, id=tab.task):
                    _task_tab(service, tab)
    return page


def _checked(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of an event, whose errors are shown as messages; Gradio would show "Error"."""

    @wraps(handler)
    def run(*values: Any) -> Any:
        try:
            return handler(*values)
        except ValueError as error:  # messages written for users
            raise gr.Error(str(error), title="Not possible", print_exception=False) from error
        except Exception as error:
            logging.getLogger("saccade").exception("a request of the page failed")
            text = f"The model failed ({type(error).__name__}). The server's log has the details."
            raise gr.Error(text, title="Failed", print_exception=False) from error

    return run


def _upload(component: Any) -> Any:
    """Make the path of the upload the value of an image or video component.

    Gradio would decode the file first and report its own error; `uploads` checks it instead. An event must not return
    gr.skip() or gr.update() for such a component: Gradio would build it anew, with its own `preprocess`.
    """
    component.preprocess = lambda payload: None if payload is None else payload.path
    return component


def _image_input(**options: Any) -> Any:
    options |= {"type": "filepath", "sources": ["upload", "webcam", "clipboard"], "image_mode": None, "height": 250}
    return _upload(gr.Image(**options))


def _html(value: Any = None, **options: Any) -> Any:
    return gr.HTML(value, elem_classes="saccade", **options)


def _tokens_tab(service: Service, page: Any) -> None:
    names = service.catalogue.names()
    if not names:
        _html(part("notice", "No image classifier is offered. Start without --model.", "hint"))
        return
    photos = list(service.photos.items())
    with gr.Row(equal_height=False, elem_classes="saccade-layout"):
        with gr.Column(elem_classes="input"):
            image = _image_input(label="Image", elem_id="image")
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
                elem_classes="saccade-photos",
            )
        with gr.Column(elem_classes="results"):
            message = _html(part("notice", HINT, "hint"), elem_id="message")
            with gr.Row(equal_height=False):
                column_a, *parts_a = _pane("a")
                column_b, *parts_b = _pane("b")
        with gr.Column(elem_classes="options"):
            pane_a = Pane(gr.Dropdown(names, value=names[0], label="Model", elem_id="model-a"), *parts_a)
            choices = [NO_MODEL, *names]
            pane_b = Pane(gr.Dropdown(choices, value=NO_MODEL, label="Compare with", elem_id="model-b"), *parts_b)
            opacity = gr.Slider(0, 1, 1, step=0.05, label="Overlay opacity", elem_id="opacity")

    def show(path: str | None, model: str, opacity: float) -> list[Any]:
        return _show_inspection(service, path, model, opacity)

    def compare(path: str | None, model: str, opacity: float) -> list[Any]:
        return show(path, model, opacity)[2:]  # the first pane shows messages

    photo_chosen = gallery.select(_choose_photo(photos), None, image, api_visibility="private", queue=False)
    outputs_a, outputs_b = [message, image, column_a, *pane_a.outputs], [column_b, *pane_b.outputs]
    for pane, handler, outputs in ((pane_a, _checked(show), outputs_a), (pane_b, _checked(compare), outputs_b)):
        inputs = [image, pane.model, opacity]
        triggers = [image.input, pane.model.change, photo_chosen.then]  # `input` fires when a dropdown loses focus
        if pane is pane_a:
            triggers.append(page.load)
        events = [trigger(handler, inputs, outputs, **MODEL_QUEUE) for trigger in triggers]
        for event in events + _connect_pane(service, pane, image, opacity):
            chosen = [image, pane.model, pane.stage, pane.token]
            event.then(_downloads(service), chosen, [pane.png, pane.json], show_progress="hidden", **MODEL_QUEUE)


def _pane(side: str) -> tuple[Any, ...]:
    """Return the column of one model and the components of `Pane` in it."""
    with gr.Column(visible=False, elem_id=f"pane-{side}", elem_classes="pane", min_width=280) as column:
        predictions = _html(elem_id=f"predictions-{side}")
        with gr.Row(equal_height=False):
            with gr.Column(min_width=260):
                mosaic = _drawing("Mosaic: click on a token", f"mosaic-{side}", "mosaic")
                stage = gr.Slider(1, 2, 1, step=1, label="Stage", elem_id=f"stage-{side}")
            with gr.Column(min_width=260):
                token_map = _drawing("Token map", f"map-{side}", "map")
                with gr.Row(equal_height=False):
                    with gr.Column(scale=1, min_width=84):
                        token = gr.Number(0, label="Token", precision=0, elem_id=f"token-{side}")
                    with gr.Column(scale=4, min_width=200):
                        summary = _html(elem_id=f"summary-{side}", min_height=60)
        png, json = _download_buttons(side)
    return column, predictions, mosaic, stage, token, summary, token_map, png, json


def _download_buttons(name: str) -> tuple[Any, Any]:
    with gr.Row():
        png, json = (
            gr.DownloadButton(
                f"Download {kind.upper()}", size="sm", elem_id=f"{kind}-{name}", min_width=100, interactive=False
            )
            for kind in ("png", "json")
        )
    return png, json


def _drawing(label: str, name: str, kind: str, **options: Any) -> Any:
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


def _inspect(service: Service, path: str | None, model: str) -> Inspection:
    """Inspect the upload, or the example while there is none."""
    return service.inspect(path or str(service.photos[EXAMPLE]), model)


def _show_inspection(service: Service, path: str | None, model: str, opacity: float) -> list[Any]:
    """Return the message, the image, the column of a pane, and `Pane.outputs` for a new image or model."""
    unchanged = [gr.skip()] * 8
    if model == NO_MODEL:
        return [gr.skip(), path, gr.update(visible=False), *unchanged]
    try:
        inspection = _inspect(service, path, model)
    except BadUpload as error:
        return [_message(str(error)), None, gr.update(visible=False), *unchanged]
    last = len(inspection.stages)
    token = default_token(inspection, last)
    title = f"{inspection.subject.name}: mosaic, click on a token"
    return [
        gr.update(visible=False) if path else _message(HINT, "hint"),
        service.displayable(path),
        gr.update(visible=True),
        show_predictions(service, inspection, model),
        gr.update(value=mosaic_image(inspection, last, opacity, token), label=title),
        gr.update(
            minimum=1, maximum=max(last, 2), value=last, interactive=last > 1, label=_stage_label(inspection, last)
        ),
        token,
        part("token", service.token(inspection, last, token)),
        token_image(inspection, last, token, opacity),
        gr.update(interactive=False),  # until `_downloads` has written the files
        gr.update(interactive=False),
    ]


def _message(text: str, kind: str = "error") -> Any:
    return gr.update(value=part("notice", text, kind), visible=True)


def show_predictions(service: Service, inspection: Inspection, model: str) -> Any:
    """Return the top five classes, what the model knows, its doubt, token count, input size and time."""
    (height, width), grid = inspection.inputs.shape[2:], inspection.observation.steps[0].trace.size
    facts = f"{inspection.stages[0].step.count} tokens, {grid[0] * grid[1]:,} pixels in the first map · "
    facts += f"{width} × {height} px · {1000 * inspection.seconds:.0f} ms"
    return part("result", service.catalogue.entry(model), inspection.predictions, facts, inspection.doubt)


def _stage_label(inspection: Inspection, number: int) -> str:
    stage = get_stage(inspection, number)
    return f"{stage.title[:1].upper()}{stage.title[1:]}: {stage.step.count} tokens"


def _connect_pane(service: Service, pane: Pane, image: Any, opacity: Any) -> list[Any]:
    """Connect stage, token, click and opacity to what depends on them; return the events that change the token."""

    def with_inspection(handler: Callable[..., Any]) -> Callable[..., Any]:
        def run(path: str | None, model: str, *values: Any) -> Any:
            return gr.skip() if model == NO_MODEL else handler(_inspect(service, path, model), *values)

        return _checked(run)

    def draw(inspection: Inspection, number: int, token: int, opacity: float) -> list[Any]:
        """Return mosaic, summary and map of a token."""
        return [
            mosaic_image(inspection, number, opacity, token),
            part("token", service.token(inspection, number, token)),
            token_image(inspection, number, token, opacity),
        ]

    @with_inspection
    def change_stage(inspection: Inspection, stage: float, opacity: float) -> list[Any]:
        number, token = int(stage), default_token(inspection, int(stage))
        label = gr.update(label=_stage_label(inspection, number))
        return [label, token, *draw(inspection, number, token, opacity)]

    @with_inspection
    def change_token(inspection: Inspection, stage: float, token: float | None, opacity: float) -> list[Any]:
        last = get_stage(inspection, int(stage)).step.count - 1
        if token is None or not 0 <= token <= last:
            given = "nothing" if token is None else f"{token:g}"
            return [gr.skip(), part("notice", f"expected a token from 0 to {last}, got {given}."), gr.skip()]
        return draw(inspection, int(stage), int(token), opacity)

    @with_inspection
    def change_opacity(inspection: Inspection, stage: float, token: float | None, opacity: float) -> list[Any]:
        index = clamp_token(inspection, int(stage), int(token or 0))
        mosaic = mosaic_image(inspection, int(stage), opacity, index)
        return [mosaic, token_image(inspection, int(stage), index, opacity)]

    def click_mosaic(path: str | None, model: str, stage: float, opacity: float, event: Any) -> Any:
        if model == NO_MODEL:
            return gr.skip()
        inspection = _inspect(service, path, model)
        height, width = inspection.image.shape[:2]
        x, y = event.index  # pixels of the mosaic
        token = token_at(inspection, int(stage), (x + 0.5) / width, (y + 0.5) / height)
        return [token, *draw(inspection, int(stage), token, opacity)]

    click_mosaic.__annotations__["event"] = gr.SelectData  # Gradio passes the event by this annotation
    source = [image, pane.model]
    quiet = MODEL_QUEUE | {"trigger_mode": "always_last", "show_progress": "hidden"}
    drawn = [pane.mosaic, pane.summary, pane.map]
    opacity.input(change_opacity, [*source, pane.stage, pane.token, opacity], [pane.mosaic, pane.map], **quiet)
    return [
        pane.stage.input(change_stage, [*source, pane.stage, opacity], [pane.stage, pane.token, *drawn], **quiet),
        pane.token.input(change_token, [*source, pane.stage, pane.token, opacity], drawn, **quiet),
        pane.mosaic.select(_checked(click_mosaic), [*source, pane.stage, opacity], [pane.token, *drawn], **quiet),
    ]


def _choose_photo(photos: list[tuple[str, Any]]) -> Callable[..., str]:
    def choose(event: Any) -> str:
        return str(photos[event.index][1])

    choose.__annotations__["event"] = gr.SelectData
    return choose


def _downloads(service: Service) -> Callable[..., Any]:
    def downloads(path: str | None, model: str, stage: float, token: float | None) -> Any:
        if model == NO_MODEL:
            return gr.skip()
        try:
            inspection = _inspect(service, path, model)
        except BadUpload:  # `_show_inspection` has shown the message
            return gr.skip()
        files = service.write_inspection(inspection, int(stage), clamp_token(inspection, int(stage), int(token or 0)))
        return [gr.update(value=file, interactive=True) for file in files]

    return _checked(downloads)


def _task_tab(service: Service, tab: TaskTab) -> None:
    names = service.catalogue.names(tab.task)
    if not names:
        notice = part("notice", f"No model for this task is available. {tab.training}", "hint")
        _html(notice, elem_id=f"no-{tab.task}")
        return
    with gr.Row(equal_height=False, elem_classes="saccade-layout"):
        with gr.Column(elem_classes="input"):
            if tab.task == "video":
                upload = _upload(gr.Video(label="Video", sources=["upload"], height=250, elem_id="video-upload"))
            else:
                upload = _image_input(label="Image", elem_id=f"{tab.task}-upload")
        with gr.Column(elem_classes="results"):
            message = _html(part("notice", tab.hint, "hint"), elem_id=f"{tab.task}-message")
            drawing = _drawing(tab.title, f"{tab.task}-drawing", "map", visible=False)
            rows = _html(elem_id=f"{tab.task}-rows")
            png, json = _download_buttons(tab.task)
        with gr.Column(elem_classes="options"):
            model = gr.Dropdown(names, value=names[0], label="Model", elem_id=f"{tab.task}-model")
            label = {"segmentation": "Overlay opacity", "detection": "Smallest score"}.get(tab.task, "")
            slider = gr.Slider(0, 1, 0.5, step=0.05, label=label, visible=bool(label), elem_id=f"{tab.task}-slider")

    def show(path: str | None, name: str, value: float) -> list[Any]:
        hidden, disabled = gr.update(visible=False), gr.update(interactive=False)
        if not path:
            return [_message(tab.hint, "hint"), None, hidden, "", disabled, disabled]
        try:
            prediction = service.predict(path, name, (tab.task,))
        except BadUpload as error:
            return [_message(str(error)), None, hidden, "", disabled, disabled]
        if isinstance(prediction, Detections):
            prediction = above(prediction, value)
        image = prediction.draw(value) if isinstance(prediction, Segmentation) else prediction.draw()
        if tab.task == "video":
            image = prediction.image
        return [
            hidden,
            service.displayable(path),
            gr.update(value=np.asarray(image), visible=True),
            part("result", service.catalogue.entry(name), list_rows(prediction)),
            *(gr.update(value=f, interactive=True) for f in service.write_prediction(prediction, image, name)),
        ]

    show = _checked(show)
    inputs, outputs = [upload, model, slider], [message, upload, drawing, rows, png, json]
    for trigger in (upload.input, model.change):
        trigger(show, inputs, outputs, **MODEL_QUEUE)
    slider.input(show, inputs, outputs, trigger_mode="always_last", show_progress="hidden", **MODEL_QUEUE)


def list_rows(prediction: Prediction) -> list[tuple[Any, ...]]:
    """Return the classes, areas or objects of a prediction as rows of bars: name, fraction, text and colour."""
    if isinstance(prediction, Segmentation):
        return [(row["name"], row["share"], f"{row['share']:.1%}", row["colour"]) for row in prediction.areas()]
    if isinstance(prediction, Detections):
        return [(row["name"], row["score"]) for row in prediction.objects()]
    if isinstance(prediction, Classification):
        return [(name, probability) for _, name, probability in prediction.classes]
    raise TypeError(f"expected a prediction of a known task, got {type(prediction).__name__}.")
