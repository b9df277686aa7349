"""`fedsir submit`: what would be sent, what is refused before, and the Jobs API by a client that plays a cluster."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from cluster import commands, jobs
from cluster.package import PACKAGES, check_size, stage
from cluster.submission import Submission, Wish, prepare
from fedsir.errors import BadInput, FedsirError, RunFailed

ADDRESS = "http://127.0.0.1:8265"
GRID = """
name: mine
base: {base}
methods: [fedavg]
seeds: [0, 1]
"""


def _wish(**changes: Any) -> Wish:
    return Wish(**{"grid": "quickstart", "store_on_head": "/data/fedsir", **changes})


def _words(submission: Submission) -> list[str]:
    return shlex.split(submission.entrypoint)


def _grid(folder: Path, base: str = "demo", text: str = GRID) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text.format(base=base))
    return path


# -- from a grid to a job ------------------------------------------------------------------------------------------


def test_job_is_the_sweep_that_a_laptop_would_run() -> None:
    submission = prepare(_wish(only=("method=fedavg",), overrides=("training.rounds=2",), shard="1/2", python="/v/py"))
    words = _words(submission)
    assert words[:3] == ["exec", "/v/py", "-c"]
    assert words[4:8] == ["sweep", "run", "quickstart", "--quiet"]
    options = list(zip(words[8::2], words[9::2], strict=True))
    assert ("--only", "method=fedavg") in options
    assert ("--shard", "1/2") in options
    assert ("--set", "training.rounds=2") in options
    assert ("--set", "tracking.uri=sqlite:////data/fedsir/mlflow.db") in options
    assert ("--set", "work_dir=/data/fedsir") in options
    # Last, so that nothing said before sends the job to another cluster.
    assert options[-1] == ("--set", "execution.ray_address=auto")
    assert submission.runs == 1
    assert submission.files == {}
    assert int(submission.runtime_env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 60
    assert _words(prepare(_wish(retry=True)))[5] == "retry"


def test_own_settings_win_over_the_store_on_the_head() -> None:
    submission = prepare(_wish(overrides=("tracking.uri=http://mlflow:5000",)))
    assert submission.record.startswith("http://mlflow:5000,")


def test_same_runs_have_the_same_id_and_others_another() -> None:
    wishes = [
        _wish(),
        _wish(overrides=("seed=0",), python="/v/py"),
        _wish(only=("method=fedavg",)),
        _wish(shard="1/2"),
        _wish(store_on_head="/elsewhere"),
        _wish(overrides=("tracking.experiment=other",)),
        _wish(retry=True),
    ]
    ids = [prepare(wish).job_id for wish in wishes]
    assert ids[0] == ids[1]
    assert len(set(ids)) == len(ids) - 1
    assert all(i.startswith("fedsir-quickstart-") for i in ids)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"store_on_head": None}, "--store-on-head"),
        ({"store_on_head": "relative"}, "absolute"),
        ({"store_on_head": None, "overrides": ("tracking.uri=http://mlflow:5000",)}, "work_dir = fedsir-runs"),
        ({"store_on_head": None, "overrides": ("tracking.uri=sqlite:///x/y.db", "work_dir=/w")}, "sqlite:///x/y.db"),
        ({"overrides": ("model.weights=mine.safetensors",)}, "model.weights = mine.safetensors"),
        ({"shard": "3/2"}, "--shard 3/2"),
        ({"grid": "quickstar"}, "Did you mean"),
        ({"only": ("method=fedavk",)}, "fedavk"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said.replace("(", r"\(")):
        prepare(_wish(**changes))


def test_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(BadInput) as refused:
        prepare(_wish(overrides=("tracking.uri=postgresql://me:s3cret@db/mlflow",)))
    assert "s3cret" not in str(refused.value)
    assert ".pgpass" in str(refused.value)


def test_images_must_be_named_by_a_path_of_the_cluster(tmp_path: Path) -> None:
    grid = str(_grid(tmp_path, "kermany"))
    with pytest.raises(BadInput, match=r"data.root = OCT2017"):
        prepare(_wish(grid=grid, overrides=("data.root=OCT2017",)))
    with pytest.raises(BadInput, match=r"data.root must be set"):
        prepare(_wish(grid=grid))
    # It need not exist here.
    assert prepare(_wish(grid=grid, overrides=("data.root=/data/OCT2017",))).runs == 2


def test_loopback_tracking_server_is_pointed_out() -> None:
    (note,) = prepare(_wish(overrides=("tracking.uri=http://localhost:5000",))).notes
    assert "head node" in note
    assert prepare(_wish()).notes == ()


def test_grid_with_several_records_is_refused_as_the_sweep_would(tmp_path: Path) -> None:
    places = (
        "axes:\n  place:\n"
        "    - {{label: one, set: [tracking.experiment=one, federation.noise.ratio=0.3]}}\n"
        "    - {{label: two, set: [tracking.experiment=two, federation.noise.ratio=0.6]}}\n"
    )
    grid = str(_grid(tmp_path, text=GRID + places))
    with pytest.raises(BadInput, match="recorded in several places"):
        prepare(_wish(grid=grid))
    assert prepare(_wish(grid=grid, only=("place=one",))).record.endswith("experiment one")


def test_grid_file_travels_with_its_bases_and_works_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bases").mkdir()
    demo = resources.files("experiments") / "presets" / "demo.yaml"
    (tmp_path / "bases" / "mine.yaml").write_text(demo.read_text())
    submission = prepare(_wish(grid=str(_grid(tmp_path, "bases/mine.yaml"))))
    assert set(submission.files) == {"grid/mine.yaml", "grid/bases/mine.yaml"}
    sent = tmp_path / "sent"
    sent.mkdir()
    stage(sent, submission.files)
    monkeypatch.chdir(sent)
    again = prepare(_wish(grid=_words(submission)[6]))
    assert (again.job_id, again.runs) == (submission.job_id, 2)


def test_base_that_cannot_travel_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside.yaml"
    demo = resources.files("experiments") / "presets" / "demo.yaml"
    outside.write_text(demo.read_text())
    (tmp_path / "grids").mkdir()
    for base in ("../outside.yaml", str(outside)):
        with pytest.raises(BadInput, match="Put it beside the grid"):
            prepare(_wish(grid=str(_grid(tmp_path / "grids", base))))


# -- what is sent ----------------------------------------------------------------------------------------------------


def test_packages_travel_whole_and_alone(tmp_path: Path) -> None:
    size = stage(tmp_path, {})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path).parts[0] for path in files} == set(PACKAGES)
    assert not [p for p in files if p.suffix == ".pyc" or "__pycache__" in p.parts]
    assert size == sum(path.stat().st_size for path in files)
    shown = "import experiments, fedsir; print(experiments.__file__, fedsir.__file__)"
    found = subprocess.run([sys.executable, "-c", shown], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(path.startswith(str(tmp_path)) for path in found.stdout.split())


def test_data_in_a_package_is_found_before_it_is_sent(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    big = tmp_path / "images.npy"
    big.write_bytes(b"x" * 3_000_000)
    with pytest.raises(BadInput, match=r"3\.0 MB .*images\.npy"):
        stage(target, {"grid/images.npy": big}, limit=4_000_000)
    assert list(target.iterdir()) == []


def test_what_is_weighed_is_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, package, target = tmp_path / "elsewhere", tmp_path / "fedsir", tmp_path / "target"
    for folder in (elsewhere, package / "data", package / "__pycache__", package / ".cache", target):
        folder.mkdir(parents=True)
    for file in ("data/one.py", "__pycache__/one.pyc", ".cache/images.npy", "data/.hidden"):
        (package / file).write_bytes(b"x" * 10)
    (elsewhere / "images.npy").write_bytes(b"x" * 5000)
    (package / "linked").symlink_to(elsewhere)
    monkeypatch.setattr("cluster.package.package_folders", lambda: {"fedsir": package})
    with pytest.raises(BadInput, match=r"linked/images\.npy"):
        stage(target, {}, limit=4000)
    assert list(target.iterdir()) == []
    assert stage(target, {}) == 5010
    sent = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert sent == {"fedsir/data/one.py", "fedsir/linked/images.npy"}


def test_largest_files_are_named_first() -> None:
    found = {Path(f"file-{n}"): n * 1_000_000 for n in range(1, 9)}
    with pytest.raises(BadInput) as refused:
        check_size(found, 30_000_000)
    lines = str(refused.value).splitlines()
    assert "36.0 MB along, more than 30 MB" in lines[0]
    assert [line.split()[-1] for line in lines[1:6]] == [f"file-{n}" for n in (8, 7, 6, 5, 4)]
    check_size(found, 36_000_000)


# -- the Jobs API ----------------------------------------------------------------------------------------------------


@dataclass
class Job:
    submission_id: str | None
    status: str
    message: str | None = None
    driver_exit_code: int | None = None
    start_time: int | None = 1000
    end_time: int | None = 61_000


@dataclass
class Cluster:
    """Plays a cluster. tails: what following gives, one after the other; an exception breaks the connection."""

    known: list[Job] = field(default_factory=list)
    tails: list[list[str | BaseException]] = field(default_factory=list)
    ends: str = "SUCCEEDED"
    refusal: Exception | None = None
    submitted: list[dict[str, Any]] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any]) -> str:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append({"entrypoint": entrypoint, "id": submission_id, "env": runtime_env})
        self.sent = sorted(path.name for path in Path(runtime_env["working_dir"]).iterdir())
        self.known.append(Job(submission_id, "RUNNING"))
        return submission_id

    def _job(self, job_id: str) -> Job:
        for job in self.known:
            if job.submission_id == job_id:
                return job
        raise RuntimeError(f"Request failed with status code 404: Job {job_id} does not exist.")

    def stop_job(self, job_id: str) -> bool:
        self._job(job_id).status = "STOPPED"
        return True

    def get_job_info(self, job_id: str) -> Job:
        return self._job(job_id)

    def list_jobs(self) -> Sequence[Job]:
        return self.known

    def get_job_logs(self, job_id: str) -> str:
        self._job(job_id)
        return "".join(f"line {n}\n" for n in range(100))

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for piece in self.tails.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield piece
        if not self.tails:
            self._job(job_id).status = self.ends


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    played = Cluster()
    monkeypatch.setattr(jobs, "connect", lambda _: played)
    monkeypatch.setattr(jobs, "POLL_S", 0.0)
    return played


def test_grid_is_sent_followed_and_ends_well(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.tails = [["one\ntwo\n", "three\n"]]
    commands.submit_grid(_wish(), ADDRESS, wait=True)
    assert cluster.sent == sorted(PACKAGES)
    shown = capsys.readouterr().out
    assert "5 runs" in shown
    assert "sqlite:////data/fedsir/mlflow.db" in shown
    assert shown.endswith("one\ntwo\nthree\n")


def test_running_grid_is_joined(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    commands.submit_grid(_wish(), ADDRESS, wait=False)
    commands.submit_grid(_wish(), ADDRESS, wait=False)
    assert len(cluster.submitted) == 1
    assert "nothing was sent" in capsys.readouterr().out


def test_grid_that_has_ended_gets_the_next_number(cluster: Cluster) -> None:
    base = prepare(_wish()).job_id
    cluster.known = [Job(None, "RUNNING"), Job(f"{base}x", "RUNNING"), Job(base, "STOPPED"), Job(f"{base}-2", "FAILED")]
    commands.submit_grid(_wish(), ADDRESS, wait=False)
    assert cluster.submitted[0]["id"] == f"{base}-3"


def test_whoever_is_faster_is_joined(cluster: Cluster) -> None:
    submission = prepare(_wish())

    def elsewhere(**_: Any) -> str:
        cluster.known.append(Job(submission.job_id, "PENDING"))
        raise RuntimeError("Job with submission_id already exists.")

    cluster.submit_job = elsewhere  # type: ignore[method-assign]
    assert jobs.submit(cluster, submission, Path(), ADDRESS) == (submission.job_id, True)


def test_refusal_of_the_cluster_is_told(cluster: Cluster) -> None:
    cluster.refusal = RuntimeError("Request failed with status code 500: disk full")
    with pytest.raises(BadInput, match="disk full"):
        commands.submit_grid(_wish(), ADDRESS, wait=False)


def test_broken_connection_repeats_nothing(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.known = [Job("fedsir-x", "RUNNING")]
    broken = RuntimeError("WebSocket connection closed unexpectedly")
    cluster.tails = [["one\ntw", broken], ["one\n", OSError("no route")], ["one\ntwo\n", "three\n"]]
    commands.show_logs("fedsir-x", ADDRESS, wait=True)
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_silent_cluster_is_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "RECONNECT_S", 0.0)
    cluster.known = [Job("fedsir-x", "RUNNING")]
    cluster.tails = [[OSError("no route")]]
    with pytest.raises(FedsirError, match="fedsir jobs logs fedsir-x"):
        jobs.follow(cluster, "fedsir-x", lambda _: None, ADDRESS)


def test_failed_job_is_a_failure(cluster: Cluster) -> None:
    cluster.tails, cluster.ends = [["text\n"]], "FAILED"
    with pytest.raises(RunFailed, match="has failed"):
        commands.submit_grid(_wish(), ADDRESS, wait=True)


def test_status_of_a_failed_job_ends_with_its_last_lines(cluster: Cluster) -> None:
    cluster.known = [Job("fedsir-x", "FAILED", driver_exit_code=2)]
    with pytest.raises(RunFailed) as failed:
        commands.show_status("fedsir-x", ADDRESS)
    lines = str(failed.value).splitlines()
    assert "exit code 2" in lines[0]
    assert lines[1:] == [f"line {n}" for n in range(80, 100)]


def test_job_that_never_started_says_why() -> None:
    with pytest.raises(RunFailed, match="No space left"):
        jobs.require_success(Job("x", "FAILED", "Failed to set up runtime environment: No space left"), "x")


def test_stopped_job_can_be_taken_up(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.known = [Job("fedsir-x", "RUNNING")]
    commands.stop_job("fedsir-x", ADDRESS)
    assert "STOPPED" in capsys.readouterr().out
    with pytest.raises(RunFailed, match="continues"):
        commands.show_status("fedsir-x", ADDRESS)


def test_ctrl_c_leaves_the_job_running(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.known = [Job("fedsir-x", "RUNNING")]
    cluster.tails = [["one\n", KeyboardInterrupt()]]
    with pytest.raises(KeyboardInterrupt):
        commands.show_logs("fedsir-x", ADDRESS, wait=True)
    assert cluster.known[0].status == "RUNNING"
    assert "fedsir jobs stop fedsir-x" in capsys.readouterr().err


@pytest.mark.usefixtures("cluster")
def test_unknown_job_is_told() -> None:
    for action in (commands.stop_job, commands.show_status):
        with pytest.raises(BadInput, match="knows no job fedsir-y"):
            action("fedsir-y", ADDRESS)
    with pytest.raises(BadInput, match="knows no job fedsir-y"):
        commands.show_logs("fedsir-y", ADDRESS, wait=True)


def test_only_jobs_of_fedsir_are_listed(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.known = [Job("other", "RUNNING"), Job("fedsir-x", "RUNNING", start_time=None), Job(None, "RUNNING")]
    commands.show_status(None, ADDRESS)
    shown = capsys.readouterr().out
    assert "fedsir-x" in shown
    assert "other" not in shown


# -- addresses and tokens --------------------------------------------------------------------------------------------


@contextmanager
def _server(status: int, body: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, "Unauthorized: Missing authentication token", "asks for a token"),
        (403, "Forbidden: Invalid authentication token", "refuses the token"),
        (200, "<html>a web page</html>", "does not answer as a Ray dashboard"),
        (500, "", "does not answer as a Ray dashboard"),
    ],
)
def test_answer_of_something_else_is_explained(status: int, body: str, said: str) -> None:
    with _server(status, body) as address, pytest.raises(BadInput, match=said) as refused:
        jobs.connect(address)
    if status in (401, 403):
        assert "RAY_AUTH_MODE=token" in str(refused.value)


def test_given_address_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    with _server(200, json.dumps({"version": "4", "ray_version": "2.60.0", "ray_commit": "x"})) as address:
        jobs.connect(address)


def test_nobody_at_the_address_is_told_at_once() -> None:
    with pytest.raises(BadInput, match=r"nobody answers there .*\n.*tunnel"):
        jobs.connect("http://127.0.0.1:1")


@pytest.mark.parametrize("address", ["ray://head:10001", "http://", "ftp://head:21", "http://head:nonsense", ""])
def test_what_is_no_dashboard_is_refused(address: str) -> None:
    with pytest.raises(BadInput, match="8265"):
        jobs.dashboard_url(address)


def test_token_in_clear_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jobs.token_in_clear("http://head:8265") is None
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert "unencrypted" in str(jobs.token_in_clear("head:8265"))
    assert jobs.token_in_clear("http://localhost:8265") is None
    assert jobs.token_in_clear("https://head:8265") is None


# -- the command -----------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy_and_has_examples() -> None:
    script = (
        "import contextlib, io, json, sys\n"
        "from experiments import cli\n"
        "texts = []\n"
        "for words in (['submit'], ['jobs'], ['jobs', 'status'], ['jobs', 'logs'], ['jobs', 'stop']):\n"
        "    sys.argv = ['fedsir', *words, '--help']\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):\n"
        "        cli.main()\n"
        "    texts.append(out.getvalue())\n"
        "heavy = [m for m in ('torch', 'ray', 'mlflow', 'numpy', 'pandas') if m in sys.modules]\n"
        "print(json.dumps([heavy, texts]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy, texts = json.loads(ended.stdout)
    assert heavy == []
    assert all("Example" in text and "Usage: fedsir" in text for text in texts)
