"""The HTTP API: plain REST endpoints below /api, described by /api/openapi.json. See docs/serve.md.

The body of a POST request is the file itself. Results are those of the page, from the same cache.
"""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from threading import BoundedSemaphore
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from PIL import Image
from pydantic import BaseModel, Field

import saccade
from saccade._files import png_bytes
from saccade.explanation import mosaic_image, summarize, token_at, token_image
from saccade.web.service import Service, above


class Health(BaseModel):
    status: str = Field(description='"ok"')
    version: str
    models: int = Field(description="number of models")


class Model(BaseModel):
    name: str
    task: str = Field(description="classification, segmentation, detection or video")
    trained: bool = Field(description="false: random weights, predictions are meaningless")
    knows: str = Field(description='"200 classes of Tiny-ImageNet-200, 47 % top-1"; empty if unknown')


class Score(BaseModel, extra="allow"):
    name: str = Field(description="of the class; further keys: class, probability (classification), share, colour")


class Object(BaseModel, extra="allow"):
    name: str
    score: float
    box: list[float] = Field(description="x0, y0, x1, y1 in pixels; further key: segmentation (COCO run lengths)")


class Predicted(BaseModel, extra="allow"):
    image: str
    model: str
    classes: list[Score] | None = Field(None, description="classification, video: five; segmentation: those present")
    labels: list[str] | None = Field(None, description="multi-label models: classes with at least `threshold`")
    objects: list[Object] | None = Field(None, description="detection")
    size: list[int] | None = Field(None, description="width and height of labels and boxes")


class TokenStage(BaseModel):
    title: str
    tokens: int
    grid: list[int] = Field(description="height and width of the feature map")
    importance: list[float] | None = Field(description="gradient of the predicted class with respect to each token")


class Probability(BaseModel):
    class_: str = Field(alias="class")
    probability: float


class Tokens(BaseModel):
    image: str
    model: str
    weights: str
    trained: bool
    input_size: list[int] = Field(description="width, height")
    milliseconds: float
    tokens: int
    pixels: int = Field(description="of the first feature map")
    doubt: str = Field(description="why the image may show none of the classes; empty for a certain prediction")
    predictions: list[Probability]
    stages: list[TokenStage]


class Token(BaseModel):
    stage: str
    token: int
    tokens: int
    area: float = Field(description="fraction of the image where it is the strongest token")
    colour: str
    target: str = Field(description="class that importance refers to")
    gradient: float | None = None
    rank: int | None = None
    drop: float | None = Field(None, description="of the target logit without the token")


def describe_health(service: Service) -> Health:
    return Health(status="ok", version=saccade.__version__, models=len(service.catalogue.entries))


async def receive(
    request: Request,
    name: str = Query(
        "upload", description="file name in results", max_length=200, pattern=r"^[^/\\\x00]*[^/\\\x00.][^/\\\x00]*$"
    ),
) -> AsyncIterator[Path]:
    """Write the body to a file while it is not larger than the limit; delete the file after the response."""
    state = request.app.state
    if not state.slots.acquire(blocking=False):
        raise HTTPException(503, f"{state.queue_size} requests are waiting. Try again later.")
    try:
        with tempfile.TemporaryDirectory(dir=state.service.folder) as folder:
            path, size, limit = Path(folder) / name, 0, state.service.limits.megabytes
            with open(path, "wb") as file:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit * 1e6:
                        raise HTTPException(413, f"expected at most {limit:g} MB. Reduce the file.")
                    file.write(chunk)
            yield path
    finally:
        state.slots.release()


File = Annotated[Path, Depends(receive)]
StageNumber = Annotated[int, Query(description="from 1; larger than the last: the last")]
Fraction = Annotated[float, Query(ge=0, le=1)]
BINARY = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}, "required": True}
ERRORS: dict[int | str, Any] = {400: {"description": "the file or the model is rejected; `detail` says why"}}


def make_api(service: Service, queue_size: int = 64) -> FastAPI:
    """Return the API as an application to mount; more than `queue_size` concurrent requests are rejected."""
    # FastAPI's own pages of documentation load scripts from another host.
    api = FastAPI(title="saccade", version=saccade.__version__, docs_url=None, redoc_url=None)
    api.state.service, api.state.queue_size, api.state.slots = service, queue_size, BoundedSemaphore(queue_size)
    data: dict[str, Any] = {"responses": ERRORS, "openapi_extra": {"requestBody": BINARY}}
    image = data | {"responses": ERRORS | {200: {"content": {"image/png": {}}}}, "response_class": Response}

    @api.exception_handler(ValueError)
    def rejected(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 400)

    @api.get("/health")
    def health() -> Health:
        """Whether the server is up."""
        return describe_health(service)

    @api.get("/models")
    def models() -> list[Model]:
        """The models that requests can name."""
        return [
            Model(name=e.name, task=e.task, trained=e.trained, knows=e.knows)
            for e in service.catalogue.entries.values()
        ]

    @api.post("/predict", response_model=Predicted, response_model_exclude_none=True, **data)
    def predict(file: File, model: str, threshold: Fraction = 0.5) -> Any:
        """Classes, segmentation or objects of an image, or classes of a video; `threshold` is the smallest score."""
        return above(service.predict(file, model), threshold).to_dict() | {"image": file.name, "model": model}

    @api.post("/draw", **image)
    def draw(file: File, model: str, threshold: Fraction = 0.5) -> Response:
        """The prediction, drawn on the image."""
        return png(above(service.predict(file, model), threshold).draw())

    @api.post("/tokens", response_model=Tokens, **data)
    def tokens(file: File, model: str) -> Any:
        """Top five classes, stages, and the importance of every token of a classifier."""
        return summarize(service.inspect(file, model)) | {"image": file.name}

    @api.post("/mosaic", **image)
    def mosaic(file: File, model: str, stage: StageNumber = 99, opacity: Fraction = 1.0) -> Response:
        """The image with every pixel in the colour of its strongest token."""
        return png(mosaic_image(service.inspect(file, model), stage, opacity))

    @api.post("/token", response_model=Token, response_model_exclude_none=True, **data)
    def token(file: File, model: str, stage: StageNumber = 99, x: Fraction = 0.5, y: Fraction = 0.5) -> Any:
        """Area and importance of the strongest token at x, y."""
        inspection = service.inspect(file, model)
        return service.token(inspection, stage, token_at(inspection, stage, x, y))

    @api.post("/map", **image)
    def token_map(file: File, model: str, stage: StageNumber = 99, x: Fraction = 0.5, y: Fraction = 0.5) -> Response:
        """The map of the strongest token at x, y."""
        inspection = service.inspect(file, model)
        return png(token_image(inspection, stage, token_at(inspection, stage, x, y)))

    return api


def png(image: Image.Image | np.ndarray) -> Response:
    drawn = image if isinstance(image, Image.Image) else Image.fromarray(image)
    return Response(png_bytes(drawn), media_type="image/png")
