"""Ray's Jobs API: submit once, follow through broken connections, stop in order."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from cluster.submission import LOOPBACK_NAMES, Submission
from fedsir.errors import BadInput, FedsirError, RunFailed, first_line

CONNECT_TIMEOUT_S = 5.0
RECONNECT_S = 300.0
"""How long a job whose cluster does not answer is waited for."""

POLL_S = 2.0
STOP_S = 180.0
LAST_LINES = 20
FINAL = ("SUCCEEDED", "FAILED", "STOPPED")

_TALKATIVE = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
"""Loggers of Ray's client, which tell what they upload; they set their own levels when they are imported."""

TOKEN_REMEDY = (
    "Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the cluster's token (`ray get-auth-token` on the "
    "head prints it)."
)


class Details(Protocol):
    """What the cluster says about a job."""

    submission_id: str | None
    status: str
    message: str | None
    driver_exit_code: int | None
    start_time: int | None
    end_time: int | None


class JobsClient(Protocol):
    """The part of `ray.job_submission.JobSubmissionClient` that is used."""

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any]) -> str: ...
    def stop_job(self, job_id: str) -> bool: ...
    def get_job_info(self, job_id: str) -> Details: ...
    def list_jobs(self) -> Sequence[Details]: ...
    def get_job_logs(self, job_id: str) -> str: ...
    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]: ...


def connect(address: str) -> JobsClient:
    """A client of the cluster at `http://HOST:PORT`, its dashboard. Raises BadInput where it cannot be used."""
    url = dashboard_url(address)
    parts = urlsplit(url)
    try:
        # Ray would wait for minutes where packets are dropped.
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise BadInput(
            f"--address {address}: nobody answers there ({error.strerror or error}).\n"
            "The dashboard listens on the head's loopback address; open a tunnel with `ray dashboard CLUSTER.yaml` "
            "or `ssh -N -L 8265:127.0.0.1:8265 HEAD`, and leave --address out."
        ) from error
    from ray.job_submission import JobSubmissionClient

    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    with _refusals(address), _without_address_variables():
        client: JobsClient = JobSubmissionClient(url)
    return client


def dashboard_url(address: str) -> str:
    """`address` with its scheme. Raises BadInput for what is not the address of a dashboard."""
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known:
        raise BadInput(
            f"--address {address}: expected the cluster's dashboard, http://HOST:8265.\n"
            "Ports 6379 and 10001 (ray://) are for other purposes."
        )
    return url.rstrip("/")


def token_in_clear(address: str) -> str | None:
    """A warning where a token would cross a network unencrypted."""
    parts = urlsplit(dashboard_url(address))
    if os.environ.get("RAY_AUTH_MODE") != "token" or parts.scheme == "https" or parts.hostname in LOOPBACK_NAMES:
        return None
    return f"the token goes to {parts.hostname} unencrypted; an SSH tunnel or https would protect it"


def submit(client: JobsClient, submission: Submission, folder: Path, address: str) -> tuple[str, bool]:
    """Submit the job in `folder` unless the same runs are at work already; its id, and whether it was there before.

    Ray never gives an id twice, so further submissions of a job that has ended are numbered. Raises BadInput.
    """
    with _refusals(address):
        wanted, there = _next_id(client, submission.job_id)
        if there:
            return wanted, True
        environment = {**submission.runtime_env, "working_dir": str(folder)}
        try:
            client.submit_job(entrypoint=submission.entrypoint, submission_id=wanted, runtime_env=environment)
        except RuntimeError:
            # Somebody else may have been faster.
            again, there = _next_id(client, submission.job_id)
            if not there:
                raise
            return again, True
        return wanted, False


def _next_id(client: JobsClient, base: str) -> tuple[str, bool]:
    """The id of the job of this name that has not ended (True), or one that is free (False)."""
    numbers = [0]
    for job in client.list_jobs():
        match = re.fullmatch(rf"{re.escape(base)}(?:-([0-9]+))?", job.submission_id or "")
        if match is None:
            continue
        if str(job.status) not in FINAL:
            return match[0], True
        numbers.append(int(match[1] or 1))
    number = max(numbers) + 1
    return (base if number == 1 else f"{base}-{number}"), False


def follow(client: JobsClient, job: str, write: Callable[[str], None], address: str) -> Details:
    """Write the job's log as it grows until the job has ended; each piece once, also over broken connections.

    Raises BadInput where there is no such job, FedsirError where the cluster stays silent for `RECONNECT_S`.
    """
    info(client, job, address)
    pieces, heard = _Log(write), time.monotonic()
    while True:
        try:
            asyncio.run(pieces.read(client.tail_job_logs(job)))
            details = client.get_job_info(job)
            if str(details.status) in FINAL:
                return details
            heard = time.monotonic()
        except (RuntimeError, OSError) as error:  # those of aiohttp and requests are among them
            if time.monotonic() - heard > RECONNECT_S:
                raise FedsirError(
                    f"{address} has not answered for {RECONNECT_S:.0f} s ({first_line(error)}); job {job} may go on.\n"
                    f"Follow it again with fedsir jobs logs {job}."
                ) from error
        time.sleep(POLL_S)


class _Log:
    """Writes a log that is read from its beginning after every break of the connection."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._written = 0

    async def read(self, pieces: AsyncIterator[str]) -> None:
        position = 0
        async for text in pieces:
            fresh = text[max(0, self._written - position) :]
            position += len(text)
            if fresh:
                self._write(fresh)
                self._written = position


def info(client: JobsClient, job: str, address: str) -> Details:
    """What the cluster says about one job. Raises BadInput."""
    with _refusals(address):
        return client.get_job_info(job)


def log(client: JobsClient, job: str, address: str) -> str:
    """The job's log so far. Raises BadInput."""
    with _refusals(address):
        return client.get_job_logs(job)


def known(client: JobsClient, address: str) -> list[Details]:
    """All submitted grids, the oldest first. Raises BadInput."""
    with _refusals(address):
        ours = [job for job in client.list_jobs() if (job.submission_id or "").startswith("fedsir-")]
    return sorted(ours, key=lambda job: job.start_time or 0)


def stop(client: JobsClient, job: str, address: str) -> Details:
    """Ask the job to stop and wait until its runs are recorded as stopped. Raises BadInput, FedsirError."""
    with _refusals(address):
        client.stop_job(job)
        until = time.monotonic() + STOP_S
        while True:
            details = client.get_job_info(job)
            if str(details.status) in FINAL:
                return details
            if time.monotonic() > until:
                raise FedsirError(f"job {job} has not ended {STOP_S:.0f} s after it was asked to.")
            time.sleep(0.5)


def require_success(details: Details, job: str, log: str = "") -> None:
    """Raise RunFailed with the end of `log` where the job did not succeed."""
    status = str(details.status)
    if status == "SUCCEEDED":
        return
    if status == "STOPPED":
        raise RunFailed(f"job {job} was stopped. The same fedsir submit continues after the last finished rounds.")
    code = "" if details.driver_exit_code is None else f" with exit code {details.driver_exit_code}"
    lines = log.rstrip().splitlines()[-LAST_LINES:]
    if not lines and details.driver_exit_code is None and details.message:
        # It has not come to writing a log.
        lines = details.message.strip().splitlines()[:LAST_LINES]
    raise RunFailed("\n".join([f"job {job} has failed{code}.", *lines]))


@contextmanager
def _refusals(address: str) -> Iterator[None]:
    """What the cluster answers, in words of the user's."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        missing = first_line(error).startswith("Authentication required")
        what = "asks for a token" if missing else "refuses the token"
        raise BadInput(f"--address {address}: the cluster {what}.\n{TOKEN_REMEDY}") from error
    except RuntimeError as error:
        text = first_line(error)
        unknown = re.search(r"status code 404.*?[Jj]ob ([\w-]+)", text)
        if unknown:
            raise BadInput(f"{address} knows no job {unknown[1]}.\nThose that it knows: fedsir jobs status.") from error
        raise BadInput(f"--address {address}: the cluster refuses: {text}") from error
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"--address {address} does not answer as a Ray dashboard does ({first_line(error)}).\n"
            "Give the address of the dashboard, http://HOST:8265."
        ) from error


@contextmanager
def _without_address_variables() -> Iterator[None]:
    """Ray prefers these to the address that it is given."""
    names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
