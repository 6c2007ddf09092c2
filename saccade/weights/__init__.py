"""The weights that come with the package: MODEL.TAG.safetensors in half precision, and its card, MODEL.TAG.md.

A segmenter's MODEL is BACKBONE+HEAD. What lies in this folder is found by itself: no list has to be kept.
`tools/embed_weights.py` puts a training run here.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
LARGEST, ALTOGETHER = 8_000_000, 40_000_000  # bytes of one file, and of all


def embedded() -> dict[str, Path]:
    """Name -> file, sorted: {"svit_nano.tiny_imagenet": …}."""
    files = sorted(FOLDER.glob("[!.]*.*.safetensors"))
    return {path.name.removesuffix(".safetensors"): path for path in files}


def find(name: str) -> Path | None:
    """The file of "svit_nano.tiny_imagenet", or of "svit_nano": the first of its tags; None if there is none."""
    found = embedded()
    if name in found:
        return found[name]
    return next((path for known, path in found.items() if known.rpartition(".")[0] == name), None)
