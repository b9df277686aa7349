"""`--help` everywhere: examples, and nothing heavy imported for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMANDS = [
    [],
    ["run"],
    ["compare"],
    ["explain"],
    ["methods"],
    ["doctor"],
    ["bench"],
    ["report"],
    ["submit"],
    ["jobs"],
    ["jobs", "status"],
    ["jobs", "logs"],
    ["jobs", "stop"],
    ["sweep"],
    ["sweep", "plan"],
    ["sweep", "run"],
    ["sweep", "retry"],
    ["sweep", "status"],
    ["tracking"],
    ["tracking", "serve"],
    ["tracking", "export"],
    ["tracking", "import"],
    ["ui"],
    ["data"],
    ["data", "inspect"],
    ["data", "pretext-weights"],
    ["data", "consortium"],
    ["audit"],
    ["audit-review"],
    ["study", "audit"],
]

SCRIPT = """
import contextlib, io, json, sys
from experiments import cli
texts = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["fedsir", *words, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main()
    texts.append(out.getvalue())
heavy = [m for m in ("torch", "ray", "mlflow", "numpy", "pandas", "matplotlib", "sklearn") if m in sys.modules]
print(json.dumps({"texts": texts, "heavy": heavy}))
"""


@pytest.fixture(scope="module")
def helped() -> dict[str, list[str]]:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    found: dict[str, list[str]] = json.loads(ended.stdout)
    return found


def test_help_imports_nothing_heavy(helped: dict[str, list[str]]) -> None:
    assert helped["heavy"] == []


@pytest.mark.parametrize("position", range(len(COMMANDS)), ids=lambda i: " ".join(COMMANDS[i]) or "fedsir")
def test_help_has_an_example_of_the_command(helped: dict[str, list[str]], position: int) -> None:
    text = helped["texts"][position]
    assert f"Usage: {' '.join(['fedsir', *COMMANDS[position]])}" in text
    _, found, examples = text.partition("Example")
    assert found
    assert " ".join(["fedsir", *COMMANDS[position]]) in " ".join(examples.split())
