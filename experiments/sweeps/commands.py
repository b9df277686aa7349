"""What the commands of `fedsir sweep` do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from experiments.commands import SAME, open_session
from experiments.compare import ALL_CLEAN
from experiments.console import new_console, say, waiting
from experiments.expansion import (
    Plan,
    PlannedRun,
    absent_files,
    expanded,
    parse_shard,
    require_complete,
    tracking_of,
)
from experiments.grid import SEED
from experiments.sweeps.estimate import relative_costs
from experiments.sweeps.parent_run import settle_sweep_run, sweep_run, without_tracking
from experiments.sweeps.progress import SweepProgress
from experiments.sweeps.queue import queued
from experiments.sweeps.tables import outcome_table, plan_table, status_table, time_table, usage_lines
from experiments.sweeps.words import many
from fedsir.errors import BadInput
from mlflow_tracking.config import TrackingConfig, shown_uri

if TYPE_CHECKING:
    from experiments.sweeps.estimate import Estimate
    from experiments.sweeps.queue import Tally
    from mlflow_tracking.states import RecordedState
    from mlflow_tracking.store import Store

MAX_NAMED = 10


def plan_grid(source: str, only: Sequence[str], overrides: Sequence[str], calibrate: bool) -> bool:
    """Print what a grid asks for, needs and lacks; whether it could run once the settings it lacks are given."""
    plan = expanded(source, only, overrides)
    tracking = tracking_of(plan)
    from experiments.sweeps.estimate import Estimate
    from experiments.sweeps.faults import find_faults
    from experiments.sweeps.needs import disk_line, image_lines, memory_line, shared_line, time_lines

    console = new_console()
    estimate = Estimate(plan.runs)
    console.print(plan_table(plan))
    for line in (*count_lines(plan), shared_line(estimate), *image_lines(estimate)):
        say(console, line)
    if calibrate:
        seconds = _measured(console, estimate)
        if seconds:
            console.print(time_table(estimate, seconds))
        for line in time_lines(estimate, seconds):
            say(console, line)
    else:
        say(console, "time: give --calibrate for an estimate; it measures this machine for a few seconds")
    for line, warning in (disk_line(estimate, tracking), memory_line(estimate)):
        say(console, line)
        if warning is not None:
            say(console, f"  {warning}", "yellow")
    if plan.missing:
        say(console, "Before it can run:")
        for key in plan.missing:
            say(console, f"  --set {key}=VALUE")
    faults = find_faults(plan, estimate)
    if faults:
        say(console, "It cannot work:")
        for fault in faults:
            say(console, f"  {fault}", "red")
    return not faults


def _measured(console: Console, estimate: Estimate) -> dict[str, float]:
    """Expected seconds of one worker by identity, of runs whose images are known."""
    from experiments.sweeps.calibration import calibrate

    with waiting(console, "measuring this machine"):
        return estimate.seconds(calibrate(e.workload for e in estimate.runs if e.work is not None))


def count_lines(plan: Plan) -> list[str]:
    """Conditions, results and runs in words."""
    per_label = Counter(cell.method for cell in plan.cells)
    conditions = len({cell.condition for cell in plan.cells})
    ordinary = [m for m in per_label if m != ALL_CLEAN]
    results, clean = sum(per_label[m] for m in ordinary), per_label[ALL_CLEAN]
    lines = []
    if ordinary:
        lines.append(
            f"{many(conditions, 'condition')} × {many(len(ordinary), 'method')} × "
            f"{many(len(plan.chosen[SEED]), 'seed')}: {many(results, 'method run')}"
            + ("" if not plan.grid.exclude else ", without what the grid excludes")
        )
    if clean:
        runs = sum(run.cells[0].method == ALL_CLEAN for run in plan.runs)
        lines.append(f"all_clean: {many(clean, 'result')} from {many(runs, 'run')}, as it does not depend on noise")
    return [*lines, f"distinct runs: {len(plan.runs)} for {many(len(plan.cells), 'result')}"]


@dataclass(frozen=True)
class RunOptions:
    """How a sweep works. in_flight: runs at the same time, None for as many as memory and workers allow."""

    shard: str | None = None
    limit: int | None = None
    in_flight: int | None = None
    quiet: bool = False
    retry: bool = False


def run_grid(source: str, only: Sequence[str], overrides: Sequence[str], options: RunOptions) -> bool:
    """Run what the record lacks, or with `retry` what has failed; whether all of that is well and recorded."""
    part = None if options.shard is None else parse_shard(options.shard)
    whole = plan = _runnable(source, only, overrides)
    if part is not None:
        plan = whole.shard(*part)
    if not plan.runs:
        say(new_console(), f"nothing in shard {options.shard}: the grid has fewer conditions and seeds than shards")
        return True
    tracking = tracking_of(plan)
    console = new_console()
    costs = relative_costs(plan.runs)
    store, states = _recorded(console, plan, tracking)
    queue, tally = queued(plan.runs, states, costs, options.limit, options.retry)
    about = _about(whole, overrides)
    if queue:
        progress = SweepProgress(console, len(queue), options.quiet, {r.identity: costs[r.identity] for r in queue})
        progress.already(tally.finished_before, len(tally.failed_before))
        _work(console, queue, tally, progress, options.in_flight, partial(sweep_run, plan=whole, about=about))
    elif store is not None:
        settle_sweep_run(store, whole, about)
    console.print(outcome_table(f"grid {plan.grid.name}", tally))
    for line in usage_lines(tally):
        say(console, line)
    failed = [*tally.failed, *tally.failed_before]
    for what, runs in (("failed", failed), ("not recorded", tally.undelivered)):
        for run in runs[:MAX_NAMED]:
            say(console, f"{what}: {run.label}", "red")
        if len(runs) > MAX_NAMED:
            say(console, f"and {len(runs) - MAX_NAMED} more")
    if failed:
        say(console, "reasons: fedsir sweep status; again: fedsir sweep retry")
    if tally.undelivered:
        kept = queue[0].config.checkpoint_file.parent
        say(console, f"what is not recorded is kept in {kept}; fedsir sweep run continues there")
    say(console, f"recorded in {shown_uri(tracking.uri)}, experiment {tracking.experiment}")
    return tally.all_well


def _work(
    console: Console,
    queue: Sequence[PlannedRun],
    tally: Tally,
    progress: SweepProgress,
    in_flight: int | None,
    above: Callable[[Store], AbstractContextManager[str]],
) -> None:
    """Do the runs of the queue, which is not empty. above: the MLflow run of the sweep."""
    most_clients = max(run.config.federation.clients for run in queue)
    with open_session(console, queue[0].config.execution, SAME, most_clients=most_clients) as session:
        from experiments.checks import check_execution, check_work_dir
        from experiments.sweeps.sweep import Sweep

        # Faults of the machine concern every run; they must not be recorded as so many failures.
        for execution, clients in {(r.config.execution, r.config.federation.clients) for r in queue}:
            check_execution(execution, clients)
        check_work_dir(queue[0].config)
        with above(session.store(queue[0].config)) as parent, progress:
            Sweep(session, progress, tally, parent).run(queue, in_flight)


def _about(plan: Plan, overrides: Sequence[str]) -> list[str]:
    """What the description of the MLflow run of the sweep says beside the counts of its runs."""
    images = sorted({run.config.data.source for run in plan.runs})
    only = [
        f"only {axis}: {', '.join(labels)}" for axis, labels in plan.chosen.items() if labels != plan.grid.labels(axis)
    ]
    given = [f"with `--set {setting}`" for setting in without_tracking(overrides)]
    return [f"images: {', '.join(images)}", *count_lines(plan), *only, *given]


def _recorded(
    console: Console, plan: Plan, tracking: TrackingConfig
) -> tuple[Store | None, Mapping[str, RecordedState]]:
    """What the store knows of the runs; looking at a grid that has not begun creates nothing, not even the store."""
    with waiting(console, "reading the MLflow store"):
        from mlflow_tracking.delivery import patiently
        from mlflow_tracking.states import recorded_states
        from mlflow_tracking.store import check_store, prepare_store

        looked = check_store(tracking)
        if looked.reachable and looked.runs == 0:
            return None, {}
        store = prepare_store(tracking)
        look = partial(recorded_states, store, [run.identity for run in plan.runs])
        return store, patiently(store, look, tracking.patience_s)


def grid_status(source: str, only: Sequence[str], overrides: Sequence[str]) -> None:
    """Print what the store holds of a grid."""
    plan = expanded(source, only, overrides)
    require_complete(plan)
    tracking = tracking_of(plan)
    console = new_console()
    _, states = _recorded(console, plan, tracking)
    console.print(status_table(plan, states))
    for run in plan.runs:
        state = states.get(run.identity)
        if state is not None and state.status == "failed":
            reason = state.error.strip().splitlines()[0] if state.error.strip() else "no reason is recorded"
            say(console, f"failed: {run.label}: {reason}", "red")
    say(console, f"store {shown_uri(tracking.uri)}, experiment {tracking.experiment}")


def _runnable(source: str, only: Sequence[str], overrides: Sequence[str]) -> Plan:
    plan = expanded(source, only, overrides)
    require_complete(plan)
    absent = absent_files(plan)
    if absent:
        raise BadInput("\n".join([f"grid {plan.grid.name}: images cannot be found.", *absent]))
    return plan
