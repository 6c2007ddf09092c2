"""Eight photographs in the public domain, for examples; LICENSES.md names their sources."""

from importlib.resources import files
from pathlib import Path


def photo_paths() -> dict[str, Path]:
    """Name -> file of every bundled photograph, sorted."""
    folder = Path(str(files(__name__)))
    return {path.stem: path for path in sorted(folder.glob("*.jpg"))}
