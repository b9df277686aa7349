"""Where does identification work? Stage I alone, over noise settings, heterogeneity and seeds (the paper's Table 2).

Every finished condition is one line of a CSV file, so a study that was stopped goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from experiments.compare import variant
from experiments.config import RunFile, load_run_file
from experiments.session import Session
from experiments.studies.rows import RowFile
from fedsir.errors import BadInput
from fedsir.evaluation.identification import flipped_counts, identification_figures
from fedsir.methods.registry import find_method
from fedsir.methods.stage_one import IdentifyingConfig
from fedsir.seeding import Stream, integer
from fedsir.spectral.identification import identify

PAPER_NOISE = tuple(("symmetric", r / 10) for r in range(3, 10)) + tuple(("asymmetric", r / 10) for r in range(4, 10))
"""The paper's 13 noise settings."""

SPLITS = ("mixture", "largest_gap")

IDENTIFYING = ("oct_fedsir", "fedsir", "spectral_pruning")


@dataclass(frozen=True)
class Row:
    """Verdict of one method and split on one condition and seed.

    run: identity of the run whose stage I it was; rows of a file with the same are not computed again. clean_f1,
    margin and the counts are those of `identification_figures`; margin is the same for both splits.
    """

    run: str
    data: str
    kind: str
    clients: int
    noise: str
    ratio: float
    alpha: float
    seed: int
    method: str
    split: str
    clean: int
    called_clean: int
    accused_clean: int
    missed_noisy: int
    unflipped_noisy: int
    clean_f1: float
    accuracy: float
    margin: float
    smallest_client: int
    seconds: float


ROWS = RowFile(Row, "an identification study")


@dataclass(frozen=True)
class Plan:
    """The grid of a study."""

    methods: tuple[str, ...]
    noise: tuple[tuple[str, float], ...]
    alphas: tuple[float, ...]
    seeds: tuple[int, ...]

    def configs(self, source: str, overrides: Sequence[str]) -> Iterator[tuple[str, RunFile]]:
        """(method label, run file) of every cell, with settings shared as `fedsir compare` does (`variant`).

        Raises BadInput for methods without stage I.
        """
        base = load_run_file(source, overrides)
        if not isinstance(base.method, IdentifyingConfig):
            raise BadInput(f"{source}: method {base.method.name} has no stage I.\nSet method.name=oct_fedsir.")
        for label in self.methods:
            if not issubclass(find_method(label.partition("/")[0]).config, IdentifyingConfig):
                raise BadInput(f"--methods {label}: it has no stage I.\nChoose among {', '.join(IDENTIFYING)}.")
        for alpha, (noise, ratio), seed, method in product(self.alphas, self.noise, self.seeds, self.methods):
            cell = [
                f"federation.partition.alpha={alpha}",
                f"federation.noise.type={noise}",
                f"federation.noise.ratio={ratio}",
            ]
            yield method, variant(source, [*overrides, *cell], base, method, seed)


def study(
    session: Session, source: str, overrides: Sequence[str], plan: Plan, out: Path, tell: Callable[[str], None]
) -> list[Row]:
    """All rows of the plan, those in `out` included; new ones are appended to it as they come."""
    rows = ROWS.read(out)
    done = {row.run for row in rows}
    cells = list(plan.configs(source, overrides))
    ROWS.append(out, [])  # a file that cannot be written must not come up after the first condition
    for position, (method, config) in enumerate(cells):
        if config.identity() in done:
            continue
        found = _identify(session, config, method)
        ROWS.append(out, found)
        rows += found
        done.add(config.identity())
        marks = ", ".join(f"{r.split} F1 {100 * r.clean_f1:.0f}" for r in found)
        first = found[0]
        tell(
            f"{position + 1}/{len(cells)} {first.noise} {first.ratio} alpha {first.alpha} seed {first.seed} {method}: "
            f"{marks}, margin {first.margin:+.2f}, {first.seconds:.1f} s"
        )
    wanted = {config.identity() for _, config in cells}
    return [row for row in rows if row.run in wanted]


def _identify(session: Session, config: RunFile, label: str) -> list[Row]:
    begin = time.perf_counter()
    if not isinstance(config.method, IdentifyingConfig):
        raise TypeError(f"{label} has no stage I")
    settings = config.method.identification
    with session.server(config) as (server, condition):
        state = find_method(config.method.name).build(config.method).begin(server)
    seconds = time.perf_counter() - begin
    truth, federation = condition.truth, condition.federation
    flipped = flipped_counts(truth.labels, federation.observed)
    rows = []
    for split in SPLITS:
        chosen = settings.model_copy(update={"split": split})
        verdict = identify(state.identification.similarity, chosen, integer(config.seed, Stream.IDENTIFICATION))
        figures = identification_figures(truth.noisy, ~verdict.clean, verdict.descriptors, flipped)
        rows.append(
            Row(
                run=config.identity(),
                data=config.name,
                kind=condition.dataset.kind,
                clients=federation.num_clients,
                noise=config.federation.noise.type,
                ratio=config.federation.noise.ratio,
                alpha=config.federation.partition.alpha,
                seed=config.seed,
                method=label,
                split=split,
                clean=int(np.count_nonzero(~truth.noisy)),
                called_clean=int(np.count_nonzero(verdict.clean)),
                accused_clean=int(figures["accused_clean"]),
                missed_noisy=int(figures["missed_noisy"]),
                unflipped_noisy=int(figures["unflipped_noisy"]),
                clean_f1=figures["clean_f1"],
                accuracy=figures["accuracy"],
                margin=figures["margin"],
                smallest_client=int(federation.sizes.min()),
                seconds=seconds,
            )
        )
    return rows
