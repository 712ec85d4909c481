"""A Ray cluster of several nodes on this machine, each a ``ray start`` of its own, apart from any other Ray here."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
from commands import environment, wait_until
from fault_checks import written_metrics

START_S = 900.0
# `ray start`, on a machine on which the agents of a node may need more than Ray's 15 s.
NODE = """
from ray.scripts.scripts import main
from trial_ray.ray_internals import slow_start

with slow_start():
    main()
"""


REPEATABLE = {
    "engine": "transformers",
    # One request at a time: with seeds, a run of fixed size ends with the same weights.
    "engine_kwargs": {"max_batch": 1, "num_threads": 1},
    "seeded_sampling": True,
    "evaluation_split": None,
    "hindsight_start_iteration": 1,
}
"""Settings of every run on a cluster."""


def free_ports(count):
    """Ports that nobody listens on; held together until all are known, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


class RayNodes:
    """One head, and worker nodes by name; each declares one unit of a custom resource that bears its name.

    Args:
        folder: of Ray's files and of the nodes' logs. Ray's sockets live under it, and their paths must stay short.
        resources: amounts of further custom resources of every node.

    Attributes:
        environment: of a client that holds the token.
        address: where ``ray.init`` connects.
        ids: of the nodes by the names of their resources, as of the last :meth:`wait_for_nodes`.
    """

    def __init__(self, folder, resources):
        self.folder, self._resources = folder, resources
        port, self._dashboard = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self.environment = {
            **environment("RAY_"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self._dashboard}",
        }
        self.ids = {}
        self._killed = set()
        self._nodes = {}

    def start_head(self):
        """Start the head, without waiting for it."""
        (client,) = free_ports(1)
        port = self.address.rpartition(":")[2]
        self._start(
            "head",
            f"--head --port={port} --dashboard-host=127.0.0.1 "
            f"--dashboard-port={self._dashboard} --ray-client-server-port={client} --disable-usage-stats",
        )

    def start_worker(self, name):
        """Start a worker node, without waiting for it."""
        self._start(name, f"--address={self.address}")

    def kill(self, name):
        """End a node as a power failure would: its raylet gets SIGKILL, and takes the actors on it along."""
        node, raylets = self._taken(name)
        raylets[0].kill()
        node.wait(timeout=300)

    def drain(self, name):
        """Tell Ray that a node will be taken away in a minute, as an autoscaler or a spot machine's notice does.

        Ray places nothing more there, and ends the node when its actors are gone; see :meth:`wait_for_end`.
        """
        words = (
            f"ray drain-node --address {self.address} --node-id {self.ids[name]} --reason DRAIN_NODE_REASON_PREEMPTION "
            f"--reason-message gone --deadline-remaining-seconds 60"
        )
        subprocess.run(words.split(), env=self.environment, check=True, timeout=300)

    def wait_for_end(self, name):
        """Wait until the raylet of a node that is drained has ended by itself; ``ray start --block`` goes on without."""
        node, raylets = self._taken(name)  # without a raylet if it has ended
        assert not psutil.wait_procs(raylets, timeout=START_S)[1], f"{name} has not ended within {START_S:.0f} s"
        node.terminate()
        node.wait(timeout=300)

    def _taken(self, name):
        """A node that does not count from now on, and its raylet, the process that it stands or falls with."""
        node = self._nodes.pop(name)
        self._killed.add(self.ids[name])
        return node, [child for child in psutil.Process(node.pid).children() if child.name() == "raylet"]

    def stop(self):
        """Stop every node, the head last."""
        for node in reversed(self._nodes.values()):
            node.send_signal(signal.SIGTERM)
            node.wait(timeout=300)

    def wait_for_nodes(self):
        """Wait until all nodes have joined."""
        wait_until(self._have_joined, within_s=START_S)

    def _have_joined(self):
        for name, node in self._nodes.items():
            assert node.poll() is None, f"{name} ended: {self._log(name).read_text()}"
        try:
            self.ids = self._declared()
        except OSError:  # The dashboard does not answer yet.
            return False
        return self.ids.keys() >= self._nodes.keys()

    def wait_for_jobs(self):
        """Wait until the head takes jobs: its dashboard answers before the agent that starts them does."""
        wait_until(self._takes_jobs, within_s=START_S)

    def _takes_jobs(self):
        try:
            return self._request("/api/jobs/", b'{"entrypoint": "true"}')
        except urllib.error.HTTPError:
            return False

    @property
    def workers(self):
        """Names of the workers that have not been taken away."""
        return [name for name in self._nodes if name != "head"]

    def living_actors(self, name):
        """The classes of the actors that live on a node, by the state API."""
        listed = self._listed("actors?detail=1&limit=1000")
        return " ".join(
            each["class_name"] for each in listed if each["node_id"] == self.ids[name] and each["state"] == "ALIVE"
        )

    def _declared(self):
        """Names of the resources that living nodes declare, and those nodes' ids; Ray takes a while to see that one is dead."""
        nodes = self._listed("nodes?detail=1&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE")
        living = [node for node in nodes if node["node_id"] not in self._killed]
        return {name: node["node_id"] for node in living for name in node["resources_total"]}

    def _listed(self, query):
        return self._request(f"/api/v0/{query}")["data"]["result"]["result"]

    def _request(self, path, data=None):
        request = urllib.request.Request(
            self.environment["RAY_API_SERVER_ADDRESS"] + path,
            data,
            headers={
                "Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def _start(self, name, arguments):
        agent, grpc, export = free_ports(3)
        common = (
            # Files of its own, as on a machine of its own: a node removes the jobs' folders that its actors need no more.
            f"--block --temp-dir={self.folder / name} --num-cpus=1 --object-store-memory=100000000 "
            f"--dashboard-agent-listen-port={agent} --dashboard-agent-grpc-port={grpc} --metrics-export-port={export} "
            f"--min-worker-port=0 --max-worker-port=0"
        )
        resources = json.dumps({name: 1, **self._resources})
        with self._log(name).open("wb") as output:
            node = subprocess.Popen(
                [sys.executable, "-c", NODE, "start", *common.split(), f"--resources={resources}", *arguments.split()],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._nodes[name] = node

    def _log(self, name):
        return self.folder / f"{name}.log"


@contextmanager
def cluster_of(*workers, **resources):
    """A head, called ``head``, and workers, all of which have joined; stopped on the way out.

    Args:
        workers: names.
        resources: amounts of further custom resources of every node.
    """
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = RayNodes(Path(folder), resources)
        try:
            nodes.start_head()
            nodes.wait_for_nodes()
            for name in workers:
                nodes.start_worker(name)
            nodes.wait_for_nodes()
            yield nodes
        finally:
            nodes.stop()


class ClusterRun:
    """A ``trial-ray train`` of the quickstart on a cluster, whose iterations are read as they are written.

    Args:
        nodes: of the cluster.
        folder: of the run; its log is beside it.
        settings: of the run.
        iterations: to train.
        options: further ones of the command.
        program: words that are called; where they are not the command itself, they find the cluster by its dashboard.
    """

    def __init__(self, nodes, folder, settings, iterations, *options, program=()):
        self.folder, self._log = folder, folder.with_suffix(".log")
        words = f"train tuned_examples/alfworld_quickstart.py --out {folder} --iterations {iterations}".split()
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                [*(program or ["trial-ray"]), *words, *options, *as_options(settings)],
                cwd=Path(__file__).parents[2],
                env=nodes.environment if program else {**nodes.environment, "RAY_ADDRESS": nodes.address},
                stdout=output,
                stderr=output,
            )

    @property
    def printed(self):
        return self._log.read_text()

    def iterations(self):
        """The metrics that are written."""
        return written_metrics(self.folder)

    def wait_for(self, seen):
        """Wait until the iterations are as they should be."""
        deadline = time.monotonic() + START_S
        while not seen(self.iterations()):
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.02)

    def end(self):
        """Exit code, once the run has ended."""
        return self.process.wait(timeout=START_S)

    def close(self):
        self.process.kill()
        self.process.wait(timeout=60)


def as_options(settings):
    """``--set name=value`` for each, for :data:`REPEATABLE`, and for a share of a CPU for each actor of the run."""
    actors = ("per_env_runner", "per_engine", "per_learner", "for_main_process")
    shares = {f"num_cpus_{actor}": 0.2 for actor in actors}
    chosen = shares | REPEATABLE | settings
    return [part for name, value in chosen.items() for part in ("--set", f"{name}={value}")]
