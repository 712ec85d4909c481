"""The files in cluster/ are valid and agree with each other and with the pinned Ray."""

import os
import re
import zipfile
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from commands import completed, environment
from distributions import ROOT, files_of
from ray._private.runtime_env.packaging import create_package
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv
from ray_nodes import free_ports

CLUSTER = ROOT / "cluster"
SETUP = (ROOT / "setup.py").read_text()
DOCKERFILE = (CLUSTER / "Dockerfile").read_text()
RAY_VERSION = re.search(r"ray\[rllib\]==([\d.]+)", SETUP)[1]
KUBERNETES = "1.31"
IMAGE = re.search(r"^export TRIAL_RAY_IMAGE=(\S+)$", (CLUSTER / "image.sh").read_text(), re.MULTILINE)[1]


def load(name):
    """A file as it is applied: with the image's name put in, as ``envsubst '$TRIAL_RAY_IMAGE'`` does."""
    return yaml.safe_load((CLUSTER / name).read_text().replace("${TRIAL_RAY_IMAGE}", IMAGE))


def groups(spec):
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def require_valid_pod(spec):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_spot_patch_adds_a_pool_of_valid_pods():
    values = {item["path"].removeprefix("/spec/workerGroupSpecs/"): item.get("value") for item in load("spot.yaml")}
    group = groups(load("raycluster.yaml")["spec"])[2]
    assert {path.split("/")[1] for path in values if path != "-"} <= group.keys()
    spec = group["template"]["spec"]
    for name in ("nodeSelector", "tolerations"):
        spec[name] = values[f"2/template/spec/{name}"]
    spec["containers"][0]["lifecycle"] = values["2/template/spec/containers/0/lifecycle"]
    require_valid_pod(spec)


def test_cluster_and_job_describe_the_same_valid_cluster():
    cluster, job, claim = map(load, ("raycluster.yaml", "rayjob.yaml", "volume.yaml"))
    assert cluster["kind"] == "RayCluster"
    assert job["kind"] == "RayJob"
    described = cluster["spec"]
    assert job["spec"]["rayClusterSpec"] == described
    assert described["rayVersion"] == RAY_VERSION
    assert described["authOptions"]["mode"] == "token"
    assert described["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"  # no actors on the head
    kubernetes_validate.validate(claim, KUBERNETES, strict=True)
    for group in groups(described):
        # Start parameters become command-line options: the operator rejects YAML numbers.
        assert {type(value) for value in group["rayStartParams"].values()} <= {str}
        spec = group["template"]["spec"]
        require_valid_pod(spec)
        volumes = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert container["image"] == IMAGE
            assert {volumes[mount["name"]] for mount in container["volumeMounts"]} == {claim["metadata"]["name"]}
    *command, experiment = job["spec"]["entrypoint"].split()[:3]
    assert command == ["trial-ray", "train"]
    home = re.search(r"^WORKDIR (\S+)", DOCKERFILE, re.MULTILINE)[1]
    assert (ROOT / Path(experiment).relative_to(home)).is_file()


def test_image_has_the_pinned_versions():
    """The extras of the image's installation are in setup.py, with the versions of the locked requirements."""
    assert f"\nFROM rayproject/ray:{RAY_VERSION}-py3" in f"\n{DOCKERFILE}"
    [extras] = re.findall(r'pip install .*"\.\[([\w,-]+)\]"', DOCKERFILE.replace("\\\n", ""))
    assert [extra for extra in extras.split(",") if f'"{extra}": ' not in SETUP] == []
    locked = "".join((ROOT / "requirements" / name).read_text() for name in ("cpu.txt", "torch.txt"))
    # The locked build of vLLM is that for CPUs.
    pins = dict(re.findall(r"^([\w.-]+?)(?:-cpu)?==([^\s\\]+)", locked.lower(), re.MULTILINE))
    required = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?==([^"]+)"', SETUP.lower()))
    assert {"ray", "vllm", "alfworld"} <= required.keys() & pins.keys()
    assert [name for name, version in required.items() if pins.get(name, version) != version] == []


@pytest.mark.parametrize("name", ["ray-up.yaml", "ray-up-static.yaml"])
def test_launcher_file_is_valid(name):
    document = load(name)
    assert document["docker"]["image"] == IMAGE
    validate_config(prepare_config(document))


def test_submitted_job_has_whole_packages(tmp_path):
    """A missing file would come from the image's installation, of another version."""
    document = load("runtime_env.yaml")
    assert set(document) <= RuntimeEnv.known_fields  # Ray accepts others silently
    # Ray searches the folders themselves, from where the job is submitted.
    RuntimeEnv(**document | {"working_dir": str(ROOT), "py_modules": []})
    for module in document["py_modules"]:
        folder, package = ROOT / module, tmp_path / f"{Path(module).name}.zip"
        create_package(str(folder), package, include_gitignore=True, excludes=document["excludes"])
        with zipfile.ZipFile(package) as sent:
            assert {*map(str, files_of(folder))} <= {*sent.namelist()}


@pytest.fixture
def run_script(tmp_path):
    """Return a function that runs a batch script on two Slurm nodes; Ray and Slurm are scripts that print their arguments."""
    arguments = 'printf "%s\\n" "$@"'
    for name, output in {"ray": arguments, "srun": arguments, "scontrol": "printf '127.0.0.1\\nnode2\\n'"}.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{output}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run_script(name, *words, **variables):
        return completed([CLUSTER / name, *words], env=environment("RAY_") | slurm | variables, timeout=60)

    return run_script


EXPERIMENT = "tuned_examples/alfworld_qwen3_1.7b.py"
WRONG = f"""
submit.sh --adress x train {EXPERIMENT} --out /shared/run
submit.sh train no/such/file.py --out /shared/run
submit.sh sweep {EXPERIMENT} --out runs/relative
submit.sh train {EXPERIMENT} --out /shared/run
submit.sh --address http://127.0.0.1:1 train {EXPERIMENT} --out /shared/run
slurm.sh file.py
"""


@pytest.mark.parametrize(("command", "place"), [("sweep", "/shared/a run"), ("train", "s3://bucket/a run?x=y&z=1")])
def test_submit_passes_the_command_on(run_script, tmp_path, command, place):
    (tmp_path / "python3").symlink_to("/bin/true")  # no dashboard is asked
    words = (command, EXPERIMENT, "--out", place, "--set", "a=b c")
    options = ("--address", "http://head:8265", "--no-wait")
    done = run_script("submit.sh", *options, *words)
    assert done.returncode == 0, done.stderr
    sent = done.stdout.splitlines()
    assert sent[:5] == ["job", "submit", *options]
    assert sent[sent.index("--") + 1 :] == ["trial-ray", *words]


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong_use_sends_nothing(run_script, line):
    done = run_script(*line.split())
    assert done.returncode == 2
    assert done.stdout == ""


def test_slurm_starts_the_run_once(run_script):
    (port,) = free_ports(1)
    run = ("train", "file.py", "--out", "/a b")
    done = run_script("slurm.sh", *run, TRIAL_RAY_PORT=str(port))
    words, address = done.stdout.splitlines(), f"127.0.0.1:{port}"
    start = f"ray symmetric-run --address {address} --min-nodes 2 -- env RAY_ADDRESS={address} trial-ray"
    assert words[words.index("ray") :] == [*start.split(), *run]
