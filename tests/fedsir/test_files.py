from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedsir.files import read_regular


def test_a_file_is_read_up_to_the_limit_and_not_beyond(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, 100_000):
        content = os.urandom(size)
        path.write_bytes(content)
        assert read_regular(path, max(size, 1)) == content
    with pytest.raises(OSError, match="100,000 bytes, more than the 99,999"):
        read_regular(path, 99_999)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_files_of_the_kernel_call_themselves_empty_and_are_read() -> None:
    assert b"Pid:" in read_regular(Path("/proc/self/status"), 100_000)


def test_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(tmp_path / "pipe", 10)
