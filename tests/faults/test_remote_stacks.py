"""The report of a stall holds the stacks of actors on other nodes, and waits for no node that does not answer."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ray_nodes import RayNodes

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

REPORT = """
import sys, time
import ray
from trial_ray.algorithms.actors import ENGINE, RunActor
from trial_ray.runs import watchdog
from trial_ray.process_reports import announce

class Hanging:
    def announce(self):
        announce()
    def hang_in_a_game(self):
        while True:
            time.sleep(1)

watchdog.NODE_S = float(sys.argv[1])
ray.init(log_to_driver=False)
places = {"head": ENGINE, "one": ENGINE, "two": ENGINE}
actors = []
for index, (place, kind) in enumerate(places.items()):
    handle = ray.remote(Hanging).options(num_cpus=0, resources={place: 0.1}).remote()
    ray.get(handle.announce.remote(), timeout=120)
    handle.hang_in_a_game.remote()
    actors.append(RunActor(kind, index, handle))
print("ready", flush=True)
sys.stdin.readline()
for told in watchdog._described(actors):
    print(f"--- {told}")
"""


@pytest.fixture
def nodes():
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = RayNodes(Path(folder))
        try:
            nodes.start_head("head")
            nodes.wait_for_nodes()
            for name in ("one", "two"):
                nodes.start_worker(name)
            nodes.wait_for_nodes()
            yield nodes
        finally:
            nodes.stop()


@pytest.mark.parametrize("how", ["answer", "one hangs"])
def test_stacks_of_actors_on_other_nodes(nodes, tell, how):
    limit = "60" if how == "answer" else "15"
    with subprocess.Popen(
        [sys.executable, "-c", REPORT, limit],
        env={**nodes.environment, "RAY_ADDRESS": nodes.address},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            if how == "one hangs":
                nodes.suspend("one")
            said, _ = process.communicate("\n", timeout=300)
        finally:
            process.kill()
    print(said)
    head, one, two = said.split("--- engine ")[1:]
    answered = [head, two] if how == "one hangs" else [head, one, two]
    for told in answered:
        assert "in hang_in_a_game" in told
    assert len({told.partition(" on node ")[2][:8] for told in (head, one, two)}) == 3
    if how == "one hangs":
        assert "no stacks: its node did not answer in time" in one
    tell("actors on three nodes hang", how, "stacks in the report")
