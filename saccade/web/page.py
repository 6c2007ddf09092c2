"""The Gradio page: components and their connections; what they show is made in `service`, `look` and `words`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from saccade._extras import require
from saccade.web import words
from saccade.web.api import add_api
from saccade.web.look import Look, check_token, first_token, mosaic_picture, stage_of, token_at, token_picture
from saccade.web.picture_input import picture_input
from saccade.web.service import Service
from saccade.web.uploads import BadUpload

NOBODY = "none"
SHARE_CPU = {"concurrency_id": "models", "concurrency_limit": 2, "api_visibility": "private"}
HEAD = """<div id="head"><h1>A few tokens instead of every pixel</h1>
<p>Drop a picture. The model groups its pixels into a few tokens and answers from them. Every pixel below has the colour
of the token that leads there; click on one to see all that this token looks at.</p></div>"""
HINT = "Drop a picture, paste one, or pick a photograph."


class Pane(NamedTuple):
    """One model's side of the page."""

    model: Any
    answers: Any
    mosaic: Any
    stage: Any
    token: Any
    facts: Any
    map: Any
    png: Any
    json: Any

    @property
    def shown(self) -> list[Any]:
        """What a new picture changes."""
        return [self.answers, self.mosaic, self.stage, self.token, self.facts, self.map, self.png, self.json]


def build_page(service: Service):
    """The whole page as gr.Blocks, not yet listening anywhere."""
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
            image = picture_input(gr, label="Picture", height=250, elem_id="picture")
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
            second = gr.Dropdown([NOBODY, *names], value=NOBODY, label="Compare with", elem_id="model-b")
            opacity = gr.Slider(0, 1, 1, step=0.05, label="Overlay opacity", elem_id="opacity")
        with gr.Column(scale=3, min_width=290):
            message = gr.HTML(words.notice(HINT, "hint"), elem_id="message")
            with gr.Row(equal_height=False, elem_classes="side-by-side"):
                pane_a, column_a = _pane(gr, first, "a")
                pane_b, column_b = _pane(gr, second, "b")
    columns = {"a": column_a, "b": column_b}

    def outputs(pane: Pane, side: str) -> list[Any]:
        return [message, image, columns[side], *pane.shown]

    def show(path: str | None, model: str, opacity: float) -> list[Any]:
        return _shown(gr, service, path, model, opacity)

    for side, pane in (("a", pane_a), ("b", pane_b)):
        given = [image, pane.model, opacity]
        begun = [
            image.input(show, given, outputs(pane, side), **SHARE_CPU),
            pane.model.input(show, given, outputs(pane, side), **SHARE_CPU),
        ]
        if side == "a":
            picked = gallery.select(_picked(gr, photos), None, image, api_visibility="private", queue=False)
        begun.append(picked.then(show, given, outputs(pane, side), **SHARE_CPU))
        about = [image, pane.model, pane.stage, pane.token]
        for event in begun + _connect_pane(gr, service, pane, image, opacity):
            event.then(_downloads(gr, service), about, [pane.png, pane.json], show_progress="hidden", **SHARE_CPU)


def _pane(gr: Any, model: Any, side: str) -> tuple[Pane, Any]:
    with gr.Column(visible=False, elem_id=f"pane-{side}", elem_classes="pane", min_width=280) as column:
        answers = gr.HTML(elem_id=f"answers-{side}")
        with gr.Row(equal_height=False):
            with gr.Column(min_width=260):
                mosaic = _drawing(gr, "Mosaic: click a token", f"mosaic-{side}", "mosaic")
                stage = gr.Slider(1, 2, 1, step=1, label="Stage", elem_id=f"stage-{side}")
            with gr.Column(min_width=260):
                drawn = _drawing(gr, "What this token looks at", f"map-{side}", "map")
                with gr.Row(equal_height=False):
                    with gr.Column(scale=1, min_width=84):
                        token = gr.Number(0, label="Token", precision=0, minimum=0, elem_id=f"token-{side}")
                    with gr.Column(scale=4, min_width=200):
                        facts = gr.HTML(elem_id=f"facts-{side}", elem_classes="facts", min_height=60)
        with gr.Row():
            png, json = (
                gr.DownloadButton(
                    f"Download {kind.upper()}", size="sm", elem_id=f"{kind}-{side}", min_width=100, interactive=False
                )
                for kind in ("png", "json")
            )
    return Pane(model, answers, mosaic, stage, token, facts, drawn, png, json), column


def _drawing(gr: Any, label: str, name: str, kind: str, **options: Any):
    """A picture that the page made."""
    return gr.Image(
        label=label,
        interactive=False,
        format="webp",
        buttons=["fullscreen"],
        elem_id=name,
        elem_classes=["drawing", kind],
        **options,
    )


def _shown(gr: Any, service: Service, path: str | None, model: str, opacity: float) -> list[Any]:
    """A new picture or model: message, picture, the pane's column, and all in it."""
    same = [gr.skip()] * 8
    if model == NOBODY:
        return [gr.skip(), gr.skip(), gr.update(visible=False), *same]
    if not path:
        return [_message(gr, HINT, "hint"), gr.skip(), gr.update(visible=False), *same]
    try:
        look = service.look(path, model)
    except BadUpload as error:
        return [_message(gr, str(error)), None, gr.update(visible=False), *same]
    last = len(look.stages)
    token = first_token(look, last)
    title = f"{look.subject.name}: mosaic, click a token"
    return [
        gr.update(visible=False),
        gr.skip(),
        gr.update(visible=True),
        words.answers(look),
        gr.update(value=mosaic_picture(look, last, opacity), label=title),
        gr.update(minimum=1, maximum=max(last, 2), value=last, interactive=last > 1, label=_stage_label(look, last)),
        gr.update(value=token, maximum=stage_of(look, last).step.count - 1),
        words.token(service.token(look, last, token)),
        token_picture(look, last, token, opacity),
        gr.update(interactive=False),  # until the files are made
        gr.update(interactive=False),
    ]


def _message(gr: Any, text: str, kind: str = "error") -> Any:
    return gr.update(value=words.notice(text, kind), visible=True)


def _stage_label(look: Look, stage: int) -> str:
    title = stage_of(look, stage).title
    return f"{title[:1].upper()}{title[1:]}: {stage_of(look, stage).step.count} tokens"


def _connect_pane(gr: Any, service: Service, pane: Pane, image: Any, opacity: Any) -> list[Any]:
    """Stage, token, click and opacity: each draws anew what depends on it. Gives the events that choose a token."""

    def told(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(path: str | None, model: str, *rest: Any) -> Any:
            if not path or model == NOBODY:
                return gr.skip()
            try:
                return work(service.look(path, model), *rest)
            except BadUpload as error:
                raise gr.Error(str(error)) from error

        return run

    @told
    def other_stage(look: Look, stage: float, opacity: float) -> list[Any]:
        number, token = int(stage), first_token(look, int(stage))
        return [
            mosaic_picture(look, number, opacity),
            gr.update(label=_stage_label(look, number)),
            gr.update(value=token, maximum=stage_of(look, number).step.count - 1),
            words.token(service.token(look, number, token)),
            token_picture(look, number, token, opacity),
        ]

    @told
    def other_token(look: Look, stage: float, token: float | None, opacity: float) -> list[Any]:
        number = check_token(look, int(stage), int(token or 0))
        return [
            words.token(service.token(look, int(stage), number)),
            token_picture(look, int(stage), number, opacity),
        ]

    @told
    def other_opacity(look: Look, stage: float, token: float | None, opacity: float) -> list[Any]:
        number = check_token(look, int(stage), int(token or 0))
        return [mosaic_picture(look, int(stage), opacity), token_picture(look, int(stage), number, opacity)]

    def clicked(path: str | None, model: str, stage: float, opacity: float, event: Any) -> Any:
        if not path or model == NOBODY:
            return gr.skip()
        look = service.look(path, model)
        height, width = look.picture.shape[:2]
        x, y = event.index  # pixels of the mosaic
        token = token_at(look, int(stage), (x + 0.5) / width, (y + 0.5) / height)
        return [token, *other_token(path, model, stage, token, opacity)]

    clicked.__annotations__["event"] = gr.SelectData  # by this Gradio knows what to hand over
    about = [image, pane.model]
    quiet = SHARE_CPU | {"trigger_mode": "always_last", "show_progress": "hidden"}
    changed = [pane.token, pane.facts, pane.map]
    opacity.input(other_opacity, [*about, pane.stage, pane.token, opacity], [pane.mosaic, pane.map], **quiet)
    return [
        pane.stage.input(other_stage, [*about, pane.stage, opacity], [pane.mosaic, pane.stage, *changed], **quiet),
        pane.token.input(other_token, [*about, pane.stage, pane.token, opacity], changed[1:], **quiet),
        pane.mosaic.select(clicked, [*about, pane.stage, opacity], changed, **quiet),
    ]


def _picked(gr: Any, photos: list[tuple[str, Any]]) -> Callable[..., str]:
    def picked(event: Any) -> str:
        return str(photos[event.index][1])

    picked.__annotations__["event"] = gr.SelectData
    return picked


def _downloads(gr: Any, service: Service) -> Callable[..., Any]:
    def downloads(path: str | None, model: str, stage: float, token: float | None) -> Any:
        if not path or model == NOBODY:
            return gr.skip()
        try:
            files = service.downloads(service.look(path, model), int(stage), int(token or 0))
            return [gr.update(value=file, interactive=True) for file in files]
        except BadUpload:
            return gr.skip()

    return downloads


def _segmentation_tab(gr: Any, service: Service) -> None:
    names = service.catalogue.names("segmentation")
    if not names:
        gr.HTML(
            words.notice(
                "No segmentation model is here. Train one (recipes/small/paca_nano_paca_camvid.yaml) and start the page with "
                "saccade serve --checkpoint runs/paca_nano_camvid.",
                "hint",
            ),
            elem_id="no-segmenter",
        )
        return
    with gr.Row(equal_height=False):
        with gr.Column(scale=1, min_width=290):
            image = picture_input(gr, label="Picture", height=250, elem_id="segment-picture")
            model = gr.Dropdown(names, value=names[0], label="Model", elem_id="segment-model")
            opacity = gr.Slider(0, 1, 0.55, step=0.05, label="Overlay opacity", elem_id="segment-opacity")
        with gr.Column(scale=3, min_width=290):
            message = gr.HTML(words.notice("Drop a picture of a street.", "hint"), elem_id="segment-message")
            drawn = _drawing(gr, "A class for every pixel", "segment-map", "map", visible=False)
            areas = gr.HTML(elem_id="segment-areas")
            with gr.Row():
                png = gr.DownloadButton("Download PNG", size="sm", visible=False)
                json = gr.DownloadButton("Download JSON", size="sm", visible=False)

    def show(path: str | None, name: str, opacity: float) -> list[Any]:
        hidden = gr.update(visible=False)
        if not path:
            return [_message(gr, "Drop a picture of a street.", "hint"), gr.skip(), hidden, "", hidden, hidden]
        try:
            found = service.segment(path, name)
        except BadUpload as error:
            return [_message(gr, str(error)), None, hidden, "", hidden, hidden]
        files = service.segment_downloads(found, opacity)
        return [
            hidden,
            gr.skip(),
            gr.update(value=found.draw(opacity), visible=True),
            words.areas(found.areas()),
            *(gr.update(value=file, visible=True) for file in files),
        ]

    given, given_back = [image, model, opacity], [message, image, drawn, areas, png, json]
    for trigger in (image.input, model.input):
        trigger(show, given, given_back, **SHARE_CPU)
    opacity.input(show, given, given_back, trigger_mode="always_last", show_progress="hidden", **SHARE_CPU)
