"""Labelled videos: one sub-folder per class, or a list of files."""

from saccade.data.decode.video import VIDEO_SUFFIXES, VideoFile
from saccade.data.sources.folder import FolderSource
from saccade.data.sources.lists import ImageList


class VideoFolder(FolderSource):
    """`root/<class>/.../video.mp4`. Classes are the sorted names of the sub-folders, or `classes` of another split."""

    suffixes = VIDEO_SUFFIXES
    content = "videos"

    def read(self, index: int) -> VideoFile:
        return VideoFile(self.root / self.paths[index])


class VideoList(ImageList):
    """A list of videos, read like a list of images."""

    def read(self, index: int) -> VideoFile:
        return VideoFile(self.root / self.paths[index])
