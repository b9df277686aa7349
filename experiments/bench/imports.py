"""What `fedsir run demo` imports: the program until the first round has ended, an actor in a run of one round."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.bench.programs import Say
from experiments.bench.startup import FIRST_ROUND, SMALL, start_demo
from fedsir.errors import RunFailed

LINE = re.compile(r"import time: +(\d+) \| +\d+ \| +([\w.]+)$")
"""What Python writes of a module: microseconds without and with those that it imports, and its name."""

OF_AN_ACTOR = "worker-*.err"
"""Where Ray keeps what its workers write."""


@dataclass(frozen=True)
class Imports:
    """Modules and the seconds that executing them took, by package, under Python's own timing of imports.

    A package's seconds are those of its own modules, whoever has imported them. program: until the first round had
    ended. actor: the one with most modules, over the whole run of one round; what Ray's worker imports before it
    redirects its output to a file, Ray itself above all, is missing.
    """

    program: Mapping[str, tuple[int, float]]
    actor: Mapping[str, tuple[int, float]]

    def as_json(self) -> dict[str, object]:
        """All figures."""
        return {
            name: {package: {"modules": modules, "seconds": seconds} for package, (modules, seconds) in found.items()}
            for name, found in vars(self).items()
        }


def imports(quick: bool, say: Say) -> Imports:
    """Run the demo for a round on two actors, twice: the first run fills the file cache."""
    for _ in range(1 if quick else 2):
        found = _run()
    for name, packages in vars(found).items():
        say(f"{name}: {sum(m for m, _ in packages.values())} modules, {sum(s for _, s in packages.values()):.1f} s")
    return found


def by_package(lines: Iterable[str]) -> dict[str, tuple[int, float]]:
    """Modules and seconds of each package, dearest first, from lines that Python wrote; other lines are passed over."""
    modules: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for line in lines:
        if match := LINE.search(line.rstrip()):
            package = match[2].split(".")[0]
            modules[package] += 1
            seconds[package] += int(match[1]) / 1e6
    return {package: (modules[package], seconds[package]) for package in sorted(seconds, key=lambda p: -seconds[p])}


def _run() -> Imports:
    # Ray's folder holds sockets, whose paths have to be short.
    with TemporaryDirectory(prefix="fs-", ignore_cleanup_errors=True) as folder:
        process = start_demo(folder, SMALL, {"PYTHONPROFILEIMPORTTIME": "1", "RAY_TMPDIR": folder})
        output = list(process.stdout or ())
        ended = next((number for number, line in enumerate(output) if FIRST_ROUND.match(line)), None)
        if process.wait() or ended is None:
            written = "".join(line for line in output if not line.startswith("import time:"))
            raise RunFailed(f"`fedsir run demo` failed while its imports were listed:\n{written}")
        logs = [
            by_package(path.read_text(errors="replace").splitlines())
            for path in Path(folder).glob(f"**/logs/{OF_AN_ACTOR}")
        ]
    if not logs:
        raise RunFailed(f"Ray has kept no {OF_AN_ACTOR} of the actors whose imports were to be listed")
    return Imports(by_package(output[:ended]), max(logs, key=lambda found: sum(m for m, _ in found.values())))
