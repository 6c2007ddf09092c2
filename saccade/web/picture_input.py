"""The upload component of the page and its API."""

from typing import Any


def picture_input(gr: Any, **options: Any):
    """Hands over the path of what was sent. Gradio alone would open it first, and fail in words of its own."""
    image = gr.Image(type="filepath", sources=["upload", "webcam", "clipboard"], image_mode=None, **options)
    image.preprocess = _path_of
    return image


def _path_of(payload: Any) -> str | None:
    return None if payload is None else payload.path
