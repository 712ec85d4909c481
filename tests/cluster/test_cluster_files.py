"""The files in cluster/ hold against their schemas, and each schema against a typing mistake."""

import copy
import json
import os
import re
import shutil
import subprocess
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray._private.runtime_env.packaging import create_package
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv
from ray.scripts.scripts import drain_node
from ray_nodes import free_ports

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
RAY_VERSION = re.search(r"ray\[rllib\]==([\d.]+)", (ROOT / "setup.py").read_text()).group(1)
KUBERNETES = "1.31"
IMAGE = re.search(r"^export TRIAL_RAY_IMAGE=(\S+)$", (CLUSTER / "image.sh").read_text(), re.MULTILINE).group(1)


def load(name):
    """A file as it is applied: with the image's name put in, as ``envsubst '$TRIAL_RAY_IMAGE'`` does."""
    return yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8").replace("${TRIAL_RAY_IMAGE}", IMAGE))


def strict(names, **typed):
    """Schema of an object that has no other fields than these; a name with ``!`` must be there."""
    fields = [name.rstrip("!") for name in names.split()]
    required = [field for field, name in zip(fields, names.split(), strict=True) if name != field]
    properties = {field: typed.get(field, {}) for field in fields}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# rayStartParams become command-line options: the operator refuses YAML numbers.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
GROUP = "template! rayStartParams labels"
CLUSTER_SPEC = strict(
    "rayVersion! headGroupSpec! workerGroupSpecs! enableInTreeAutoscaling autoscalerOptions authOptions",
    autoscalerOptions=strict("version upscalingMode idleTimeoutSeconds resources"),
    authOptions=strict("mode! secretName", mode={"enum": ["token", "disabled"]}),
    headGroupSpec=strict(GROUP, rayStartParams=TEXTS),
    workerGroupSpecs={
        "items": strict(
            f"{GROUP} groupName! minReplicas! maxReplicas! replicas numOfHosts idleTimeoutSeconds", rayStartParams=TEXTS
        )
    },
)
JOB_SPEC = strict(
    "entrypoint! rayClusterSpec! runtimeEnvYAML submissionMode shutdownAfterJobFinishes ttlSecondsAfterFinished "
    "activeDeadlineSeconds backoffLimit",
    rayClusterSpec=CLUSTER_SPEC,
)
METADATA = strict("name! namespace labels")


def cluster_spec(document):
    return document["spec"].get("rayClusterSpec", document["spec"])


def pod_templates(document):
    spec = cluster_spec(document)
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def require_valid(document):
    """The envelope by the schemas above, the pods strictly by Kubernetes' own."""
    spec = {"RayCluster": CLUSTER_SPEC, "RayJob": JOB_SPEC}[document["kind"]]
    envelope = strict(
        "apiVersion! kind! metadata! spec!", apiVersion={"const": "ray.io/v1"}, metadata=METADATA, spec=spec
    )
    jsonschema.validate(document, envelope)
    for template in pod_templates(document):
        jsonschema.validate(template, strict("metadata spec!"))
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayjob.yaml"])
def test_kuberay_files_are_valid(name):
    require_valid(load(name))


def patched(name):
    """``raycluster.yaml`` after a JSON patch."""
    document = load("raycluster.yaml")

    def inside(path):
        *parents, last = [part.replace("~1", "/") for part in path.split("/")[1:]]
        target = document
        for part in parents:
            target = target[int(part) if isinstance(target, list) else part]
        return target, int(last) if last.isdigit() else last

    for operation in load(name):
        target, key = inside(operation["path"])
        if operation["op"] == "copy":
            source, index = inside(operation["from"])
            target.append(copy.deepcopy(source[index]))
        else:
            target[key] = operation["value"]
    return document


def test_a_spot_pool_is_patched_in_beside_the_lasting_gpu_pods():
    document = patched("spot.yaml")
    require_valid(document)
    _, lasting, spot = document["spec"]["workerGroupSpecs"]
    assert (spot["groupName"], spot["minReplicas"], spot["replicas"]) == ("spot", 0, 0)
    # Ray's start command unwraps the outer quotes in a shell.
    declared = [json.loads(json.loads(group["rayStartParams"]["resources"])) for group in (lasting, spot)]
    assert declared == [{"lasting": 8}, {"spot": 8}]
    assert lasting["template"] == pod_templates(load("raycluster.yaml"))[-1]
    # Ray's command has these options.
    (hook,) = [
        container["lifecycle"]["preStop"]["exec"]["command"][-1] for container in spot["template"]["spec"]["containers"]
    ]
    options = {option for parameter in drain_node.params for option in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", hook)) <= options
    seconds = int(re.search(r"--deadline-remaining-seconds (\d+)", hook).group(1))
    assert seconds < spot["template"]["spec"]["terminationGracePeriodSeconds"]


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


@pytest.mark.parametrize("name", ["ray-up.yaml", "ray-up-static.yaml"])
def test_launcher_files_are_valid(name):
    validate_config(prepare_config(load(name)))


def test_the_runtime_environment_is_valid_and_names_what_exists():
    document = load("runtime_env.yaml")
    for module in document["py_modules"]:
        assert (ROOT / module / "__init__.py").is_file()
    assert set(document) <= RuntimeEnv.known_fields  # Ray accepts others silently
    # Ray looks for the folders themselves, from where the job is submitted.
    RuntimeEnv(**{**document, "working_dir": str(ROOT), "py_modules": []})
    for module in document["py_modules"]:
        assert not [each for each in document["excludes"] if each[0] == "/" and (ROOT / module / each[1:]).exists()]


@pytest.mark.parametrize("module", load("runtime_env.yaml")["py_modules"])
def test_a_submitted_job_takes_whole_packages_along(module, tmp_path):
    """What is left out would come from the image's own installation, of another version."""
    excludes = load("runtime_env.yaml")["excludes"]
    create_package(str(ROOT / module), tmp_path / "module.zip", include_gitignore=True, excludes=excludes)
    with zipfile.ZipFile(tmp_path / "module.zip") as package:
        sent = {*package.namelist()}
    files = [file.relative_to(ROOT / module) for file in (ROOT / module).rglob("*") if file.is_file()]
    assert {file.as_posix() for file in files if "__pycache__" not in file.parts} <= sent


@pytest.mark.parametrize("name", ["submit.sh", "slurm.sh"])
def test_scripts_parse_are_executable_and_stop_at_errors(name):
    path = CLUSTER / name
    assert subprocess.run(["bash", "-n", path], capture_output=True, timeout=30).returncode == 0
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", path], timeout=60).returncode == 0


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


@pytest.fixture
def address():
    """Address of an HTTP server that answers as Ray's dashboard does."""

    class Dashboard(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"ray_version": RAY_VERSION}).encode())

        def log_message(self, *arguments):
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("command", "place"), [("sweep", "/shared/a run"), ("train", "s3://bucket/a run?x=y&z=1")])
def test_submit_hands_the_command_on_word_for_word(fake_command, tmp_path, address, command, place):
    words = (command, EXPERIMENT, "--out", place, "--set", "a=b c")
    done = run_script("submit.sh", "--address", address, "--no-wait", *words, env=fake_command("ray"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sent = done.stdout.splitlines()
    assert sent[:5] == ["job", "submit", "--address", address, "--no-wait"]
    assert sent[sent.index("--") + 1 :] == ["trial-ray", *words]


TRAIN = ("train", EXPERIMENT, "--out", "/shared/run")


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("submit.sh", ("--adress", "x", *TRAIN), "usage"),
        ("submit.sh", TRAIN[1:], "usage"),
        ("submit.sh", ("train", "no/such/file.py", *TRAIN[2:]), "no such file"),
        ("submit.sh", TRAIN[:2], "--out"),
        ("submit.sh", ("sweep", EXPERIMENT, "--out", "runs/relative"), "'runs/relative'"),
        ("submit.sh", TRAIN, "--address"),
        ("submit.sh", ("--address", "127.0.0.1:6379", *TRAIN), "'127.0.0.1:6379'"),
        ("submit.sh", ("--address", "http://127.0.0.1:1", *TRAIN), "no Ray dashboard answers"),
        ("slurm.sh", ("file.py",), "usage"),
    ],
)
def test_wrong_use_is_refused_with_status_2_before_anything_is_sent(fake_command, allocation, script, arguments, told):
    env = {**allocation, **fake_command("ray", "exit 77")}
    env = {name: value for name, value in env.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    done = run_script(script, *arguments, env=env)
    assert done.returncode == 2
    assert script in done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


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
