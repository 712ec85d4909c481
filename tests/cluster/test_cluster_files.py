"""The files in cluster/ hold against their schemas, and each schema against a typing mistake."""

import copy
import json
import os
import re
import shutil
import socket
import subprocess
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv
from ray_nodes import free_ports

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
RAY_VERSION = re.search(r"ray\[rllib\]==([\d.]+)", (ROOT / "setup.py").read_text()).group(1)
KUBERNETES = "1.31"
IMAGE = re.search(r"^export TRIAL_RAY_IMAGE=(\S+)$", (CLUSTER / "image.sh").read_text(), re.MULTILINE).group(1)


def load(name):
    """A file as it is applied: with the image's name put in, as ``envsubst '$TRIAL_RAY_IMAGE'`` does."""
    return yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8").replace("${TRIAL_RAY_IMAGE}", IMAGE))


def strict_object(required, **properties):
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


STRING, BOOLEAN, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
# rayStartParams become command-line options: YAML numbers are refused by the operator.
START_PARAMS = {"type": "object", "additionalProperties": STRING}
TEMPLATE = {"type": "object"}
CLUSTER_SPEC = strict_object(
    ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
    rayVersion=STRING,
    enableInTreeAutoscaling=BOOLEAN,
    autoscalerOptions=strict_object(
        [],
        version={"enum": ["v1", "v2"]},
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        idleTimeoutSeconds=COUNT,
        resources=TEMPLATE,
    ),
    authOptions=strict_object(["mode"], mode={"enum": ["token", "disabled"]}, secretName=STRING),
    headGroupSpec=strict_object(["template"], rayStartParams=START_PARAMS, template=TEMPLATE, labels=TEMPLATE),
    workerGroupSpecs={
        "type": "array",
        "items": strict_object(
            ["groupName", "minReplicas", "maxReplicas", "template"],
            groupName=STRING,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            numOfHosts=COUNT,
            idleTimeoutSeconds=COUNT,
            rayStartParams=START_PARAMS,
            labels=TEMPLATE,
            template=TEMPLATE,
        ),
    },
)
JOB_SPEC = strict_object(
    ["entrypoint", "rayClusterSpec"],
    entrypoint=STRING,
    runtimeEnvYAML=STRING,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
    shutdownAfterJobFinishes=BOOLEAN,
    ttlSecondsAfterFinished=COUNT,
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    rayClusterSpec=CLUSTER_SPEC,
)


def validate_kuberay(document):
    """Envelope by the schemas above, pod templates strictly by Kubernetes' own."""
    spec = {"RayCluster": CLUSTER_SPEC, "RayJob": JOB_SPEC}[document["kind"]]
    envelope = strict_object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "ray.io/v1"},
        kind=STRING,
        metadata=strict_object(["name"], name=STRING, namespace=STRING, labels=TEMPLATE),
        spec=spec,
    )
    jsonschema.validate(document, envelope)
    for template in pod_templates(document):
        jsonschema.validate(template, strict_object(["spec"], metadata=TEMPLATE, spec=TEMPLATE))
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def cluster_spec(document):
    return document["spec"].get("rayClusterSpec", document["spec"])


def pod_templates(document):
    spec = cluster_spec(document)
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def validate_runtime_env(document):
    """Types by Ray; unknown fields here, since Ray accepts them silently."""
    unknown = set(document) - RuntimeEnv.known_fields
    assert not unknown, f"unknown runtime_env fields: {unknown}"
    RuntimeEnv(**document)


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayjob.yaml"])
def test_kuberay_files_are_valid(name):
    validate_kuberay(load(name))


@pytest.mark.parametrize(
    "break_it",
    [
        lambda spec: spec.update(workerGroupSpec=spec.pop("workerGroupSpecs")),
        lambda spec: spec["authOptions"].update(mode="tokens"),
        lambda spec: spec["workerGroupSpecs"][0].pop("maxReplicas"),
        lambda spec: spec["workerGroupSpecs"][1]["rayStartParams"].update({"num-cpus": 16}),
        lambda spec: spec["headGroupSpec"]["template"].update(volumes=[]),
        lambda spec: spec["headGroupSpec"]["template"]["spec"]["containers"][0].update(imagePullPolice="Always"),
        lambda spec: spec["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"][0].update(containerPort="gcs"),
    ],
)
@pytest.mark.parametrize("name", ["raycluster.yaml", "rayjob.yaml"])
def test_a_typing_mistake_in_a_kuberay_file_is_found(name, break_it):
    document = copy.deepcopy(load(name))
    break_it(cluster_spec(document))
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError, KeyError)):
        validate_kuberay(document)


def test_job_and_cluster_describe_the_same_cluster():
    assert cluster_spec(load("rayjob.yaml")) == cluster_spec(load("raycluster.yaml"))


def test_every_pod_finds_its_volume():
    claim = load("volume.yaml")
    kubernetes_validate.validate(claim, KUBERNETES, strict=True)
    for template in pod_templates(load("raycluster.yaml")):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for mount in template["spec"]["containers"][0]["volumeMounts"]:
            assert volumes[mount["name"]]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_head_runs_no_actors_and_authentication_is_on():
    spec = cluster_spec(load("raycluster.yaml"))
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["authOptions"]["mode"] == "token"
    assert [group["groupName"] for group in spec["workerGroupSpecs"]] == ["env", "gpu"]


def test_the_jobs_experiment_exists_and_is_in_the_image():
    words = load("rayjob.yaml")["spec"]["entrypoint"].split()
    assert words[:2] == ["trial-ray", "train"]
    dockerfile = (CLUSTER / "Dockerfile").read_text()
    home = re.search(r"^WORKDIR (\S+)", dockerfile, re.MULTILINE).group(1)
    assert (ROOT / Path(words[2]).relative_to(home)).is_file()


def test_every_image_and_version_is_the_pinned_ray():
    assert cluster_spec(load("raycluster.yaml"))["rayVersion"] == RAY_VERSION
    images = [container["image"] for t in pod_templates(load("rayjob.yaml")) for container in t["spec"]["containers"]]
    images += [load(name)["docker"]["image"] for name in ("ray-up.yaml", "ray-up-static.yaml")]
    assert set(images) == {IMAGE}
    assert IMAGE.endswith(f"-ray{RAY_VERSION}")
    assert f"FROM rayproject/ray:{RAY_VERSION}-py311-gpu\n" in (CLUSTER / "Dockerfile").read_text()


def test_the_image_is_named_in_one_file():
    files = [*CLUSTER.iterdir(), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    repository, _, tag = IMAGE.rpartition(":")
    naming = [path.name for path in files for name in (repository, tag) if path.is_file() and name in path.read_text()]
    assert naming == ["image.sh"] * 2


def test_a_shell_that_reads_the_image_file_exports_its_name():
    done = subprocess.run(
        ["bash", "-uc", f"source {CLUSTER / 'image.sh'}; printenv TRIAL_RAY_IMAGE"], capture_output=True, text=True
    )
    assert done.stdout.strip() == IMAGE


def test_the_image_installs_extras_that_exist():
    extras = re.search(r'"\.\[([\w,-]+)\]"', (CLUSTER / "Dockerfile").read_text()).group(1).split(",")
    declared = (ROOT / "setup.py").read_text()
    assert [extra for extra in extras if f'"{extra}": ' not in declared] == []


@pytest.mark.parametrize("name", ["ray-up.yaml", "ray-up-static.yaml"])
def test_launcher_files_are_valid(name):
    validate_config(prepare_config(load(name)))


@pytest.mark.parametrize(
    "break_it",
    [
        lambda config: config.update(max_worker=2),
        lambda config: config.update(head_node_type="heads"),
        lambda config: config["available_node_types"]["gpu"].update(min_worker=1),
    ],
)
def test_a_typing_mistake_in_a_launcher_file_is_found(break_it):
    config = load("ray-up.yaml")
    break_it(config)
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        validate_config(prepare_config(config))


def test_the_runtime_environment_is_valid_and_names_what_exists():
    document = load("runtime_env.yaml")
    for module in document["py_modules"]:
        assert (ROOT / module / "__init__.py").is_file()
    # Ray looks for the folders themselves, from where the job is submitted.
    validate_runtime_env({**document, "working_dir": str(ROOT), "py_modules": []})


@pytest.mark.parametrize("mistake", [{"workingdir": "."}, {"env_vars": {"THREADS": 1}}, {"config": ["eager"]}])
def test_a_typing_mistake_in_the_runtime_environment_is_found(mistake):
    with pytest.raises((AssertionError, TypeError)):
        validate_runtime_env({"env_vars": {}, **mistake})


@pytest.mark.parametrize("name", ["submit.sh", "slurm.sh"])
def test_scripts_parse_are_executable_and_stop_at_errors(name):
    path = CLUSTER / name
    assert subprocess.run(["bash", "-n", path], capture_output=True, timeout=30).returncode == 0
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", path], timeout=60).returncode == 0


def test_a_script_that_does_not_parse_is_found(tmp_path):
    broken = tmp_path / "broken.sh"
    broken.write_text((CLUSTER / "submit.sh").read_text().replace("esac", "easc"))
    assert subprocess.run(["bash", "-n", broken], capture_output=True, timeout=30).returncode != 0


@pytest.fixture
def fake_command(tmp_path):
    """A stand-in for a program on PATH that prints its arguments, one a line."""

    def make(name, output='printf "%s\\n" "$@"'):
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{output}\n")
        path.chmod(0o755)
        return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return make


def run_script(name, *arguments, env=None, cwd=None):
    return subprocess.run([CLUSTER / name, *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=60)


EXPERIMENT = "tuned_examples/alfworld_qwen3_1.7b.py"


class Dashboard(BaseHTTPRequestHandler):
    """Answers as Ray's dashboard does; ``token`` is the one that it asks for."""

    token = ""

    def do_GET(self):
        given = self.headers.get("Authorization", "")
        status = 200 if not self.token or given == f"Bearer {self.token}" else 403 if given else 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({"ray_version": RAY_VERSION}).encode() if status == 200 else b"Unauthorized")

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture
def serve():
    """Start an HTTP server with a handler; returns its address."""
    with ExitStack() as stack:

        def start(handler):
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield start


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_submit_hands_the_command_on_word_for_word(fake_command, tmp_path, serve, command):
    address = serve(Dashboard)
    words = (command, EXPERIMENT, "--out", "/shared/a run", "--set", "a=b c")
    done = run_script(
        "submit.sh", "--address", address, "--no-wait", *words, env=fake_command("ray"), cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sent = done.stdout.splitlines()
    assert sent[:5] == ["job", "submit", "--address", address, "--no-wait"]
    assert sent[sent.index("--") + 1 :] == ["trial-ray", *words]


OUT = ("--out", "/shared/run")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "usage"),
        (("--adress", "x", "train", EXPERIMENT, *OUT), "usage"),
        ((EXPERIMENT, *OUT), "usage"),
        (("train",), "usage"),
        (("train", "no/such/file.py", *OUT), "no such file"),
        (("train", EXPERIMENT), "--out"),
        (("sweep", EXPERIMENT, "--out", "runs/relative"), "'runs/relative'"),
        (("train", EXPERIMENT, *OUT), "--address"),
        (("--address", "127.0.0.1:6379", "train", EXPERIMENT, *OUT), "'127.0.0.1:6379'"),
        (("--address", "http://127.0.0.1:1", "train", EXPERIMENT, *OUT), "no Ray dashboard answers"),
    ],
)
def test_submit_refuses_wrong_use_with_status_2_before_anything_is_sent(fake_command, arguments, told):
    env = fake_command("ray", "exit 77")
    env = {name: value for name, value in env.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    done = run_script("submit.sh", *arguments, env=env)
    assert done.returncode == 2
    assert "submit.sh" in done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("client", "told"),
    [
        ({}, "asks for a token"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong"}, "refuses the token"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "right"}, None),
    ],
)
def test_submit_tells_of_a_token_that_is_missing_or_wrong(fake_command, serve, tmp_path, client, told):
    env = fake_command("ray") | {"RAY_ADDRESS": serve(type("Guarded", (Dashboard,), {"token": "right"}))}
    env = {name: value for name, value in env.items() if not name.startswith("RAY_AUTH")} | {"HOME": str(tmp_path)}
    done = run_script("submit.sh", "train", EXPERIMENT, *OUT, env=env | client)
    assert done.returncode == (2 if told else 0)
    assert (told or "") in done.stderr


def test_submit_tells_of_a_port_that_another_program_has(fake_command, serve):
    class Other(Dashboard):
        def do_GET(self):
            self.send_error(404)

    done = run_script("submit.sh", "--address", serve(Other), "train", EXPERIMENT, *OUT, env=fake_command("ray"))
    assert done.returncode == 2
    assert "no Ray dashboard (HTTP status 404)" in done.stderr


@pytest.fixture
def allocation(fake_command):
    """Environment of a batch script on two Slurm nodes, the first being this machine."""
    fake_command("scontrol", "printf '127.0.0.1\\nnode2\\n'")
    return fake_command("srun") | {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}


def test_slurm_starts_the_run_once_with_one_task_a_node(allocation):
    (port,) = free_ports(1)
    done = run_script(
        "slurm.sh", "train", "file.py", "--out", "/a b", env=allocation | {"TRIAL_RAY_PORT": str(port)}
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert words[words.index("ray") :] == [
        "ray", "symmetric-run", "--address", f"127.0.0.1:{port}", "--min-nodes", "2", "--",
        "env", f"RAY_ADDRESS=127.0.0.1:{port}", "trial-ray", "train", "file.py", "--out", "/a b",
    ]  # fmt: skip


def test_slurm_refuses_a_port_in_use(allocation):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_script("slurm.sh", "train", "file.py", env=allocation | {"TRIAL_RAY_PORT": str(port)})
    assert done.returncode == 2
    assert f"port {port} is in use" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [(), ("file.py",), ("train",)])
def test_slurm_refuses_wrong_use(allocation, arguments):
    done = run_script("slurm.sh", *arguments, env=allocation)
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_the_readme_lists_every_file():
    readme = (CLUSTER / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([^`]+)` \|", readme, re.MULTILINE))
    assert listed == {path.name for path in CLUSTER.iterdir()} - {"README.md"}
