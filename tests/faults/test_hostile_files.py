"""Files made to do harm: read in bounded time and memory, never outside their folder, and never run."""

from __future__ import annotations

import io
import os
import pickle
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file

from fedsir import checkpoint
from fedsir.config.data import CohortData, KermanyData, MedMnistData, PhantomData
from fedsir.config.training import ModelConfig
from fedsir.data import decode, medmnist
from fedsir.data.cache import EntryWriter, load_entry
from fedsir.data.decode import BadImageError, decode_grey, resize
from fedsir.data.kermany import list_kermany
from fedsir.data.load import load_dataset
from fedsir.data.manifest import read_manifest
from fedsir.data.prepare import MAX_FILE_BYTES
from fedsir.errors import BadInput
from fedsir.models.network import initial_network

GREY = np.random.default_rng(0).integers(0, 256, (20, 30), dtype=np.uint8)


class Armed:
    """Runs code when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


# -- pictures ------------------------------------------------------------------------------------------------------


def png(width: int, height: int, body: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(0, 0), (0, 5), (5, 0), (100_000, 0)])
def test_pictures_without_pixels_are_bad(width: int, height: int) -> None:
    for data in (png(width, height, b""), f"P5 {width} {height} 255\n".encode()):
        with pytest.raises(BadImageError):
            decode_grey(data)


@pytest.mark.parametrize(("width", "height"), [(100_000, 1), (1, 100_000)])
def test_a_side_of_a_hundred_thousand_pixels_is_read_where_there_are_few(width: int, height: int) -> None:
    found = decode_grey(png(width, height, (b"\0" + b"\x50" * width) * height))
    assert found.shape == (height, width)
    assert (resize(found, 16) == 0x50).all()


@pytest.mark.parametrize("height", [501, 100_000])
def test_a_hundred_thousand_pixels_by_many_are_refused_before_they_are_decoded(height: int) -> None:
    with pytest.raises(BadImageError, match="50,000,000"):
        decode_grey(png(100_000, height, b""))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I;16B", "LA", "PA"])
def test_every_mode_of_a_tiff_comes_out_as_grey(mode: str) -> None:
    out = io.BytesIO()
    Image.new(mode, (20, 10)).save(out, "TIFF")
    found = decode_grey(out.getvalue())
    assert (found.shape, found.dtype) == ((10, 20), np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "GIF"])
def test_of_many_frames_only_the_first_is_looked_at(kind: str) -> None:
    frames = [Image.new("L", (64, 48), value) for value in (40, 90, 200)]
    out = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], **options)
    assert (decode_grey(out.getvalue()) == 40).all()


def test_16_bit_pictures_keep_their_rounding() -> None:
    """Every value, in 32-bit arithmetic as in exact one."""
    out = io.BytesIO()
    Image.fromarray(np.arange(65536, dtype=np.uint16).reshape(256, 256)).save(out, "PNG")
    exact = [(value * 255 + 32767) // 65535 for value in range(65536)]
    assert decode_grey(out.getvalue()).reshape(-1).tolist() == exact


# -- files that are none -------------------------------------------------------------------------------------------


def cohort(folder: Path, count: int = 8, **more: Any) -> CohortData:
    """A cohort of `count` pictures, half of them of each class."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["path,label,patient_id"]
    for i in range(count):
        Image.fromarray(np.roll(GREY, i)).save(folder / f"{i}.png")
        rows.append(f"{i}.png,{'AB'[i % 2]},p{i}")
    (folder / "m.csv").write_text("\n".join(rows))
    options = {"image_size": 16, "cache_dir": folder / "cache", **more}
    return CohortData(source="cohort", manifest=folder / "m.csv", **options)


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadInput, match="not a regular file"):
        load_dataset(CohortData(source="cohort", manifest=pipe))
    with pytest.raises(BadInput, match="not a regular file"):
        load_dataset(MedMnistData(source="medmnist", path=pipe))
    config = cohort(tmp_path / "data")
    (tmp_path / "data" / "3.png").unlink()
    os.mkfifo(tmp_path / "data" / "3.png")
    with pytest.raises(BadInput, match=r"3\.png: not a regular file"):
        load_dataset(config)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_devices_are_not_read_without_end(tmp_path: Path) -> None:
    zero = Path("/dev/zero")
    for source in (CohortData(source="cohort", manifest=zero), MedMnistData(source="medmnist", path=zero)):
        with pytest.raises(BadInput, match="not a regular file"):
            load_dataset(source)
    config = cohort(tmp_path / "data", root=Path("/dev"))
    rows = ["path,label,patient_id,split", "zero,A,1,train", "full,B,2,train", "null,A,3,test", "random,B,4,test"]
    (tmp_path / "data" / "m.csv").write_text("\n".join(rows))
    with pytest.raises(BadInput, match="zero: not a regular file"):
        load_dataset(config)


def test_a_file_of_terabytes_is_not_read(tmp_path: Path) -> None:
    config = cohort(tmp_path)
    with (tmp_path / "2.png").open("r+b") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(BadInput, match=r"2\.png: .* bytes, more than the .* that are read"):
        load_dataset(config)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b", "x" * 5000])
def test_paths_that_cannot_exist_are_bad_input(tmp_path: Path, path: str) -> None:
    place = Path(path)
    sources: list[Any] = [
        KermanyData(source="kermany", root=place),
        CohortData(source="cohort", manifest=place),
        cohort(tmp_path).model_copy(update={"root": place}),
        cohort(tmp_path).model_copy(update={"cache_dir": place}),
        MedMnistData(source="medmnist", path=place),
    ]
    for source in sources:
        with pytest.raises(BadInput):
            load_dataset(source)
    with pytest.raises(BadInput):
        initial_network(ModelConfig(backbone="tiny", weights=path), 2, seed=0)


def test_images_beyond_memory_are_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="image_size is 100000; images have at most 2048"):
        load_dataset(PhantomData(source="phantom", image_size=100_000))
    with pytest.raises(BadInput, match="do not fit into memory"):
        load_dataset(PhantomData(source="phantom", image_size=64, train_images=10**14))

    def out_of_memory(_: bytes) -> Any:
        raise MemoryError

    monkeypatch.setattr(decode, "grey_picture", out_of_memory)
    with pytest.raises(BadInput, match=r"\.png: there is not enough memory"):
        load_dataset(cohort(tmp_path, on_bad_image="skip"))


def test_patient_numbers_may_have_any_length(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("CNV", "DME", "DRUSEN", "NORMAL"):
            (tmp_path / split / name).mkdir(parents=True)
    for number in ("9" * 100, "10", "9"):
        (tmp_path / "train" / "CNV" / f"CNV-{number}-1.jpeg").touch()
    catalogue, _ = list_kermany(tmp_path)
    assert catalogue.patient_names == ("9", "10", "9" * 100)
    assert [catalogue.patient_names[i] for i in catalogue.patients] == ["10", "9", "9" * 100]


# -- manifests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("a.png,\x1b[2J,p", "label '\\x1b[2J' contains the control character U+001B"),
        ("a.png,A,p\u202e", "patient_id 'p\\u202e' contains the control character U+202E"),
        ("a\x07.png,A,p", "path 'a\\x07.png' contains the control character U+0007"),
        (f"a.png,{'A' * 201},p", "label has 201 characters"),
        (f"{'a/' * 3000}b.png,A,p", "path has 6005 characters"),
    ],
)
def test_names_that_would_command_a_terminal_are_refused(tmp_path: Path, row: str, problem: str) -> None:
    (tmp_path / "m.csv").write_text(f"path,label,patient_id\n{row}\n", encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        read_manifest(tmp_path / "m.csv", tmp_path, None)
    assert f"line 2: {problem}" in str(caught.value)


def test_markup_formulas_and_unicode_are_names_like_any_other(tmp_path: Path) -> None:
    names = [
        "=HYPERLINK(1)",
        "+1",
        "-x",
        "@x",
        "[/red]",
        "<script>alert(1)</script>",
        "..",
        "ä 漢字 b",
        "\u00a0x\u00a0y",
    ]
    rows = [f"{i} ü.png,{name},p{i}" for i, name in enumerate(names)]
    (tmp_path / "m.csv").write_text("path,label,patient_id\n" + "\n".join(rows), encoding="utf-8-sig")
    found, _ = read_manifest(tmp_path / "m.csv", tmp_path, None)
    assert [row.label for row in found] == [name.strip() for name in names]


SEGMENT = st.sampled_from(["inner", "out", "file", "loop", "..", ".", "", "a", "C:", "~", "link"])


@pytest.fixture(scope="module")
def maze(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links inwards, outwards, to itself and in a circle."""
    base = tmp_path_factory.mktemp("maze")
    root, outside = base / "root", base / "outside"
    for folder in (root / "inner", root / "a" / "inner", outside):
        folder.mkdir(parents=True)
    for place in (root, root / "a", root / "inner"):
        (place / "out").symlink_to(outside)
        (place / "file").symlink_to(outside / "secret")
        (place / "loop").symlink_to("loop")
        (place / "link").symlink_to(root / "inner")
    (outside / "secret").touch()
    (outside / "a").symlink_to(root)
    return root


@settings(max_examples=300, deadline=None)
@given(segments=st.lists(SEGMENT, min_size=1, max_size=6), separator=st.sampled_from(["/", "\\"]))
def test_no_path_leads_out_of_the_folder(maze: Path, segments: list[str], separator: str) -> None:
    path = separator.join(segments)
    manifest = maze / "m.csv"
    manifest.write_text(f'path,label,patient_id\n"{path}",A,p\n')
    try:
        rows, _ = read_manifest(manifest, maze, None)
    except BadInput:
        return
    assert Path(os.path.realpath(maze / rows[0].path)).is_relative_to(maze.resolve())


def test_time_grows_with_the_number_of_rows(tmp_path: Path) -> None:
    """And no faster: a million rows are a matter of seconds."""

    def seconds(rows: int) -> float:
        (tmp_path / "m.csv").write_text(
            "path,label,patient_id\n" + "".join(f"d/{i}.png,{'AB'[i % 2]},p{i}\n" for i in range(rows))
        )
        begin = time.process_time()
        assert len(read_manifest(tmp_path / "m.csv", tmp_path, ("A", "B"))[0]) == rows
        return time.process_time() - begin

    assert seconds(40_000) < 40 * max(seconds(4_000), 0.01)


# -- archives ------------------------------------------------------------------------------------------------------


def member(shape: Any, kind: str = "|u1", body: bytes = bytes(64)) -> bytes:
    header = repr({"descr": kind, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., MedMnistData]:
    """An archive of nine small images with some of its members replaced."""

    def write(**members: bytes) -> MedMnistData:
        path = tmp_path / "octmnist.npz"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for part, n in (("train", 5), ("val", 4), ("test", 4)):
                out = io.BytesIO()
                np.save(out, np.arange(n * 64, dtype=np.uint32).astype(np.uint8).reshape(n, 8, 8))
                file.writestr(f"{part}_images.npy", members.get(f"{part}_images", out.getvalue()))
                labels = member((n, 1), body=bytes(i % 4 for i in range(n)))
                file.writestr(f"{part}_labels.npy", members.get(f"{part}_labels", labels))
        return MedMnistData(source="medmnist", path=path, image_size=16, cache_dir=tmp_path / "cache")

    return write


def test_the_archive_itself_is_sound(archive: Callable[..., MedMnistData]) -> None:
    assert len(load_dataset(archive()).train) == 9


@pytest.mark.parametrize("what", ["train_labels", "train_images"])
def test_pickled_members_are_not_loaded(archive: Callable[..., MedMnistData], tmp_path: Path, what: str) -> None:
    out = io.BytesIO()
    np.save(out, np.array([Armed(tmp_path / "ran")] * 5, dtype=object), allow_pickle=True)
    with pytest.raises(BadInput):
        load_dataset(archive(**{what: out.getvalue()}))
    with pytest.raises(BadInput):
        load_dataset(archive(**{what: pickle.dumps(Armed(tmp_path / "ran"))}))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("what", "content", "message"),
    [
        ("train_labels", member(()), "not one integer per image"),
        ("train_labels", member((10**12, 1)), "claims 1,000,000,000,000 images"),
        ("train_labels", member((10**20, 1)), "claims"),
        ("train_labels", member((-1, 1)), "cannot be read"),
        ("train_labels", b"\x93NUMPY\x01\x00\x05\x00{{{{\n", "cannot be read"),
        ("train_images", member((5, -8, -8)), "not grey images"),
        ("train_images", member((5, 10_000, 10_000)), "10000 x 10000 pixels"),
        ("train_images", member((5, 10**10, 1)), "more than the 50,000,000"),
    ],
)
def test_claims_of_a_member_are_not_believed(
    archive: Callable[..., MedMnistData], what: str, content: bytes, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load_dataset(archive(**{what: content}))


def test_a_decompression_bomb_is_refused_before_it_unfolds(
    archive: Callable[..., MedMnistData], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medmnist, "SMALL_BYTES", 100_000)
    for what in ("train_labels", "train_images"):
        with pytest.raises(BadInput, match=rf"{what}\.npy unfolds from"):
            load_dataset(archive(**{what: member((5, 1000, 1000), body=bytes(5_000_000))}))


@pytest.mark.parametrize(("at", "value"), [(6, 1), (8, 99)], ids=["encrypted", "unknown compression"])
def test_archives_that_zipfile_does_not_open_are_bad_input(
    archive: Callable[..., MedMnistData], at: int, value: int
) -> None:
    config = archive()
    content = bytearray(config.path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", at), (b"PK\x01\x02", at + 2)):
        place = content.find(signature)
        while place >= 0:
            content[place + offset] |= value
            place = content.find(signature, place + 4)
    config.path.write_bytes(content)
    with pytest.raises(BadInput, match="cannot be read"):
        load_dataset(config)


# -- weights and checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_place_of_downloaded_weights_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    file = tmp_path / "checkpoints" / "squeezenet1_1-b8a52dc0.pth"
    torch.save({"features.0.weight": Armed(tmp_path / "ran")}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(BadInput, match=r"squeezenet1_1-b8a52dc0\.pth does not hold .* \(refused by torch\)"):
        initial_network(ModelConfig(backbone="squeezenet1_1", weights="imagenet"), 2, seed=0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["not a number", "complex", "sparse", "whole numbers", "no data", "8 bits"])
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_no_finite_numbers_are_refused(tmp_path: Path, kind: str) -> None:
    config = ModelConfig(backbone="tiny", weights="random")
    state = initial_network(config, 2, seed=0).backbone.state_dict()
    name, value = next(iter(state.items()))
    state[name] = {
        "not a number": value / 0,
        "complex": value.to(torch.complex64),
        "sparse": value.to_sparse(),
        "whole numbers": value.long(),
        "no data": value.to("meta"),
        "8 bits": value.to(torch.float8_e4m3fn),
    }[kind]
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(BadInput, match=r"1 of \d+ tensors .* finite plain numbers"):
        initial_network(config.model_copy(update={"weights": str(tmp_path / "w.pth")}), 2, seed=0)


def test_half_precision_and_numbered_tensors(tmp_path: Path) -> None:
    config = ModelConfig(backbone="tiny", weights=str(tmp_path / "w.pth"))
    state = initial_network(config.model_copy(update={"weights": "random"}), 2, seed=0).backbone.state_dict()
    torch.save({n: v.half() if v.is_floating_point() else v for n, v in state.items()}, tmp_path / "w.pth")
    initial_network(config, 2, seed=0)
    torch.save(dict(enumerate(state.values())), tmp_path / "w.pth")
    with pytest.raises(BadInput, match="holds no state_dict"):
        initial_network(config, 2, seed=0)


OWNER = checkpoint.Owner("run", {})


def test_a_pickle_in_place_of_a_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    for write in (lambda value: torch.save(value, path), lambda value: path.write_bytes(pickle.dumps(value))):
        write(Armed(tmp_path / "ran"))
        with pytest.raises(BadInput, match="is damaged"):
            checkpoint.load(path, OWNER, {"state": float})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("structure", ["[" * 100_000, '{"state": 1e999999}', '{"state": "x"}', "9" * 5000, "{", ""])
def test_structure_of_a_checkpoint_that_is_whole_but_hostile(tmp_path: Path, structure: str) -> None:
    path = tmp_path / "run.safetensors"
    header = {
        "format": checkpoint.FORMAT,
        "version": checkpoint.__version__,
        "identity": "run",
        "settings": "{}",
        "structure": structure,
    }
    save_file({}, path, metadata={**header, "digest": checkpoint._digest({}, header)})
    with pytest.raises(BadInput, match="does not hold the state"):
        checkpoint.load(path, OWNER, {"state": int})


# -- the image cache -----------------------------------------------------------------------------------------------


def entry(folder: Path, rows: int = 3, size: int = 16) -> Path:
    with EntryWriter(folder, size) as writer:
        for split in ("train", "test"):
            writer.append(split, np.zeros((rows, size, size), np.uint8))  # type: ignore[arg-type]
        writer.commit("k", np.ones((2 * rows, 32), np.uint8), {})
    return folder / "images" / "k"


@pytest.mark.parametrize("name", ["hashes.npy", "train.npy", "entry.json"])
def test_pickles_and_claims_in_the_cache_are_no_entry(tmp_path: Path, name: str) -> None:
    place = entry(tmp_path)
    for content in (
        pickle.dumps(Armed(tmp_path / "ran")),
        member((10**13, 32)),
        member((3,), "|O", pickle.dumps(Armed(tmp_path / "ran"))),
        b"[" * 100_000,
    ):
        (place / name).write_bytes(content)
        assert load_entry(tmp_path, "k") is None
    (place / name).unlink()
    os.mkfifo(place / name)
    assert load_entry(tmp_path, "k") is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("rows", [1, 3])
def test_an_entry_about_other_images_is_made_anew(tmp_path: Path, rows: int) -> None:
    """Somebody may have put it there; it must not end in images under the labels of others."""
    config = cohort(tmp_path / "data")
    sound = load_dataset(config)
    key = next((tmp_path / "data" / "cache" / "images").iterdir())
    for path in key.iterdir():
        path.unlink()
    for path in entry(tmp_path / "other", rows).iterdir():
        path.rename(key / path.name)
    again = load_dataset(config)
    assert again.digest == sound.digest
    np.testing.assert_array_equal(again.train.images, sound.train.images)
