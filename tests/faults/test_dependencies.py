"""Minimum versions: what is installed has them, and each has its reason written down."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REQUIREMENTS = {requirement.name: requirement for requirement in map(Requirement, PROJECT["dependencies"])}


def minimum(requirement: Requirement) -> str:
    (only,) = requirement.specifier
    assert only.operator == ">="
    return only.version


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_what_is_installed_has_the_minimum(name: str) -> None:
    assert minimum(REQUIREMENTS[name])
    assert REQUIREMENTS[name].specifier.contains(version(name), prereleases=True)


def test_every_minimum_has_its_reason_in_the_table() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Dependencies")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| (\S.*) \|$", text, re.MULTILINE)
    assert {name: least for name, least, _ in rows} == {n: minimum(r) for n, r in REQUIREMENTS.items()}
    assert len(rows) == len(REQUIREMENTS)


def test_a_tracking_server_in_a_container_has_the_same_minimum() -> None:
    text = (ROOT / "mlflow_tracking" / "compose.yaml").read_text("utf-8")
    assert f"'mlflow>={minimum(REQUIREMENTS['mlflow'])},<" in text


@pytest.mark.skipif(find_spec("pip") is None, reason="this environment has no pip")
def test_installed_packages_agree_with_each_other() -> None:
    ended = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    # Others may share the environment; what they lack is not this package's.
    own = [line for line in ended.stdout.splitlines() if line.startswith("fedsir ")]
    assert own == [], ended.stdout
