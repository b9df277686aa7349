"""Checkpoints: what goes in comes out, files are whole or the old ones, and doubtful ones are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from fedsir import checkpoint
from fedsir.checkpoint import Owner, Texts, decode, encode, previous, text_of
from fedsir.errors import BadInput


@dataclass(frozen=True)
class Inner:
    values: NDArray[np.float32]
    note: str = ""


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...]
    labels: tuple[NDArray[np.int64], ...] | None
    figures: dict[str, float]
    by_client: Mapping[int, NDArray[np.bool_]]
    pair: tuple[int, str]
    flag: bool
    nothing: float | None = None


def outer() -> Outer:
    return Outer(
        inner=Inner(np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2], "Grüße"),
        many=(Inner(np.empty(0, np.float32)), Inner(np.array(2.5, np.float32))),
        labels=(np.array([2**62, -1]), np.empty((0, 3), np.int64)),
        figures={"test/loss": float("nan"), "accuracy": 1.0, "low": float("-inf")},
        by_client={3: np.array([True, False]), 11: np.zeros(0, np.bool_)},
        pair=(3, "three"),
        flag=True,
    )


def same(a: Any, b: Any) -> None:
    if isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    elif hasattr(a, "__dataclass_fields__"):
        assert type(a) is type(b)
        for name in a.__dataclass_fields__:
            same(getattr(a, name), getattr(b, name))
    elif isinstance(a, tuple):
        assert isinstance(b, tuple)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, Mapping):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    else:
        assert type(a) is type(b)
        assert a == b or a != a


def owner(identity: str = "run-1", **settings: Any) -> Owner:
    return Owner(identity, settings)


def written(path: Path, identity: str = "run-1", content: Any = None, **settings: Any) -> Path:
    checkpoint.save(
        path, owner(identity, **settings), {"state": outer() if content is None else content, "seconds": 1.5}
    )
    return path


def read(path: Path, identity: str = "run-1", hint: Any = Outer, **settings: Any) -> Any:
    return checkpoint.load(path, owner(identity, **settings), {"state": hint, "seconds": float})


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    content = read(written(tmp_path / "new" / "folder" / "run.safetensors"))
    same(content["state"], outer())
    assert content["seconds"] == 1.5


def test_a_key_with_a_dot_is_no_other_key(tmp_path: Path) -> None:
    """As names of tensors have them."""
    content = {"a.b": np.zeros(2), "a": np.ones(3)}
    path = tmp_path / "run.safetensors"
    checkpoint.save(path, owner(), {"x": content, "x.a": np.full(1, 7.0)})
    hints = {"x": dict[str, NDArray[np.float64]], "x.a": NDArray[np.float64]}
    found = checkpoint.load(path, owner(), hints)
    same(found["x"], content)
    same(found["x.a"], np.full(1, 7.0))


@given(value=st.dictionaries(st.text(max_size=4), st.floats() | st.integers(-5, 5).map(float), max_size=5))
def test_figures_survive(value: dict[str, float]) -> None:
    same(decode(dict[str, float], encode(value, {}), {}), value)


@pytest.mark.parametrize("value", [[1, 2], {1, 2}, object(), b"bytes", np.int64(3), 3j, Path("x"), {None: 1}])
def test_a_state_must_be_plain_data(value: object, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    with pytest.raises(TypeError, match=r"may not hold"):
        checkpoint.save(path, owner(), {"state": {"part": value}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_items_that_were_encoded_before_make_the_same_structure(tmp_path: Path, count: int) -> None:
    items = tuple({'a "quoted" name': float("nan"), "b": k, "c": None} for k in range(count))
    before, after = tmp_path / "before.safetensors", tmp_path / "after.safetensors"
    checkpoint.save(before, owner(), {"state": outer(), "history": items, "seconds": 0.5})
    texts = Texts([text_of(item) for item in items])
    checkpoint.save(after, owner(), {"state": outer(), "history": texts, "seconds": 0.5})
    headers = []
    for path in (before, after):
        with safe_open(path, framework="numpy") as file:
            headers.append(file.metadata())
    assert headers[0] == headers[1]


def test_what_is_encoded_beforehand_has_no_arrays() -> None:
    with pytest.raises(TypeError, match="dict holds arrays"):
        text_of({"a": np.zeros(2)})


@pytest.mark.parametrize("hint", [Any, list[int], object])
def test_structure_that_the_hint_does_not_describe_is_not_passed_on(hint: Any, tmp_path: Path) -> None:
    """Else a method would find `{"array": ...}` where it has put an array."""
    with pytest.raises(BadInput, match="does not hold the state"):
        read(written(tmp_path / "run.safetensors"), hint=hint)


# -- whole or the old one ------------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "run.safetensors")
    before = path.read_bytes()

    def half(arrays: Any, target: Path, metadata: Any) -> None:
        save_file(arrays, target, metadata)
        target.write_bytes(target.read_bytes()[:50])
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", half)
    with pytest.raises(checkpoint.NotWritten, match="No space left on device"):
        written(path, content=Inner(np.ones(3, np.float32)))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_before_the_rename_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "run.safetensors")
    before = path.read_bytes()

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        written(path, content=Inner(np.ones(3, np.float32)))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_file_replaces_the_old_one(tmp_path: Path) -> None:
    path = written(tmp_path / "run.safetensors")
    before = path.read_bytes()
    with path.open("rb") as reader:
        written(path, content=Inner(np.ones(3, np.float32), "new"))
        # Whoever reads meanwhile reads the old one to its end: it is replaced, not written over.
        assert reader.read() == before
    assert read(path, hint=Inner)["state"].note == "new"
    assert sorted(tmp_path.iterdir()) == [path, previous(path)]
    assert previous(path).read_bytes() == before


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 8, 60, 0.5, -1])
def test_a_cut_file_is_damaged(tmp_path: Path, kept: float) -> None:
    path = written(tmp_path / "run.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))] if isinstance(kept, float) else content[:kept])
    with pytest.raises(BadInput, match=r"is damaged(.|\n)*Remove .*run.safetensors"):
        read(path)


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    path = written(tmp_path / "run.safetensors")
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in [len(content) - 1, *rng.integers(0, len(content), 200).tolist()]:
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(changed))
        with pytest.raises(BadInput, match=r"Remove"):
            read(path)
    path.write_bytes(content)
    read(path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\xff" * 100, b"\x10" + b"\0" * 7 + b"{}"])
def test_something_else_is_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"checkpoint .*run.safetensors(.|\n)*Remove"):
        read(path)


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Remove"):
        read(tmp_path)


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "run.safetensors", "run-1")
    with pytest.raises(BadInput, match=r"belongs to run run-1, not to .*\(run-2\)"):
        read(path, "run-2")


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", "0")
    path = written(tmp_path / "run.safetensors")
    monkeypatch.undo()
    with pytest.raises(BadInput, match=r"has format 0, this version reads 2"):
        read(path)


def test_tensors_without_a_header_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    save_file({"weights": np.zeros(3)}, path)
    with pytest.raises(BadInput, match="has format None"):
        read(path)


@pytest.mark.parametrize("hint", [Inner, tuple[Inner, ...], dict[str, Inner], NDArray[np.float32]])
def test_a_state_of_another_shape_is_refused(tmp_path: Path, hint: Any) -> None:
    """As after an update of a method from another package, which keeps the identity of its runs."""
    path = written(tmp_path / "run.safetensors")
    with pytest.raises(BadInput, match="does not hold the state of this method"):
        read(path, hint=hint)


@pytest.mark.parametrize("content", [(), "text", {"inner": 3}, {"labels": None}])
def test_a_state_that_is_no_such_dataclass_is_refused(tmp_path: Path, content: Any) -> None:
    path = written(tmp_path / "run.safetensors", content=content)
    with pytest.raises(BadInput, match="does not hold the state of this method"):
        read(path)


@pytest.mark.parametrize(
    ("hint", "value"),
    [(int, "3"), (int, 1.0), (int, True), (float, "nan"), (float, None), (str, 3), (bool, 1), (float, True)],
)
def test_a_scalar_of_another_type_is_not_passed_on(hint: Any, value: object) -> None:
    with pytest.raises(TypeError):
        decode(hint, value, {})


def test_the_difference_to_the_other_run_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "run.safetensors", "run-1", seed=0, training={"rounds": 3, "lr": 0.1}, gone=True)
    with pytest.raises(BadInput) as caught:
        read(path, "run-2", seed=0, training={"rounds": 5, "lr": 0.1}, extra=[1])
    assert "training.rounds 3 there, 5 here; extra null there, [1] here; gone true there, null here" in str(
        caught.value
    )
    assert "seed" not in str(caught.value)
    assert "lr" not in str(caught.value)


def test_a_checkpoint_of_another_version_of_fedsir_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "__version__", "0.0.1")
    path = written(tmp_path / "run.safetensors")
    monkeypatch.undo()
    with pytest.raises(BadInput, match=r"written by fedsir 0\.0\.1.*\n.*Remove"):
        read(path)


# -- the previous one ----------------------------------------------------------------------------------------------


HINTS = {"state": Inner, "seconds": float}


def two(path: Path) -> Path:
    """A newest checkpoint with the note `second` and a previous one with `first`."""
    for note in ("first", "second"):
        written(path, content=Inner(np.ones(3, np.float32), note))
    return path


def test_the_newest_is_taken_without_a_remark(tmp_path: Path) -> None:
    assert checkpoint.resume(tmp_path / "run.safetensors", owner(), HINTS) is None
    found = checkpoint.resume(two(tmp_path / "run.safetensors"), owner(), HINTS)
    assert found is not None
    assert (found[0]["state"].note, found[1]) == ("second", None)


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "missing", "folder"])
def test_a_damaged_newest_one_gives_way_to_the_one_before(tmp_path: Path, damage: str) -> None:
    path = two(tmp_path / "run.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes({"cut": bytes(content[:-5]), "bit": bytes(content), "empty": b""}[damage])
    found = checkpoint.resume(path, owner(), HINTS)
    assert found is not None
    content_, remark = found
    assert content_["state"].note == "first"
    assert remark is not None
    assert "run.safetensors is " in remark
    assert "continuing from the one before it" in remark
    assert "\n" not in remark


def test_two_damaged_ones_are_refused_together(tmp_path: Path) -> None:
    path = two(tmp_path / "run.safetensors")
    for file in (path, previous(path)):
        file.write_bytes(b"nothing")
    with pytest.raises(BadInput, match=r"damaged.*\nRemove .* and run.safetensors.previous.*\nThe one before it"):
        checkpoint.resume(path, owner(), HINTS)


def test_a_sound_one_of_another_run_does_not_give_way(tmp_path: Path) -> None:
    """Else the checkpoint of a run would be continued in spite of what it says."""
    path = written(tmp_path / "run.safetensors", content=Inner(np.ones(3, np.float32), "first"))
    written(path, "run-2", content=Inner(np.ones(3, np.float32), "second"))
    with pytest.raises(BadInput, match="belongs to run run-2"):
        checkpoint.resume(path, owner(), HINTS)


def test_an_interrupt_between_the_renames_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = two(tmp_path / "run.safetensors")
    replace = Path.replace

    def once(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", once)
    with pytest.raises(KeyboardInterrupt):
        written(path, content=Inner(np.ones(3, np.float32), "third"))
    assert list(tmp_path.iterdir()) == [previous(path)]
    found = checkpoint.resume(path, owner(), HINTS)
    assert found is not None
    assert found[0]["state"].note == "second"
    assert "is missing" in str(found[1])


def test_both_are_removed_at_the_end(tmp_path: Path) -> None:
    path = two(tmp_path / "run.safetensors")
    checkpoint.remove(path)
    assert list(tmp_path.iterdir()) == []
    checkpoint.remove(path)
