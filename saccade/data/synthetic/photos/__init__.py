"""Eight public-domain photographs for examples; LICENSES.md names their sources."""

from importlib.resources import files
from pathlib import Path


def photo_paths() -> dict[str, Path]:
    """Name -> path of the bundled photographs, sorted by name."""
    folder = Path(str(files(__name__)))
    return {path.stem: path for path in sorted(folder.glob("*.jpg"))}
