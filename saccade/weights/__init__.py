"""Embedded weights: MODEL.TAG.safetensors in half precision, with a model card MODEL.TAG.md.

The MODEL of a segmenter is BACKBONE+HEAD. Every file in this folder is registered; there is no separate list.
`tools/embed_weights.py` adds a training run.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
MAX_FILE_BYTES, MAX_TOTAL_BYTES = 8_000_000, 40_000_000


def embedded() -> dict[str, Path]:
    """Return the files by name, sorted: {"svit_nano.tiny_imagenet": …}."""
    files = sorted(FOLDER.glob("[!.]*.*.safetensors"))
    return {path.name.removesuffix(".safetensors"): path for path in files}


def find(name: str) -> Path | None:
    """Return the file of "svit_nano.tiny_imagenet", or for "svit_nano" that of its first tag; None if absent."""
    files = embedded()
    if name in files:
        return files[name]
    return next((path for tagged, path in files.items() if tagged.rpartition(".")[0] == name), None)
