"""Files and folders that a user names, opened only if they are what they should be."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from fedsir.errors import BadInput


def user_path(path: Path, key: str) -> Path:
    """`path` with `~` written out; `key` is the setting that names it.

    Raises BadInput for the home of an unknown user and for a zero byte, which no file system allows.
    """
    if "\0" in str(path):
        raise BadInput(f"{key} = {str(path)!r} contains a zero byte.\nName a file or folder that exists.")
    try:
        return path.expanduser()
    except RuntimeError:
        raise BadInput(
            f"{key} = {path}: there is no home folder {path.parts[0]} on this machine.\nWrite the path in full."
        ) from None


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder; not one is also what cannot be looked at, such as a name that is too long."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Whether `path` is a regular file, as `is_folder`."""
    try:
        return path.is_file()
    except OSError:
        return False


def open_regular(path: Path, limit: int | None = None) -> BufferedReader:
    """A regular file of at most `limit` bytes, open for reading.

    Raises OSError, also for pipes and devices: they would be waited for, or read without end.
    """
    # Path.open has no opener.
    file = open(path, "rb", opener=_at_once)  # noqa: SIM115
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if limit is not None and status.st_size > limit:
            raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, more than the {limit:,} that are read")
    except BaseException:
        file.close()
        raise
    return file


def _at_once(path: str, flags: int) -> int:
    """A pipe would keep the caller waiting for somebody to write into it; regular files are not concerned."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_regular(path: Path, limit: int) -> bytes:
    """All bytes of a regular file. Raises OSError as `open_regular` does."""
    with open_regular(path, limit) as file:
        # `limit` bytes would be allocated first, which takes longer than reading a scan. Files of the kernel that call
        # themselves empty need not be; of one that grows, a byte more than there was shows it.
        length = os.fstat(file.fileno()).st_size
        return file.read(min(limit, length + 1) if length else limit)
