"""Files are replaced completely or not at all."""

import os

from saccade._files import write_file


def test_write_file_replaces_the_file_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "folder" / "a.txt"
    assert write_file(path, "first") == path
    write_file(path, b"second")
    assert path.read_text() == "second"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.txt"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
