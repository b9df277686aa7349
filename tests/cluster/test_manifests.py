"""Cluster files: valid for their own tools, guarded, and safe to start again."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib import resources
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.submission import STOP_PATIENCE_S, check_paths, check_record
from experiments.expansion import expand
from experiments.grid import load_grid
from fedsir.clients.placement import plan_layout
from fedsir.clients.sizing import Node, pool_size
from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput

FOLDER = Path(str(resources.files("cluster")))
SCRIPTS = sorted(FOLDER.glob("slurm/*.sh"))
LAUNCHER = [FOLDER / "on_premises.yaml", FOLDER / "aws.yaml"]
EVERYTHING = [*SCRIPTS, *LAUNCHER, FOLDER / "rayjob.yaml", FOLDER / "Containerfile"]


def _names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _code(path: Path) -> str:
    """The file without its comments."""
    return "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))


def _commands(path: Path) -> list[str]:
    """Every command that a launcher file has nodes run."""
    content = _yaml(path)
    return [command for key, value in content.items() if key.endswith("_commands") for command in value]


# -- guarded ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EVERYTHING, ids=_names(EVERYTHING))
def test_nothing_opens_itself_to_every_address(path: Path) -> None:
    assert "0.0.0.0" not in path.read_text()
    assert "::/0" not in path.read_text()


@pytest.mark.parametrize("path", LAUNCHER, ids=_names(LAUNCHER))
def test_every_ray_asks_for_the_token_and_keeps_its_dashboard_to_itself(path: Path) -> None:
    starts = [command for command in _commands(path) if "ray start" in command]
    assert len(starts) == 2
    for command in starts:
        assert "RAY_AUTH_MODE=token" in command
        if "--head" in command:
            assert "--dashboard-host=127.0.0.1" in command
    assert any(target.endswith(".ray/auth_token") for target in _yaml(path)["file_mounts"])


@pytest.mark.parametrize("path", EVERYTHING, ids=_names(EVERYTHING))
def test_no_secret_is_written_down(path: Path) -> None:
    assert not re.search(r"(?i)(password|secret|token|key)\s*[:=]\s*['\"]?[A-Za-z0-9+/_-]{16,}", _code(path))
    assert not re.search(r"\w+://\w+:[^@/\s]+@", _code(path))


def test_security_group_of_the_cloud_is_not_the_world() -> None:
    rules = _yaml(FOLDER / "aws.yaml")["provider"]["security_group"]["IpPermissions"]
    assert [rule["FromPort"] for rule in rules] == [22]
    assert all(int(entry["CidrIp"].partition("/")[2]) >= 16 for rule in rules for entry in rule["IpRanges"])


# -- valid for their tools -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LAUNCHER, ids=_names(LAUNCHER))
def test_launcher_file_fits_the_schema_that_ray_ships(path: Path) -> None:
    spec = find_spec("ray")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    schema = json.loads((Path(spec.submodule_search_locations[0]) / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(_yaml(path), schema)


def test_cloud_nodes_are_bounded_and_the_head_takes_no_work() -> None:
    content = _yaml(FOLDER / "aws.yaml")
    types = content["available_node_types"]
    assert types[content["head_node_type"]]["resources"] == {"CPU": 0}
    assert sum(t.get("max_workers", 0) for t in types.values()) <= content["max_workers"]
    assert content["idle_timeout_minutes"] <= 15


@pytest.mark.parametrize("path", SCRIPTS, ids=_names(SCRIPTS))
def test_script_is_clean(path: Path) -> None:
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


def _objects() -> dict[str, Any]:
    return {item["kind"]: item for item in yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text())}


# Fields of KubeRay's API `ray.io/v1`, as far as they concern a job; what is not here is a slip of the pen.
WORDS = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
START = {"type": "object", "additionalProperties": WORDS}
POD = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["containers"],
            "additionalProperties": False,
            "properties": {
                "restartPolicy": {"enum": ["Never", "OnFailure", "Always"]},
                "automountServiceAccountToken": {"type": "boolean"},
                "securityContext": {"type": "object"},
                "volumes": {"type": "array"},
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["name", "image", "resources"],
                        "additionalProperties": False,
                        "properties": {
                            "name": WORDS,
                            "image": {"type": "string", "pattern": r":[\w.-]+$"},
                            "resources": {"type": "object", "required": ["requests", "limits"]},
                            "volumeMounts": {"type": "array"},
                        },
                    },
                },
            },
        },
    },
}
RAYJOB = {
    "type": "object",
    "required": ["entrypoint", "rayClusterSpec"],
    "additionalProperties": False,
    "properties": {
        "entrypoint": WORDS,
        "runtimeEnvYAML": WORDS,
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        "backoffLimit": COUNT,
        "submitterConfig": {"additionalProperties": False, "properties": {"backoffLimit": COUNT}},
        "activeDeadlineSeconds": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
        "shutdownAfterJobFinishes": {"type": "boolean"},
        "ttlSecondsAfterFinished": COUNT,
        "submitterPodTemplate": POD,
        "rayClusterSpec": {
            "type": "object",
            "required": ["headGroupSpec"],
            "additionalProperties": False,
            "properties": {
                "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
                "authOptions": {"additionalProperties": False, "properties": {"mode": {"enum": ["token", "disabled"]}}},
                "headGroupSpec": {
                    "required": ["template", "rayStartParams"],
                    "additionalProperties": False,
                    "properties": {"template": POD, "rayStartParams": START},
                },
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {
                        "required": ["groupName", "template", "rayStartParams", "minReplicas", "maxReplicas"],
                        "additionalProperties": False,
                        "properties": {
                            "groupName": WORDS,
                            "replicas": COUNT,
                            "minReplicas": COUNT,
                            "maxReplicas": COUNT,
                            "rayStartParams": START,
                            "template": POD,
                        },
                    },
                },
            },
        },
    },
}


def _pods(spec: Any) -> Iterator[Any]:
    yield spec["submitterPodTemplate"]
    yield spec["rayClusterSpec"]["headGroupSpec"]["template"]
    for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
        yield group["template"]


def test_rayjob_has_the_fields_of_kuberay() -> None:
    job = _objects()["RayJob"]
    assert (job["apiVersion"], job["metadata"]["name"]) == ("ray.io/v1", "fedsir-grid")
    jsonschema.validate(job["spec"], RAYJOB)
    assert job["spec"]["rayClusterSpec"]["authOptions"]["mode"] == "token"


def test_pods_of_the_rayjob_fit_together() -> None:
    objects = _objects()
    claim = objects["PersistentVolumeClaim"]["metadata"]["name"]
    chosen = objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    for pod in _pods(objects["RayJob"]["spec"]):
        assert chosen.items() <= pod["metadata"]["labels"].items()
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        mounted = {m["name"] for container in pod["spec"]["containers"] for m in container.get("volumeMounts", [])}
        assert mounted == set(volumes)
        assert {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v} <= {
            claim
        }
    assert {pod["spec"]["containers"][0]["image"] for pod in _pods(objects["RayJob"]["spec"])} == {
        _yaml(FOLDER / "aws.yaml")["docker"]["image"]
    }


# -- safe to start again ---------------------------------------------------------------------------------------------


def test_entry_point_of_the_rayjob_continues_and_keeps_its_record() -> None:
    spec = _objects()["RayJob"]["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == ["fedsir", "sweep", "run"]
    assert words[-1] != "--fresh"
    overrides = [value for option, value in pairwise(words) if option == "--set"]
    configs = [run.config for run in expand(load_grid(words[3]), (), overrides).runs]
    check_record(configs)
    check_paths(configs)
    assert {config.execution.ray_address for config in configs} == {"auto"}
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (place,) = [m["mountPath"] for m in head["containers"][0]["volumeMounts"] if m["name"] == "data"]
    assert all(str(config.work_dir).startswith(f"{place}/") for config in configs)
    assert spec["backoffLimit"] > 0
    patience = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]
    assert patience == str(STOP_PATIENCE_S)


STUBS = {
    # What follows the options of `ray symmetric-run`, on this machine.
    "ray": '[ "$1" = get-auth-token ] && exit 0\necho "$@" >> "$SEEN/ray"\n'
    'while [ "$1" != -- ]; do shift; done; shift; "$@"',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo node1; echo node2; else echo "$@" >> "$SEEN/requeued"; fi',
    "fedsir": 'echo "$@" > "$SEEN/fedsir"; trap "echo came > $SEEN/term; exit 143" TERM\n'
    'if [ -n "$SLOW" ]; then sleep 60 & wait $!; fi; exit "${CODE:-0}"',
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Environment of a SLURM job whose commands are stubs; `SEEN` is where they note what they were told."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in STUBS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "VENV": str(tmp_path / "venv"),
        "RUNS": str(tmp_path / "runs"),
        "SEEN": str(tmp_path),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "32",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_ARRAY_JOB_ID": "17",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_ARRAY_TASK_COUNT": "4",
    }


GIVEN = ["paper", "--only", "task=kermany", "--set", "kermany.data.root=/data/OCT 2017"]


def _seen(slurm: dict[str, str], name: str) -> str:
    return Path(slurm["SEEN"], name).read_text().strip()


@pytest.mark.parametrize("path", SCRIPTS, ids=_names(SCRIPTS))
def test_script_runs_the_grid_with_what_it_is_given(path: Path, slurm: dict[str, str]) -> None:
    ended = subprocess.run([path, *GIVEN], env=slurm, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    told = _seen(slurm, "fedsir")
    assert told.startswith("sweep run paper --quiet")
    assert told.endswith(" ".join(GIVEN[1:]))
    if path.name == "array.sh":
        assert "--shard 2/4" in told
        assert f"tracking.uri=sqlite:///{slurm['RUNS']}/part-2-of-4/mlflow.db" in told
    else:
        assert "--set execution.ray_address=auto" in told
        ray = _seen(slurm, "ray")
        assert "symmetric-run --address node1:6379 --min-nodes 2 --num-cpus 32 --num-gpus 4" in ray
        assert "--include-dashboard false" in ray


@pytest.mark.parametrize("path", SCRIPTS, ids=_names(SCRIPTS))
def test_failure_of_the_grid_is_the_failure_of_the_job(path: Path, slurm: dict[str, str]) -> None:
    ended = subprocess.run([path, "paper"], env={**slurm, "CODE": "1"}, timeout=60, capture_output=True, check=False)
    assert ended.returncode == 1
    assert not Path(slurm["SEEN"], "requeued").exists()


@pytest.mark.parametrize("path", SCRIPTS, ids=_names(SCRIPTS))
def test_time_limit_stops_the_grid_in_order_and_queues_it_again(path: Path, slurm: dict[str, str]) -> None:
    process = subprocess.Popen([path, "paper"], env={**slurm, "SLOW": "1"}, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while not Path(slurm["SEEN"], "fedsir").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
    assert _seen(slurm, "term") == "came"
    assert _seen(slurm, "requeued") == ("requeue 17_2" if path.name == "array.sh" else "requeue 17")


def test_script_without_a_grid_says_what_it_wants(slurm: dict[str, str]) -> None:
    for path in SCRIPTS:
        ended = subprocess.run([path], env=slurm, capture_output=True, text=True, check=False)
        assert ended.returncode != 0
        assert "usage: sbatch" in ended.stderr


def test_image_copies_what_there_is_and_runs_as_nobody_special() -> None:
    lines = _code(FOLDER / "Containerfile").replace("\\\n", " ").splitlines()
    sources = [word for line in lines if line.startswith("COPY ") for word in shlex.split(line)[1:-1]]
    assert {"fedsir", "mlflow_tracking", "experiments", "cluster", "pyproject.toml"} <= set(sources)
    root = FOLDER.parent
    assert [name for name in sources if not (root / name).exists()] == []
    instructions = [line.split()[0] for line in lines if re.match(r"[A-Z]+ ", line)]
    assert "EXPOSE" not in instructions
    assert "USER" in instructions
    assert "USER root" not in lines


def test_arithmetic_of_the_guide_is_that_of_the_code() -> None:
    rows = re.findall(
        r"^\| ([\d.]+) \| ([\d, ]+) \| (\d+) \| (\d+) \| (\d+) \|$", (FOLDER / "README.md").read_text(), re.M
    )
    assert len(rows) == 5
    machine = [Node("one", "one", cpus=32, gpus=4)]
    for fraction, per_gpu, actors, turns, cores in rows:
        slots, share = pool_size(ExecutionConfig(gpus_per_client=float(fraction)), 30, machine)
        layout = plan_layout(slots, share, 1, machine)
        assert [layout.homes.count(gpu) for gpu in range(4)] == [int(n) for n in per_gpu.split(",")]
        assert (slots, -(-30 // slots)) == (int(actors), int(turns))
        assert layout.bundles[0]["CPU"] == float(cores)
    with pytest.raises(BadInput, match="28"):
        pool_size(ExecutionConfig(actors="per-client", gpus_per_client=0.13), 30, machine)
    assert pool_size(ExecutionConfig(actors="per-client"), 30, machine)[1] == 0.125
