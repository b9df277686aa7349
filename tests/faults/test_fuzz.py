"""Whatever a file holds, reading it gives a value or one `BadInput` that can be shown: nothing else comes out.

The default suite tries a few dozen inputs per reader, always the same ones; `-m slow` thousands, others each time.
"""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from experiments.config import load_run_file
from experiments.grid import load_grid
from experiments.yaml_files import parse_yaml
from fedsir import checkpoint
from fedsir.config.data import MedMnistData
from fedsir.config.training import ModelConfig
from fedsir.data.cache import EntryWriter, load_entry
from fedsir.data.decode import BadImageError, decode_grey, resize
from fedsir.data.manifest import read_manifest
from fedsir.data.medmnist import load_medmnist
from fedsir.errors import BadInput
from fedsir.methods.oct_fedsir import METHOD
from fedsir.models.network import initial_network

FEW, MANY = 60, 1000

HOSTILE_TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "=1+1",
            "[/]",
            "<script>",
            "../..",
            "~nobody/x",
            "\x1b[2J",
            "\0",
            "\u202e",
            "",
            " ",
            "???",
            "!!int",
            "&a",
            "*a",
        ]
    ),
    st.sampled_from(["1e999", "-0", "0x" + "f" * 40, "9" * 200, "1:1:1", ".nan", "2020-99-99", "<<", "a" * 5000]),
)
VALUES = st.recursive(
    HOSTILE_TEXT | st.none() | st.booleans() | st.integers() | st.floats() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE_TEXT, inner, max_size=3),
    max_leaves=6,
)
SECTIONS = ("name", "seed", "data", "federation", "model", "training", "method", "evaluation", "execution", "tracking")
KEYS = ("source", "cohort", "root", "manifest", "classes", "clients", "noise", "ratio", "label_map", "partition", "lr")
GRID_KEYS = ("name", "base", "set", "axes", "exclude", "methods", "seeds")


@st.composite
def changed(draw: st.DrawFn, original: bytes) -> bytes:
    """Bytes of a sound file after a few accidents: bits flipped, pieces cut out, repeated or replaced."""
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "end", "insert", "replace"])):
            case "flip" if content:
                content[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[place : place + draw(st.integers(1, 200))]
            case "end":
                del content[place:]
            case "insert":
                content[place:place] = draw(st.binary(max_size=40))
            case _:
                new = draw(st.binary(max_size=8) | st.just(b"\xff" * 8))
                content[place : place + len(new)] = new
    return bytes(content)


def dumped(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """As YAML writes them, with characters that UTF-8 does not have left out."""
    return values.map(lambda v: yaml.safe_dump(v, allow_unicode=True).encode("utf-8", "ignore"))


@dataclass(frozen=True)
class Target:
    """inputs: what is tried. read: the reader under test, which gets an empty folder's path and the input."""

    inputs: st.SearchStrategy[Any]
    read: Callable[[Path, Any], object]


def _configuration() -> Target:
    demo = yaml.safe_dump(load_run_file("demo", []).model_dump(mode="json")).encode()
    any_section = st.dictionaries(
        st.sampled_from(SECTIONS) | HOSTILE_TEXT,
        VALUES | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
        max_size=6,
    )

    def read(folder: Path, content: bytes) -> None:
        (folder / "run.yaml").write_bytes(content)
        load_run_file(str(folder / "run.yaml"), [])

    return Target(changed(demo) | dumped(any_section) | st.binary(max_size=60), read)


def _override() -> Target:
    key = st.lists(st.sampled_from((*SECTIONS, *KEYS)) | HOSTILE_TEXT, min_size=1, max_size=3).map(".".join)
    value = HOSTILE_TEXT | dumped(VALUES).map(bytes.decode)
    return Target(st.tuples(key, value), lambda _, pair: load_run_file("demo", [f"{pair[0]}={pair[1]}"]))


def _yaml() -> Target:
    words = st.sampled_from([*"[]{}:,-?|>&*!%@`#'\"\n\t ", "!!int ", "!!python/name:os.system ", "<<: ", "---\n", "a"])
    return Target(st.lists(words | HOSTILE_TEXT, max_size=30).map("".join), lambda _, text: parse_yaml(text, "x"))


def _grid() -> Target:
    sound: dict[str, Any] = {"name": "g", "base": "demo", "methods": ["fedavg"], "seeds": [0]}
    axes = {"axes": {"training.rounds": [1, 2], "n": [{"label": "a", "set": ["seed=1"]}]}, "exclude": [{"n": "a"}]}
    one = st.dictionaries(st.sampled_from(GRID_KEYS) | HOSTILE_TEXT, VALUES, max_size=3).map(lambda d: {**sound, **d})

    def read(folder: Path, content: bytes) -> None:
        (folder / "grid.yaml").write_bytes(content)
        load_grid(str(folder / "grid.yaml"))

    return Target(changed(yaml.safe_dump({**sound, **axes}).encode()) | dumped(one), read)


def _manifest() -> Target:
    sound = "path,label,patient_id,site,split\n" + "".join(f"{i}.png,{'AB'[i % 2]},p{i},s,train\n" for i in range(6))
    cells = st.lists(st.lists(HOSTILE_TEXT, min_size=3, max_size=3).map(",".join), max_size=4).map("\n".join)
    text = cells.map(lambda rows: f"path,label,patient_id\n{rows}".encode("utf-8", "ignore"))

    def read(folder: Path, content: bytes) -> None:
        (folder / "m.csv").write_bytes(content)
        rows, _ = read_manifest(folder / "m.csv", folder, None)
        assert all((folder / row.path).resolve().is_relative_to(folder.resolve()) for row in rows)

    return Target(changed(sound.encode()) | text, read)


def _npz() -> Target:
    def archive(stored: bool) -> bytes:
        out = io.BytesIO()
        arrays: dict[str, Any] = {}
        for part, n in (("train", 5), ("val", 4), ("test", 4)):
            arrays[f"{part}_images"] = np.arange(n * 16, dtype=np.uint8).reshape(n, 4, 4)
            arrays[f"{part}_labels"] = (np.arange(n) % 4).astype(np.uint8)[:, None]
        (np.savez if stored else np.savez_compressed)(out, **arrays)
        return out.getvalue()

    def claims(header: bytes) -> bytes:
        """A sound zip around members that claim anything."""
        out = io.BytesIO()
        member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
        with zipfile.ZipFile(out, "w") as file:
            for name in ("train_images", "train_labels", "val_images", "val_labels", "test_images", "test_labels"):
                file.writestr(f"{name}.npy", member)
        return out.getvalue()

    shape = st.lists(st.integers(-3, 10) | st.integers(2**31, 2**80), max_size=4).map(tuple)
    header = st.builds(
        lambda kind, order, dims: repr({"descr": kind, "fortran_order": order, "shape": dims}).encode() + b"\n",
        st.sampled_from(["|u1", "<i8", "|O", "|V0", "|S0", "<f8", "<U9999999", [("a", "|O")]]),
        st.booleans(),
        shape,
    )

    def read(folder: Path, content: bytes) -> None:
        (folder / "octmnist.npz").write_bytes(content)
        config = MedMnistData(
            source="medmnist", path=folder / "octmnist.npz", image_size=16, cache_dir=folder / "cache"
        )
        load_medmnist(config)

    return Target(
        changed(archive(True)) | changed(archive(False)) | (header | st.binary(max_size=60)).map(claims), read
    )


def _weights(suffix: str) -> Target:
    config = ModelConfig(backbone="tiny", weights="random")
    state = initial_network(config, 2, seed=0).backbone.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"sound{suffix}"
        if suffix == ".safetensors":
            save_file({name: value.contiguous() for name, value in state.items()}, path)
        else:
            torch.save(state, path)
        sound = path.read_bytes()

    def read(folder: Path, content: bytes) -> None:
        path = folder / f"weights{suffix}"
        path.write_bytes(content)
        initial_network(config.model_copy(update={"weights": str(path)}), 2, seed=0)

    # The beginning holds names and sizes; the numbers that follow are as good as others.
    return Target(changed(sound) | changed(sound[:4000]).map(lambda start: start + sound[4000:]), read)


OWNER = checkpoint.Owner("run", {"seed": 0})
HINTS = {"state": METHOD.build(METHOD.config(name="oct_fedsir")).state_type, "seconds": float}


def _checkpoint_bytes() -> Target:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        checkpoint.save(path, OWNER, {"state": {"a": np.arange(6.0)}, "seconds": 1.0})
        sound = path.read_bytes()
    hints = {"state": dict[str, np.ndarray], "seconds": float}

    def read(folder: Path, content: bytes) -> None:
        path = folder / "run.safetensors"
        path.write_bytes(content)
        checkpoint.previous(path).write_bytes(content[::-1])
        checkpoint.resume(path, OWNER, hints)

    return Target(changed(sound), read)


def _checkpoint_structure() -> Target:
    """Files that are whole, but hold something else than the state of the method."""
    names = ("weights", "values", "counters", "labels", "identification", "array", "evidence", "a")
    scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(names)
    node = st.recursive(
        scalar,
        lambda inner: (
            st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.sampled_from(names), inner, max_size=4)
        ),
        max_leaves=12,
    )

    def read(folder: Path, content: Any) -> None:
        path = folder / "run.safetensors"
        checkpoint.save(path, OWNER, {"state": content, "seconds": 1.0, "a": np.zeros(3)})
        checkpoint.load(path, OWNER, HINTS)

    return Target(node, read)


def _picture() -> Target:
    files = []
    grey = Image.fromarray(np.arange(48 * 32, dtype=np.uint32).astype(np.uint8).reshape(48, 32))
    for mode, kinds in {
        "L": ("JPEG", "JPEG2000", "PNG", "TIFF", "BMP", "GIF", "WEBP", "PPM"),
        "CMYK": ("JPEG", "TIFF"),
        "P": ("PNG", "GIF"),
        "RGBA": ("PNG", "WEBP", "TIFF"),
        "I;16": ("PNG", "TIFF"),
        "1": ("PNG", "PPM"),
    }.items():
        for kind in kinds:
            out = io.BytesIO()
            grey.convert(mode).save(out, kind)
            files.append(out.getvalue())

    def read(_: Path, content: bytes) -> None:
        try:
            picture = decode_grey(content)
        except BadImageError as error:
            raise BadInput(str(error)) from error
        assert picture.dtype == np.uint8
        assert resize(picture, 16).shape == (16, 16)

    return Target(st.sampled_from(files).flatmap(changed), read)


def _cache_entry() -> Target:
    """A damaged entry is no entry; what it claims to hold is not believed."""
    with tempfile.TemporaryDirectory() as folder, EntryWriter(Path(folder), 16) as writer:
        writer.append("train", np.zeros((3, 16, 16), np.uint8))
        writer.append("test", np.zeros((2, 16, 16), np.uint8))
        writer.commit("k", np.ones((5, 32), np.uint8), {4: "empty file"})
        sound = {path.name: path.read_bytes() for path in (Path(folder) / "images" / "k").iterdir()}
    metadata = VALUES.map(lambda v: json.dumps(v, default=str).encode("utf-8", "ignore"))
    inputs = st.sampled_from(sorted(sound)).flatmap(lambda name: st.tuples(st.just(name), changed(sound[name])))

    def read(folder: Path, damage: tuple[str, bytes]) -> None:
        place = folder / "images" / "k"
        place.mkdir(parents=True, exist_ok=True)
        for name, content in {**sound, damage[0]: damage[1]}.items():
            (place / name).write_bytes(content)
        entry = load_entry(folder, "k")
        if entry is not None:
            assert all(images.dtype == np.uint8 and images.ndim == 3 for images in entry.images.values())

    return Target(inputs | metadata.map(lambda content: ("entry.json", content)), read)


TARGETS: dict[str, Callable[[], Target]] = {
    "configuration": _configuration,
    "override": _override,
    "yaml": _yaml,
    "grid": _grid,
    "manifest": _manifest,
    "npz": _npz,
    "weights, safetensors": lambda: _weights(".safetensors"),
    "weights, torch": lambda: _weights(".pth"),
    "checkpoint, bytes": _checkpoint_bytes,
    "checkpoint, structure": _checkpoint_structure,
    "picture": _picture,
    "cache entry": _cache_entry,
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def fuzz(target: Target, folder: Path, examples: int, repeatable: bool) -> tuple[int, int]:
    """How many inputs were tried and how many of them refused."""
    tried = refused = 0

    @settings(
        max_examples=examples,
        derandomize=repeatable,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(content=target.inputs)
    def once(content: Any) -> None:
        nonlocal tried, refused
        tried += 1
        try:
            target.read(folder, content)
        except BadInput as error:
            refused += 1
            message = str(error)
        else:
            return
        # It is to be shown: on a few screens at most, and in UTF-8.
        assert 0 < len(message.encode()) < 20_000

    once()
    return tried, refused


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_nothing_but_bad_input_comes_out(name: str, folder: Path) -> None:
    tried, refused = fuzz(TARGETS[name](), folder, FEW, repeatable=True)
    assert tried >= FEW / 2
    assert refused or name == "cache entry"


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_nothing_but_bad_input_comes_out_of_thousands(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried, refused = fuzz(TARGETS[name](), folder, MANY, repeatable=False)
    with capsys.disabled():
        print(f"\nfuzz {name}: {tried} inputs, {refused} refused")
    assert tried >= MANY / 2
