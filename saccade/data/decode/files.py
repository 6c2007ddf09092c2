"""Image and video files below a folder; imports no torch."""

from pathlib import Path

from saccade.data.decode.image import IMAGE_SUFFIXES
from saccade.data.decode.video import VIDEO_SUFFIXES


def list_files(path: Path, videos: bool = False) -> list[Path]:
    """The file, or all images (or videos) below a folder."""
    if not path.exists():
        raise ValueError(f"no such file or folder: {path}.")
    if not path.is_dir():
        return [path]
    suffixes = VIDEO_SUFFIXES if videos else IMAGE_SUFFIXES
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes and file.name[0] != ".")
    if not files:
        raise ValueError(f"{path} contains no {'videos' if videos else 'images'}.")
    return files
