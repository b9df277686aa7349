"""What `fedsir submit` and `fedsir jobs` do; apart from `submit`, so that `--help` needs neither torch nor Ray."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster import jobs
from cluster.package import MEGABYTE, stage
from cluster.submission import Wish, prepare
from experiments.console import new_console, say


def submit_grid(wish: Wish, address: str, wait: bool) -> None:
    """Send a grid to the cluster and, with `wait`, follow it to its end.

    Raises BadInput before anything is sent, RunFailed where the job does not succeed.
    """
    submission = prepare(wish)
    console = new_console()
    with tempfile.TemporaryDirectory(prefix="fedsir-submit-") as folder:
        size = stage(Path(folder), submission.files)
        client = _connected(console, address)
        for note in submission.notes:
            say(console, f"note: {note}", "yellow")
        job, joined = jobs.submit(client, submission, Path(folder), address)
    if joined:
        say(console, f"job {job} is at these runs already; nothing was sent")
    else:
        runs = f"{submission.runs} run{'s' * (submission.runs != 1)}"
        say(console, f"job {job}: {runs}, {size / MEGABYTE:.1f} MB sent, recorded in {submission.record}")
    if wait:
        _follow(client, job, address)
    else:
        say(console, f"follow it with: fedsir jobs logs {job}")


def show_status(job: str | None, address: str) -> None:
    """Print all jobs of fedsir, or one. Raises RunFailed where that one did not succeed."""
    console = new_console()
    client = _connected(console, address)
    if job is None:
        table = Table()
        for column in ("job", "state", "minutes"):
            table.add_column(column, justify="right" if column == "minutes" else "left")
        for details in jobs.known(client, address):
            table.add_row(details.submission_id, str(details.status), _minutes(details))
        console.print(table)
        return
    details = jobs.info(client, job, address)
    say(console, f"job {job}: {details.status}, {_minutes(details)} minutes")
    if str(details.status) in jobs.FINAL:
        jobs.require_success(details, job, jobs.log(client, job, address))


def show_logs(job: str, address: str, wait: bool) -> None:
    """Print the log of a job. With `wait`, raises RunFailed where it does not succeed."""
    client = _connected(new_console(), address)
    if wait:
        _follow(client, job, address)
    else:
        _write(jobs.log(client, job, address))


def stop_job(job: str, address: str) -> None:
    """Stop a job and print what has become of it."""
    console = new_console()
    details = jobs.stop(_connected(console, address), job, address)
    say(console, f"job {job}: {details.status}")


def _connected(console: Console, address: str) -> jobs.JobsClient:
    warning = jobs.token_in_clear(address)
    if warning is not None:
        say(console, f"note: {warning}", "yellow")
    return jobs.connect(address)


def _follow(client: jobs.JobsClient, job: str, address: str) -> None:
    try:
        details = jobs.follow(client, job, _write, address)
    except KeyboardInterrupt:
        say(
            new_console(stderr=True),
            f"fedsir: job {job} goes on. Follow: fedsir jobs logs {job}; end: fedsir jobs stop {job}",
        )
        raise
    jobs.require_success(details, job)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _minutes(details: jobs.Details) -> str:
    if details.start_time is None:
        return "0"
    end = details.end_time or time.time() * 1000
    return f"{max(0.0, end - details.start_time) / 60_000:.1f}"
