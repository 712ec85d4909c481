"""The files in cluster/ hold against their schemas, and each schema against a typing mistake."""

import copy
import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
RAY_VERSION = re.search(r"ray\[rllib\]==([\d.]+)", (ROOT / "setup.py").read_text()).group(1)
KUBERNETES = "1.31"


def load(name):
    return yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8"))


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
    assert len(set(images)) == 1
    assert images[0].endswith(f"-ray{RAY_VERSION}")
    dockerfile = (CLUSTER / "Dockerfile").read_text()
    assert f"FROM rayproject/ray:{RAY_VERSION}-py311-gpu\n" in dockerfile
    assert images[0] in dockerfile


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


def test_submit_hands_the_experiment_and_its_arguments_on_word_for_word(fake_command, tmp_path):
    experiment = "tuned_examples/alfworld_qwen3_1.7b.py"
    arguments = ("--iterations", "2", "--set", "a=b c")
    done = run_script(
        "submit.sh", "--address", "http://h:1", "--no-wait", experiment, "--", *arguments,
        env=fake_command("ray"), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:5] == ["job", "submit", "--address", "http://h:1", "--no-wait"]
    assert words[words.index("--") + 1 :] == ["trial-ray", "train", experiment, *arguments]


@pytest.mark.parametrize(
    "arguments",
    [(), ("--adress", "x", "tuned_examples/alfworld_qwen3_1.7b.py"), ("no/such/file.py",), ("README.md", "stray")],
)
def test_submit_refuses_wrong_use_with_status_2_before_anything_is_sent(fake_command, arguments):
    done = run_script("submit.sh", *arguments, env=fake_command("ray", "exit 77"))
    assert done.returncode == 2
    assert "submit.sh" in done.stderr


def test_slurm_starts_the_run_once_with_one_task_a_node(fake_command):
    fake_command("scontrol", "printf 'node1\\nnode2\\n'")
    env = fake_command("srun") | {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    words = run_script("slurm.sh", "file.py", "--out", "/a b", env=env).stdout.splitlines()
    assert words[words.index("ray") :] == [
        "ray", "symmetric-run", "--address", "node1:6379", "--min-nodes", "2", "--",
        "trial-ray", "train", "file.py", "--out", "/a b",
    ]  # fmt: skip


def test_the_readme_lists_every_file():
    readme = (CLUSTER / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([^`]+)` \|", readme, re.MULTILINE))
    assert listed == {path.name for path in CLUSTER.iterdir()} - {"README.md"}
