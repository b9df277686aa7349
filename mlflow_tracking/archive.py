"""The file that runs travel in: a zip archive of JSON, checked on reading, and of the runs' artifacts.

`manifest.json` has format, version and experiments; `runs/<MLflow id>/run.json` what the store says of one run;
`runs/<MLflow id>/artifacts/` its files.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError

from fedsir.config.base import Section
from fedsir.errors import BadInput

FORMAT, VERSION = "fedsir-tracking", 1
MANIFEST = "manifest.json"
MAX_JSON_BYTES = 64_000_000
"""More than any run says of itself; files of other origin are not read into memory."""

COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""What archives are written with. Python unpacks the other methods without a limit on what one piece unfolds to."""

DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)

# JSON has no NaN and no infinity.
Figure = Annotated[
    float,
    BeforeValidator(lambda value: float(value) if isinstance(value, str) else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else str(value)),
]
Point = tuple[Figure, int, int]
"""Value, time in milliseconds, step."""

S = TypeVar("S", bound=Section)

RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class ArchivedExperiment(Section):
    """An MLflow experiment apart from its runs."""

    name: str = Field(min_length=1)
    tags: dict[str, str]


class ArchivedDataset(Section):
    """A data set that was logged as an input, under MLflow's names."""

    name: str
    digest: str
    source_type: str
    source: str
    profile: str | None
    tags: dict[str, str]


class ArchivedRun(Section):
    """What a store says of one run. Times in milliseconds since 1970."""

    run_id: RunId
    experiment: str = Field(min_length=1)
    name: str
    status: Literal["RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED"]
    start_time: int
    end_time: int | None
    params: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, tuple[Point, ...]]
    datasets: tuple[ArchivedDataset, ...]

    @property
    def state(self) -> str:
        """16 hex digits that change with anything that the store says of the run."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Manifest(Section):
    """What an archive says of itself."""

    format: Literal["fedsir-tracking"]
    version: int
    experiments: tuple[ArchivedExperiment, ...]


class ArchiveWriter:
    """Writes an archive beside its place and moves it there at the end; nothing is left if writing fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._experiments: list[ArchivedExperiment] = []
        try:
            self._zip = zipfile.ZipFile(self._partial, "w", zipfile.ZIP_DEFLATED)
        except OSError as error:
            raise BadInput(f"{path} cannot be written: {error.strerror or error}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                manifest = Manifest(format=FORMAT, version=VERSION, experiments=tuple(self._experiments))
                self._zip.writestr(MANIFEST, manifest.model_dump_json(indent=2))
            self._zip.close()
            if kind is None:
                self._partial.replace(self._path)
        finally:
            self._partial.unlink(missing_ok=True)

    def add_experiment(self, experiment: ArchivedExperiment) -> None:
        self._experiments.append(experiment)

    def add_run(self, run: ArchivedRun, files: Path | None) -> None:
        """files: folder with its artifacts."""
        self._zip.writestr(f"runs/{run.run_id}/run.json", run.model_dump_json())
        if files is None:
            return
        for file in sorted(files.rglob("*")):
            if file.is_file():
                name = f"runs/{run.run_id}/artifacts/{file.relative_to(files).as_posix()}"
                if not _is_expected(name):
                    raise BadInput(f"run {run.run_id}: the file {file.name!r} has a name that cannot be archived.")
                self._zip.write(file, name)


class ArchiveReader:
    """Reads an archive; whatever is not as this program writes it is refused before anything is extracted.

    Raises BadInput.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except OSError as error:
            raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from error
        except zipfile.BadZipFile as error:
            raise self._foreign(str(error)) from error
        try:
            self._members = self._checked()
            self._artifacts: dict[str, list[zipfile.ZipInfo]] = {}
            for name, member in self._members.items():
                if "/artifacts/" in name:
                    self._artifacts.setdefault(name.split("/")[1], []).append(member)
            self.experiments = self._manifest().experiments
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    @property
    def run_ids(self) -> list[str]:
        """Ids of all runs, in the order of the archive."""
        return [name.split("/")[1] for name in self._members if name.endswith("/run.json") and name.count("/") == 2]

    def run(self, run_id: str) -> ArchivedRun:
        """What the archive says of one run."""
        name = f"runs/{run_id}/run.json"
        run = self._parsed(ArchivedRun, name)
        if run.run_id != run_id:
            raise self._foreign(f"{name} is about run {run.run_id}")
        return run

    def extract(self, run_id: str, folder: Path) -> bool:
        """Write the artifacts of a run into `folder`; whether it has any."""
        members = self._artifacts.get(run_id, [])
        for member in members:
            target = folder / member.filename.split("/", 3)[3]
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self._zip.open(member) as source, target.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
            except DAMAGE as error:
                raise BadInput(f"{self._path} is damaged at {member.filename}: {error}.") from error
        return bool(members)

    def _checked(self) -> dict[str, zipfile.ZipInfo]:
        members: dict[str, zipfile.ZipInfo] = {}
        for member in self._zip.infolist():
            name = member.filename
            if member.flag_bits & 1:
                raise self._foreign(f"{name!r} is encrypted")
            if member.compress_type not in COMPRESSION:
                raise self._foreign(f"{name!r} is packed by method {member.compress_type}, neither stored nor deflated")
            if not _is_expected(name) or stat.S_ISLNK(member.external_attr >> 16) or name in members:
                raise self._foreign(f"it holds {name!r}")
            members[name] = member
        return members

    def _manifest(self) -> Manifest:
        if MANIFEST not in self._members:
            raise self._foreign(f"it has no {MANIFEST}")
        manifest = self._parsed(Manifest, MANIFEST)
        if manifest.version > VERSION:
            raise BadInput(
                f"{self._path} was written by a newer fedsir, in format {manifest.version}.\nUpgrade fedsir."
            )
        return manifest

    def _parsed(self, kind: type[S], name: str) -> S:
        if self._members[name].file_size > MAX_JSON_BYTES:
            raise self._foreign(f"{name} is larger than {MAX_JSON_BYTES // 1_000_000} MB")
        try:
            with self._zip.open(name) as member:
                # What an archive says of sizes may be wrong.
                return kind.model_validate_json(member.read(MAX_JSON_BYTES))
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(str(part) for part in fault["loc"])
            raise self._foreign(f"{name}: {place}: {fault['msg']}") from error
        except DAMAGE as error:
            raise BadInput(f"{self._path} is damaged at {name}: {error}.") from error

    def _foreign(self, why: str) -> BadInput:
        return BadInput(f"{self._path} is not an archive of `fedsir tracking export`: {why}.")


def _is_expected(name: str) -> bool:
    """Whether a member may have this name: relative, without steps upwards, where the format has members."""
    if name == MANIFEST or re.fullmatch(r"runs/[0-9a-f]{32}/run\.json", name):
        return True
    if re.fullmatch(r"runs/[0-9a-f]{32}/artifacts/[^\x00-\x1f\\]+", name) is None:
        return False
    return str(PurePosixPath(name)) == name and ".." not in PurePosixPath(name).parts
