"""What a job takes along: the four packages and its grid, in one folder, measured before it is sent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from fedsir.errors import BadInput

PACKAGES = ("fedsir", "mlflow_tracking", "experiments", "cluster")
MAX_BYTES = 20_000_000
"""Twenty times what the packages take; more means that data has got into a folder of theirs."""

MEGABYTE = 1_000_000
NAMED = 5
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def package_folders() -> dict[str, Path]:
    """Where the packages of this installation are."""
    found: dict[str, Path] = {}
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise BadInput(f"the package {name} cannot be found.\nInstall fedsir again: pip install -e .")
        found[name] = Path(next(iter(spec.submodule_search_locations)))
    return found


def stage(target: Path, extra: Mapping[str, Path], limit: int = MAX_BYTES) -> int:
    """Fill `target`, which is empty, with the packages and `extra` (file by its path in there); return its bytes.

    Nothing else is sent: no images, stores, virtual environments or hidden files. Raises BadInput that names the
    largest files where it is more than `limit` bytes.
    """
    files = {**package_files(package_folders()), **extra}
    sizes = {file: file.stat().st_size for file in files.values()}
    check_size(sizes, limit)
    for relative, file in files.items():
        place = target / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return sum(sizes.values())


def package_files(folders: Mapping[str, Path]) -> dict[str, Path]:
    """Every file of the packages in `folders` that is sent, by its path in the job's folder."""
    found: dict[str, Path] = {}
    for name, folder in folders.items():
        # Linked folders count: what is in them is imported here and must be there.
        for parent, names, files in os.walk(folder, followlinks=True):
            left_out = _LEFT_OUT(parent, [*names, *files])
            # In place: `os.walk` then stays out of them.
            names[:] = [n for n in names if n not in left_out]
            paths = [Path(parent, n) for n in files if n not in left_out]
            found.update({Path(name, path.relative_to(folder)).as_posix(): path for path in paths})
    return found


def check_size(found: Mapping[Path, int], limit: int) -> None:
    """Raise BadInput where the files have more than `limit` bytes together."""
    total = sum(found.values())
    if total <= limit:
        return
    largest = sorted(found.items(), key=lambda item: -item[1])[:NAMED]
    raise BadInput(
        "\n".join(
            [
                f"the job would take {total / MEGABYTE:.1f} MB along, more than {limit / MEGABYTE:.0f} MB; largest:",
                *(f"  {size / MEGABYTE:.1f} MB  {path}" for path, size in largest),
                "Images and stores do not travel with a job: move them out of the package's folders and name where "
                "they are on the cluster with --set.",
            ]
        )
    )
