"""Which runs of a plan have to be done, in which order, and what became of all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from experiments.expansion import PlannedRun

if TYPE_CHECKING:
    from fedsir.clients.runtime import Work
    from mlflow_tracking.states import RecordedState


@dataclass
class Tally:
    """What became of the runs of a sweep.

    finished_before: finished when the sweep came to them. failed_before: failed earlier and not tried again.
    held: another process was still working on them. undelivered: their store was out of reach. left: not come to
    because of the limit. seconds: wall time. slots: tasks that ran at the same time. work: what actors did; None
    without actors.
    """

    done: int = 0
    finished_before: int = 0
    failed: list[PlannedRun] = field(default_factory=list)
    failed_before: list[PlannedRun] = field(default_factory=list)
    held: list[PlannedRun] = field(default_factory=list)
    undelivered: list[PlannedRun] = field(default_factory=list)
    left: int = 0
    seconds: float = 0.0
    slots: int = 0
    work: Work | None = None

    @property
    def all_well(self) -> bool:
        return not self.failed and not self.failed_before and not self.undelivered


def queued(
    runs: Sequence[PlannedRun],
    states: Mapping[str, RecordedState],
    costs: Mapping[str, float],
    limit: int | None,
    retry: bool,
) -> tuple[list[PlannedRun], Tally]:
    """Interrupted and missing runs, or with `retry` failed ones, at most `limit`; and a tally of the others.

    Longest first by `costs` per identity, so that none is left alone at the end, but runs of one group follow each
    other, since they share federation and stage I: the group with the longest run comes first. Runs that are executed
    differently need other workers, of which there is one set at a time; they follow each other too.
    """
    tally, queue = Tally(), []
    for run in runs:
        known = states.get(run.identity)
        status = "missing" if known is None else known.status
        if status == "finished":
            tally.finished_before += 1
        elif (status == "failed") == retry:
            queue.append(run)
        elif status == "failed":
            tally.failed_before.append(run)
    layouts = list(dict.fromkeys(run.config.execution for run in queue))
    longest: dict[int, float] = defaultdict(float)
    for run in queue:
        longest[run.group] = max(longest[run.group], costs[run.identity])

    def place(run: PlannedRun) -> tuple[int, float, int, float]:
        layout = layouts.index(run.config.execution)
        return layout, -longest[run.group], run.group, -costs[run.identity]

    queue.sort(key=place)
    if limit is not None:
        tally.left = max(0, len(queue) - limit)
    return queue[:limit], tally
