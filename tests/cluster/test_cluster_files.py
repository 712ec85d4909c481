"""The files in cluster/ are valid and agree with each other and with the pinned Ray."""

import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

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


# The fields of KubeRay's resources that the files have on their upper levels; pods are deeper.
KUBERAY_FIELDS = """
apiVersion kind metadata name spec rayClusterSpec entrypoint submissionMode
shutdownAfterJobFinishes ttlSecondsAfterFinished backoffLimit
rayVersion enableInTreeAutoscaling autoscalerOptions version upscalingMode idleTimeoutSeconds authOptions mode
headGroupSpec workerGroupSpecs groupName replicas minReplicas maxReplicas rayStartParams template
"""


def groups(document):
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def require_valid_pod(spec):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize(("name", "kind"), [("raycluster.yaml", "RayCluster"), ("rayjob.yaml", "RayJob")])
def test_kuberay_file_is_valid(name, kind):
    document = load(name)
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", kind)
    names = re.findall(r"^ {0,6}(?:- )?(\w+):", (CLUSTER / name).read_text(), re.MULTILINE)
    assert set(names) <= set(KUBERAY_FIELDS.split())
    for group in groups(document):
        # Start parameters become command-line options: the operator rejects YAML numbers.
        assert {type(value) for value in group["rayStartParams"].values()} <= {str}
        require_valid_pod(group["template"]["spec"])


def test_spot_patch_adds_a_pool_of_valid_pods():
    operations = load("spot.yaml")
    values = {item["path"].removeprefix("/spec/workerGroupSpecs/"): item.get("value") for item in operations}
    group = groups(load("raycluster.yaml"))[2]
    assert {path.split("/")[1] for path in values if path != "-"} <= group.keys()
    # Ray's start command unwraps the outer quotes in a shell.
    resources = [json.loads(json.loads(values[f"{index}/rayStartParams/resources"])) for index in (1, 2)]
    assert resources == [{"lasting": 8}, {"spot": 8}]
    added = {name: values[f"2/template/spec/{name}"] for name in ("nodeSelector", "tolerations")}
    lifecycle = values["2/template/spec/containers/0/lifecycle"]
    [container] = group["template"]["spec"]["containers"]
    require_valid_pod(group["template"]["spec"] | added | {"containers": [container | {"lifecycle": lifecycle}]})
    hook = lifecycle["preStop"]["exec"]["command"][-1]
    options = {option for parameter in drain_node.params for option in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", hook)) <= options
    deadline = int(re.search(r"--deadline-remaining-seconds (\d+)", hook).group(1))
    assert deadline < values["2/template/spec/terminationGracePeriodSeconds"]


def test_cluster_and_job_describe_the_same_cluster():
    cluster, job, claim = map(load, ("raycluster.yaml", "rayjob.yaml", "volume.yaml"))
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]
    assert cluster["spec"]["rayVersion"] == RAY_VERSION
    assert cluster["spec"]["authOptions"]["mode"] == "token"
    assert groups(cluster)[0]["rayStartParams"]["num-cpus"] == "0"  # no actors on the head
    kubernetes_validate.validate(claim, KUBERNETES, strict=True)
    for group in groups(cluster):
        spec = group["template"]["spec"]
        volumes = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert container["image"] == IMAGE
            assert {volumes[mount["name"]] for mount in container["volumeMounts"]} == {claim["metadata"]["name"]}


def test_experiment_of_the_job_is_in_the_image():
    *command, experiment = load("rayjob.yaml")["spec"]["entrypoint"].split()[:3]
    assert command == ["trial-ray", "train"]
    home = re.search(r"^WORKDIR (\S+)", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE).group(1)
    assert (ROOT / Path(experiment).relative_to(home)).is_file()


@pytest.mark.parametrize("name", ["ray-up.yaml", "ray-up-static.yaml"])
def test_launcher_file_is_valid(name):
    document = load(name)
    assert document["docker"]["image"] == IMAGE
    validate_config(prepare_config(document))


def test_runtime_environment_is_valid():
    document = load("runtime_env.yaml")
    assert set(document) <= RuntimeEnv.known_fields  # Ray accepts others silently
    # Ray searches the folders themselves, from where the job is submitted.
    RuntimeEnv(**{**document, "working_dir": str(ROOT), "py_modules": []})


@pytest.mark.parametrize("module", load("runtime_env.yaml")["py_modules"])
def test_submitted_job_has_whole_packages(module, tmp_path):
    """A missing file would come from the image's installation, of another version."""
    excludes = load("runtime_env.yaml")["excludes"]
    create_package(str(ROOT / module), tmp_path / "module.zip", include_gitignore=True, excludes=excludes)
    with zipfile.ZipFile(tmp_path / "module.zip") as package:
        sent = {*package.namelist()}
    files = [file.relative_to(ROOT / module) for file in (ROOT / module).rglob("*") if file.is_file()]
    assert {file.as_posix() for file in files if "__pycache__" not in file.parts} <= sent


@pytest.fixture
def environment(tmp_path):
    """Variables of a batch script on two Slurm nodes; Ray and Slurm are scripts that print their arguments."""
    arguments = 'printf "%s\\n" "$@"'
    for name, output in {"ray": arguments, "srun": arguments, "scontrol": "printf '127.0.0.1\\nnode2\\n'"}.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{output}\n")
        path.chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return outside | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }


def run_script(name, *arguments, env):
    return subprocess.run([CLUSTER / name, *arguments], env=env, capture_output=True, text=True, timeout=60)


EXPERIMENT = "tuned_examples/alfworld_qwen3_1.7b.py"


@pytest.mark.parametrize(("command", "place"), [("sweep", "/shared/a run"), ("train", "s3://bucket/a run?x=y&z=1")])
def test_submit_passes_the_command_on(environment, tmp_path, command, place):
    (tmp_path / "python3").symlink_to("/bin/true")  # no dashboard is asked
    words = (command, EXPERIMENT, "--out", place, "--set", "a=b c")
    done = run_script("submit.sh", "--address", "http://head:8265", "--no-wait", *words, env=environment)
    assert done.returncode == 0, done.stderr
    sent = done.stdout.splitlines()
    assert sent[:5] == ["job", "submit", "--address", "http://head:8265", "--no-wait"]
    assert sent[sent.index("--") + 1 :] == ["trial-ray", *words]


TRAIN = ("train", EXPERIMENT, "--out", "/shared/run")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("submit.sh", ("--adress", "x", *TRAIN), "usage"),
        ("submit.sh", TRAIN[1:], "usage"),
        ("submit.sh", ("train", "no/such/file.py", *TRAIN[2:]), "no such file"),
        ("submit.sh", TRAIN[:2], "--out"),
        ("submit.sh", ("sweep", EXPERIMENT, "--out", "runs/relative"), "'runs/relative'"),
        ("submit.sh", TRAIN, "--address"),
        ("submit.sh", ("--address", "http://127.0.0.1:1", *TRAIN), "no Ray dashboard answers"),
        ("slurm.sh", ("file.py",), "usage"),
    ],
)
def test_wrong_use_sends_nothing(environment, script, arguments, message):
    done = run_script(script, *arguments, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_slurm_starts_the_run_once(environment):
    (port,) = free_ports(1)
    run = ["trial-ray", "train", "file.py", "--out", "/a b"]
    done = run_script("slurm.sh", *run[1:], env=environment | {"TRIAL_RAY_PORT": str(port)})
    words, address = done.stdout.splitlines(), f"127.0.0.1:{port}"
    start = ["ray", "symmetric-run", "--address", address, "--min-nodes", "2", "--", "env", f"RAY_ADDRESS={address}"]
    assert words[words.index("ray") :] == [*start, *run]
