"""The upload component of the page and its API."""

from typing import Any


def image_input(gr: Any, **options: Any) -> Any:
    """Return an image component whose value is the path of the upload.

    Gradio would decode the file first and report its own error; `uploads.read_upload` checks it instead.
    """
    image = gr.Image(type="filepath", sources=["upload", "webcam", "clipboard"], image_mode=None, **options)
    image.preprocess = _upload_path
    return image


def _upload_path(payload: Any) -> str | None:
    return None if payload is None else payload.path
