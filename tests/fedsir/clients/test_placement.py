"""Where actors go: the plan alone, and Ray's logical GPUs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsir.clients.memory_probe import GIB, Measured
from fedsir.clients.placement import MOVE_S, plan_layout
from fedsir.clients.sizing import Node, pool_size
from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput


def node(name: str, cpus: float, gpus: float = 0.0) -> Node:
    return Node(name, name, cpus, gpus)


# -- the plan ----------------------------------------------------------------------------------------------------


def test_thirty_clients_at_a_tenth_spread_over_four_gpus() -> None:
    layout = plan_layout(30, 0.1, 1, [node("a", 8, 4)])
    assert sorted(Counter(layout.homes).values()) == [7, 7, 8, 8]
    assert layout.homes[:5] == (0, 1, 2, 3, 0)
    assert layout.gpus == 0.1
    # Eight actors of a bundle share the two cores of its GPU.
    assert layout.cpus == 0.25
    assert [bundle["GPU"] for bundle in layout.bundles] == [1.0] * 4
    assert [bundle["CPU"] for bundle in layout.bundles] == [2.0, 2.0, 1.75, 1.75]


def test_whole_gpus_are_a_bundle_for_each_actor() -> None:
    layout = plan_layout(3, 2.0, 4, [node("a", 16, 4), node("b", 16, 3)])
    assert layout.homes == (0, 1, 2)
    assert layout.bundles == ({"GPU": 2.0, "CPU": 4.0},) * 3


def test_no_more_bundles_than_actors() -> None:
    assert len(plan_layout(2, 1.0, 1, [node("a", 8, 4)]).bundles) == 2


def test_bundles_fit_on_the_node_with_the_fewest_cores_per_gpu() -> None:
    layout = plan_layout(6, 0.5, 8, [node("head", 64), node("a", 32, 2), node("b", 4, 1)])
    assert layout.cpus == 2.0
    assert {bundle["CPU"] for bundle in layout.bundles} == {4.0}


@given(per_gpu=st.integers(1, 300), gpus=st.integers(1, 8), cpus=st.integers(0, 64))
def test_what_is_planned_into_a_bundle_fits_as_ray_counts(per_gpu: int, gpus: int, cpus: int) -> None:
    """Ray counts in 1/10000, and a sixth rounds up to 0.1667, six times which is more than one."""
    layout = plan_layout(per_gpu * gpus, 1 / per_gpu, 2, [node("a", cpus, gpus)])
    each = Counter(layout.homes)
    for number, bundle in enumerate(layout.bundles):
        assert each[number] == per_gpu
        assert each[number] * round(layout.gpus * 1e4) <= 1e4
        assert each[number] * round(layout.cpus * 1e4) <= round(bundle["CPU"] * 1e4)
    assert sum(round(bundle["CPU"] * 1e4) for bundle in layout.bundles) <= cpus * 1e4


def test_without_gpus_actors_spread_evenly_over_nodes() -> None:
    layout = plan_layout(3, 0.0, 1, [node("a", 1), node("b", 1), node("c", 1)])
    assert sorted(layout.homes) == [0, 1, 2]
    assert (layout.cpus, layout.gpus, layout.bundles) == (1.0, 0.0, ())
    # Four on three cores: two of them share one.
    layout = plan_layout(4, 0.0, 1, [node("a", 1), node("b", 1), node("c", 1)])
    assert sorted(Counter(layout.homes).values()) == [1, 1, 2]
    assert layout.cpus == 0.5


def test_nodes_get_actors_in_proportion_to_their_cores() -> None:
    assert Counter(plan_layout(9, 0.0, 1, [node("a", 8), node("b", 4), node("c", 0)]).homes) == {0: 6, 1: 3}


def test_one_node_is_shared_as_ever() -> None:
    assert plan_layout(3, 0.0, 1, [node("a", 2)]).cpus == 0.6666
    assert plan_layout(2, 0.0, 4, [node("a", 16)]).cpus == 4.0


# -- how many on several nodes -----------------------------------------------------------------------------------


def size(nodes: list[Node], per_gpu: int | None = None, clients: int = 30, **settings: Any) -> tuple[int, float]:
    return pool_size(ExecutionConfig(**settings), clients, nodes, per_gpu)


def test_actors_do_not_reach_over_nodes() -> None:
    three = [node(name, 3) for name in "abc"]
    assert size(three) == (9, 0.0)
    # Nine cores, but each actor needs two of one node.
    assert size(three, threads=2) == (3, 0.0)
    assert size([node("a", 8, 3), node("b", 8, 1)], gpus_per_client=2) == (1, 2.0)
    with pytest.raises(BadInput, match=r"2 actors with 2 GPU each .* 4 GPUs on 2 nodes, which hold 1"):
        size([node("a", 8, 3), node("b", 8, 1)], gpus_per_client=2, actors=2)


# -- measured ----------------------------------------------------------------------------------------------------


def test_auto_is_as_many_as_memory_holds_and_cores_can_drive() -> None:
    four = [node("a", 64, 4)]
    assert size(four, per_gpu=10, gpus_per_client="auto") == (30, 0.1)
    assert size(four, per_gpu=3, gpus_per_client="auto") == (12, 1 / 3)
    assert size([node("a", 8, 4)], per_gpu=10, gpus_per_client="auto") == (8, 0.1)
    assert size([node("a", 8, 4)], per_gpu=10, gpus_per_client="auto", actors="per-client") == (30, 0.1)
    with pytest.raises(BadInput, match=r"30 actors with 0\.5 GPU each"):
        size(four, per_gpu=2, gpus_per_client="auto", actors="per-client")


def test_auto_needs_no_gpu() -> None:
    assert size([node("a", 8)], gpus_per_client="auto") == (8, 0.0)
    assert size([node("a", 8, 2)], gpus_per_client="auto", device="cpu") == (8, 0.0)


def test_memory_of_an_actor_decides_how_many_fit() -> None:
    assert Measured(free=80 * GIB, per_actor=2 * GIB).actors_per_gpu() == 36
    assert Measured(free=10 * GIB, per_actor=9 * GIB).actors_per_gpu() == 1
    with pytest.raises(BadInput, match=r"one client takes 10.0 GiB of the GPU, of which 10.0 GiB are free"):
        Measured(free=10 * GIB, per_actor=10 * GIB).actors_per_gpu()


# -- logical GPUs ------------------------------------------------------------------------------------------------

PROBES = """
import collections, json, sys, time
import ray
from fedsir.clients.placement import Placement, live_nodes, plan_layout

class Probe:
    def where(self):
        return ray.get_runtime_context().get_accelerator_ids()["GPU"][0]

def place(actors, fraction):
    nodes = live_nodes()
    placement = Placement(plan_layout(actors, fraction, 1, nodes), nodes, 60.0)
    probes = [ray.remote(Probe).options(**placement.options(slot)).remote() for slot in range(actors)]
    where = ray.get([probe.where.remote() for probe in probes], timeout=240)
    for probe in probes:
        ray.kill(probe)
    placement.close()
    return where

def free():
    return ray.available_resources().get("GPU", 0.0)

ray.init("local", num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
found = {}
"""

FEW = """
found["six"] = place(6, 0.4)
until = time.monotonic() + 30
while free() < 4 and time.monotonic() < until:
    time.sleep(0.1)
found["released"] = free()

from fedsir.clients.pool import ActorPool
from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput

taken = ray.util.placement_group([{"GPU": 3}])
ray.get(taken.ready())
begin = time.monotonic()
try:
    ActorPool(ExecutionConfig(actors="per-client", gpus_per_client=0.1, startup_timeout_s=2.0), 30)
except BadInput as error:
    found["error"] = str(error)
found["seconds"] = time.monotonic() - begin
found["left"] = free()
try:
    ActorPool(ExecutionConfig(actors="per-client", gpus_per_client=0.2), 30)
except BadInput as error:
    found["never"] = str(error)
ray.util.remove_placement_group(taken)
pool = ActorPool(ExecutionConfig(actors=2, gpus_per_client=0.5), 2)
found["device"], found["slots"] = pool.device, len(set(pool.pids()))
pool.close()
until = time.monotonic() + 30
while free() < 4 and time.monotonic() < until:
    time.sleep(0.1)
found["after"] = free()
"""

LOST = """
ray.shutdown()
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 * 2**20})
nodes = [cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 * 2**20) for _ in range(2)]
ray.init(cluster.address, log_to_driver=False)
alive = live_nodes()
placement = Placement(plan_layout(2, 1.0, 1, alive), alive, 60.0)
found["before"] = [placement.holds(slot) for slot in (0, 1)]
cluster.remove_node(nodes[0])
until = time.monotonic() + 30
while all(placement.holds(slot) for slot in (0, 1)) and time.monotonic() < until:
    time.sleep(0.1)
found["after"] = [placement.holds(slot) for slot in (0, 1)]
lost = found["after"].index(False)
begin = time.monotonic()
found["moved"] = [placement.move(lost), placement.move(lost)]
found["seconds"] = time.monotonic() - begin
probe = ray.remote(Probe).options(**placement.options(1 - lost)).remote()
found["probe"] = ray.get(probe.where.remote(), timeout=60)
cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 * 2**20)
time.sleep(3)
found["joined"] = placement.move(lost)
placement.close()
"""

MANY = """
found["thirty"] = place(30, 0.1)
"""


def on_logical_gpus(work: str) -> dict[str, Any]:
    """What `work` puts into `found`, on a Ray with four logical GPUs of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", PROBES + work + "print(json.dumps(found))\nray.shutdown()"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "RAY_prestart_worker_first_driver": "0"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_logical_gpus_are_shared_evenly_and_given_back() -> None:
    found = on_logical_gpus(FEW)
    assert sorted(Counter(found["six"]).values()) == [1, 1, 2, 2]
    assert found["released"] == 4.0
    # Three of the four GPUs are taken: told in time, and nothing stays reserved.
    assert 2.0 <= found["seconds"] < 60.0
    assert "30 actors (0.0625 CPU, 0.1 GPU each; 4 bundles of 1 GPU and up to 0.5 CPU) did not start" in found["error"]
    assert "2 of 2 CPU, 1 of 4 GPU free" in found["error"]
    assert "startup_timeout_s" in found["error"]
    assert found["left"] == 1.0
    # More than there is at all needs no waiting.
    assert "30 actors with 0.2 GPU each do not fit: Ray sees 4 GPUs, which hold 20" in found["never"]
    assert (found["device"], found["slots"]) == ("cuda", 2)
    assert found["after"] == 4.0


@pytest.mark.slow
def test_the_bundle_of_a_lost_node_is_given_up_until_another_joins() -> None:
    found = on_logical_gpus(LOST)
    assert found["before"] == [True, True]
    assert sorted(found["after"]) == [False, True]
    assert found["moved"] == [False, False]
    # Waited for once, not for every actor that was there.
    assert MOVE_S <= found["seconds"] < 1.5 * MOVE_S
    assert found["probe"] == "0"
    assert found["joined"] is True


@pytest.mark.slow
def test_thirty_actors_at_a_tenth_of_four_logical_gpus() -> None:
    assert sorted(Counter(on_logical_gpus(MANY)["thirty"]).values()) == [7, 7, 8, 8]
