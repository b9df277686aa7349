"""Run files and grids made to do harm are refused in a few lines and at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.config import load_run_file
from experiments.grid import load_grid
from experiments.yaml_files import parse_yaml
from fedsir.errors import BadInput

BILLION = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(8)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BILLION, "line 2, column 8: aliases are not allowed"),
        ("a: !!python/object/apply:os.system [x]", r"tags \(python/object/apply:os.system\) are not allowed"),
        ("a: !!python/name:os.system", "tags"),
        ("a: !!binary aGk=", "tags"),
        ('a: !!int ""', "tags"),
        ("!!set {a}", "tags"),
        ("a: " + "[" * 100 + "]" * 100, "line 1, column 53: nested too deeply"),
        ("{a: " * 100 + "1" + "}" * 100, "nested too deeply"),
        ("a: 1" + ":1" * 200_000, "a number is too long"),
        ("a: 0x" + "f" * 100_000, "a number is too long"),
        ("a: 0x" + "f" * 16, "exceeds 64 bits"),
        ("a: 2020-02-30", "line 1, column 4: day is out of range"),
        ('a: "\\e[2J"', r"control character U\+001B"),
        ('a: "\\0"', r"control character U\+0000"),
        ('"\\ud800": 1', r"control character U\+D800"),
        ('a: "\\u202e"', r"control character U\+202E"),
    ],
)
def test_yaml_that_no_settings_need(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        parse_yaml(text, "x.yaml")
    assert str(caught.value).startswith("x.yaml is not valid YAML, line")
    assert len(str(caught.value)) < 500


def test_ordinary_text_is_read(tmp_path: Path) -> None:
    file = tmp_path / "ü b.yaml"
    name = "=1+1 [/] <b>ü</b> ../.. 漢字"
    # As editors on Windows write it.
    file.write_text(
        f'name: "{name}"\r\ndata: {{source: phantom}}\r\nmethod: fedavg\r\n', encoding="utf-8-sig", newline=""
    )
    assert load_run_file(str(file), []).name == name
    assert parse_yaml("a: |\n  two\n  lines\n", "x") == {"a": "two\nlines\n"}


def test_long_overrides_are_shortened_in_messages() -> None:
    with pytest.raises(BadInput) as caught:
        load_run_file("demo", ["seed=" + "9" * 100_000])
    assert len(str(caught.value)) < 500


def grid(folder: Path, more: str) -> Any:
    file = folder / "grid.yaml"
    file.write_text(f"name: g\nbase: demo\nmethods: [fedavg]\nseeds: [0, 1]\n{more}\n", encoding="utf-8")
    return load_grid(str(file))


def test_axes_that_multiply_beyond_all_bounds_are_refused(tmp_path: Path) -> None:
    values = list(range(1, 41))
    axes = "axes:\n" + "\n".join(f"  a{i}: {{key: training.rounds, values: {values}}}" for i in range(9))
    with pytest.raises(BadInput, match=r"multiply to 524,288,000,000,000 results, at most 100,000"):
        grid(tmp_path, axes)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('axes: {training.rounds: [""]}', "value 1 must be a single value"),
        ("axes: {training.rounds: [2020-01-01]}", "value 1 must be a single value"),
        ("axes: {a: [{label: x, base: " + "y" * 5000 + "}]}", "give it once"),
    ],
)
def test_values_that_are_none(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        grid(tmp_path, more)


def test_a_base_with_an_impossible_name_is_left_for_the_message_that_it_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(f"name: g\nbase: {'y' * 5000}\nmethods: [fedavg]\nseeds: [0]\n")
    assert load_grid(str(file)).base == "y" * 5000


@pytest.mark.parametrize("key", ["evaluation.bootstrap_samples", "federation.partition.max_redraws"])
def test_numbers_that_would_take_all_memory_or_time_are_refused(key: str) -> None:
    with pytest.raises(BadInput, match=rf"{key} = 1000000000: must be at most 100000"):
        load_run_file("demo", [f"{key}=1000000000"])
    assert load_run_file("demo", [f"{key}=100000"]).name == "demo"
