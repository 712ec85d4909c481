"""The planner: sizes of configs, memory against torch, measurements and traces, fitting changes and refused runs."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from trial_ray import cli
from trial_ray.algorithms.startup import require_memory
from trial_ray.engines.vllm import VLLMEngine
from trial_ray.errors import ConfigError
from trial_ray.models.loading import load_causal_lm
from trial_ray.models.model_shape import ModelShape, model_shape
from trial_ray.planning.fit import SLEEPING_ENGINE_BYTES, Machine, make_plan, nearest_fit, require_fit
from trial_ray.planning.memory import GIB, PlanRequest, learner_memory, learner_phases
from trial_ray.planning.time import OPTIMIZER_TRAFFIC, gpu_bytes, gpu_like, installed_gpus, step_time
from trial_ray.runs.experiment import load_experiment

ROOT = Path(__file__).parents[2]
QWEN3 = "alfworld_qwen3_1.7b"


def measured(name):
    return json.loads((ROOT / f"docs/results/measurements/{name}.json").read_text())["details"]


def example(name):
    """Return the config of a tuned example."""
    return load_experiment(ROOT / f"tuned_examples/{name}.py").config


def request_of(name):
    return PlanRequest.of(example(name))


def with_engines(engine_kwargs, **settings):
    return PlanRequest.of(example(QWEN3).engines(engine_kwargs=engine_kwargs, colocate=False, **settings))


EXAMPLES = {"Qwen3-1.7B": QWEN3, "Qwen2.5-3B-Instruct": "alfworld_qwen2.5_3b"}
TRACED = measured("trace")
"""Traces of the learner under torch's fake tensors, in rows of 2,048 tokens with responses of 512."""


@pytest.fixture(scope="module")
def qwen3():
    """Eight learners and eight engines on a GPU each, whatever the tuned example requests."""
    return replace(
        request_of(QWEN3),
        num_learners=8,
        num_engines=8,
        num_gpus_per_learner=1,
        num_gpus_per_engine=1,
        colocate=False,
        gpu_memory_utilization=0.8,
        sharding="none",
        lora_rank=0,
        num_references=1,
        gradient_checkpointing=True,
    )


def gpus(number, gib=80):
    return Machine(number, gib * GIB)


# -- sizes and memory --------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_the_model(model_path):
    assert model_shape(model_path).parameters == sum(
        each.numel() for each in load_causal_lm(model_path, "float32").parameters()
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    tied, apart = (
        ModelShape.of_config(LlamaConfig(vocab_size=50, **sizes, tie_word_embeddings=tied)) for tied in (True, False)
    )
    assert apart.parameters == tied.parameters + 50 * 64
    assert apart.matmul_parameters == tied.matmul_parameters == tied.parameters
    # The models' cards state 1.7 and 3.09 billion.
    assert model_shape("Qwen/Qwen3-1.7B").parameters == 1_720_574_976
    assert model_shape("Qwen/Qwen2.5-3B-Instruct").parameters == 3_085_938_688


def test_adapters_have_four_bytes_a_parameter(qwen3):
    # Qwen3-1.7B, rank 1: q 2048+2048, k and v 2048+1024 each, o 2048+2048, gate and up 2048+6144 each, down 6144+2048.
    assert learner_memory(replace(qwen3, lora_rank=1)).items["adapters"] == 4 * 28 * (4096 + 2 * 3072 + 4096 + 3 * 8192)


def test_predicted_peaks_are_within_a_fifth_of_measurements():
    for case in measured("plan").values():
        assert learner_memory(request_of(case["experiment"])).total == pytest.approx(case["measured_bytes"], rel=0.2)


@pytest.mark.parametrize("case", TRACED.values(), ids=TRACED)
def test_peaks_and_optimizer_traffic_are_those_of_a_trace(case):
    learners = case["learners"]
    change = case["change"]
    config = example(EXAMPLES[case["model"]])
    config.rl_module(compute_dtype="bfloat16", sharding="fsdp" if learners > 1 else "none")
    config.rl_module(gradient_checkpointing=change != "plain", lora_rank=32 if change == "adapters" else None)
    rows = config.max_tokens_per_forward // 2048
    config.training(microbatch_rows=rows, minibatch_rows=2 * rows * learners, batch_shards=1)
    config.engines(weight_transfer="object_store").learners(num_learners=learners, num_gpus_per_learner=0.5)
    request = replace(PlanRequest.of(config), max_prompt_tokens=2048 - 512, max_response_tokens=512)
    for phase, memory in learner_phases(request).items():
        # A trace contains neither the process nor the allocator.
        predicted = memory.total - memory.items["process"] - memory.items["allocator"]
        assert predicted == pytest.approx(case["phases"][phase]["peak"], rel=0.05)
    if change != "adapters":
        traffic = OPTIMIZER_TRAFFIC * request.shape.parameters / learners
        assert case["phases"]["step"]["moved"] == pytest.approx(traffic, rel=0.01)


def test_engine_arguments_and_vllms_defaults_are_planned_for(monkeypatch):
    for given in ({"max_batch": 16, "kv_cache_gib": 3.0}, {"max_num_seqs": 16, "kv_cache_memory_bytes": 3 * GIB}):
        request = with_engines(given)
        assert request.max_rows == 16
        assert request.kv_cache_gib == 3
    for on_gpu in (True, False):
        monkeypatch.setattr("torch.cuda.is_available", lambda on_gpu=on_gpu: on_gpu)
        started = VLLMEngine("nowhere", max_model_len=100)._arguments
        request = with_engines({}, engine="vllm", num_gpus_per_engine=float(on_gpu))
        assert request.max_rows == started["max_num_seqs"]
        if on_gpu:  # on a CPU the cache has a given size
            assert request.gpu_memory_utilization == started["gpu_memory_utilization"]
        assert request.kv_cache_gib == (None if on_gpu else started["kv_cache_memory_bytes"] / GIB)


def test_host_memory_follows_the_settings(qwen3):
    def planned(actor, **settings):
        actors = make_plan(replace(qwen3, **settings), gpus(16)).actors
        return next(memory.total for memory in actors if memory.actor == actor)

    more = planned("env runner", environment_processes=True) - planned("env runner", environment_processes=False)
    assert more == 56 * 2**20 * qwen3.max_episodes_in_flight
    awake, asleep = (planned("engine's host part", colocate=True, sleep_level=level) for level in (2, 1))
    assert asleep - awake == qwen3.shape.parameters * qwen3.engine_bytes
    actors = make_plan(qwen3, Machine(None, None)).actors
    assert planned("learner's host part") > 3 * GIB
    assert not any(memory.on_gpu for memory in actors if "host part" in memory.actor)
    needed = sum(memory.count * memory.total for memory in actors if not memory.on_gpu)
    assert not make_plan(qwen3, Machine(None, None, needed + 1)).complaints
    assert make_plan(qwen3, Machine(None, None, needed - GIB)).complaints
    request = replace(qwen3, num_engines=1, trajectories=64, max_staleness=1, evaluated=100)
    assert request.requests_per_engine == 128
    assert replace(request, evaluated=256).requests_per_engine == 256


# -- changes that make a run fit ---------------------------------------------------------------------------------------


def test_colocation_is_proposed_for_too_few_gpus(qwen3):
    assert not make_plan(qwen3, gpus(16)).complaints
    assert make_plan(qwen3, gpus(8)).complaints
    fitting, changes = nearest_fit(qwen3, gpus(8))
    assert not fitting.complaints
    assert {"num_gpus_per_learner=0.5", "num_gpus_per_engine=0.5", "colocate=True"} < set(changes)
    assert any(change.startswith("engine_kwargs.gpu_memory_utilization=") for change in changes)
    for fixed in ({"max_staleness": 1}, {"weight_transfer": "nccl"}, {"sharding": "fsdp", "fsdp_size": 4}):
        assert nearest_fit(replace(qwen3, **fixed), gpus(6)) is None


def test_smaller_gpus_need_more_changes_until_nothing_helps(qwen3):
    changes = {gib: nearest_fit(qwen3, gpus(1, gib)) for gib in (80, 42, 24, 2)}
    assert "max_tokens_per_forward" in " ".join(changes[42][1])
    assert "lora_rank=32" in changes[24][1]
    assert changes[2] is None
    # Adapters have no stale copy, so they are not proposed to a run with a stale teacher.
    assert nearest_fit(replace(qwen3, teacher_sync_iterations=1), gpus(1, 24)) is None
    # The engine gets the memory that the learner leaves.
    fitting = changes[80][0]
    share = fitting.request.gpu_memory_utilization
    assert share * 80 * GIB + fitting.actors[0].kept <= 80 * GIB
    assert make_plan(replace(fitting.request, gpu_memory_utilization=share + 0.1), gpus(1)).complaints


def test_learner_leaves_room_for_the_sleeping_engine(qwen3):
    request = replace(
        qwen3,
        num_learners=1,
        num_engines=1,
        num_gpus_per_learner=0.5,
        num_gpus_per_engine=0.5,
        colocate=True,
        gpu_memory_utilization=0.3,
    )
    needed = (learner_memory(request).total + SLEEPING_ENGINE_BYTES) / GIB
    assert not make_plan(request, gpus(1, needed + 0.1)).complaints
    assert len(make_plan(request, gpus(1, needed - 0.1)).complaints) == 1


def test_gpus_are_read_by_name_or_memory(monkeypatch):
    named = {("NVIDIA H100 80GB HBM3", 79.6): "H100", ("NVIDIA GeForce RTX 3090", 24.0): "L4", ("", 80.0): "A100-80G"}
    assert {(name, gib): gpu_like(gib, name).name for name, gib in named} == named
    printed = "NVIDIA H100 80GB HBM3, 81559, 580.95.05\nNVIDIA L4, 23034, 580.95.05\n[N/A], [N/A], [N/A]\n"
    done = SimpleNamespace(stdout=printed, returncode=0)
    monkeypatch.setattr("trial_ray.planning.time.shutil.which", lambda name: name)
    monkeypatch.setattr("trial_ray.planning.time.subprocess.run", lambda *a, **k: done)
    assert [gpu.mib for gpu in installed_gpus()[0]] == [81559, 23034]
    assert gpu_bytes({}) == 81559 * 2**20
    assert gpu_bytes({"accelerator_type:H200": 1.0, "CPU": 8.0}) == 140 * GIB


def test_time_follows_learners_sharding_and_teacher_context(qwen3):
    request = replace(qwen3, num_references=0, teacher_context=None)
    device = gpu_like(80)

    def seconds(**changes):
        return step_time(replace(request, **changes), device)[0]

    eight = seconds()
    four = seconds(num_learners=4)
    assert eight["update"] < four["update"] < 2 * eight["update"]  # every learner makes the whole optimizer step
    assert seconds(sharding="fsdp")["update"] < eight["update"]
    assert four["sampling"] == eight["sampling"]
    for times, changes in (
        (2, {"num_learners": 4}),
        (1.3, {"teacher_context": "outcome"}),
        (2, {"teacher_context": "skill"}),
        # A teacher with weights of its own scores only the prompts with contexts, each of them once.
        (4, {"teacher_context": "skill", "teacher_share": 3.0}),
        (2, {"teacher_context": "skill", "teacher_sync_iterations": 5, "num_references": 1}),
    ):
        assert seconds(**changes)["scoring"] == pytest.approx(times * eight["scoring"])


# -- refused runs and the command --------------------------------------------------------------------------------------


def test_run_that_does_not_fit_is_refused(qwen3, monkeypatch):
    with pytest.raises(ConfigError):
        require_fit(qwen3, Machine(None, 24 * GIB))
    require_fit(qwen3, Machine(None, None))  # an unknown GPU refuses nothing
    request = replace(qwen3, engine="transformers", max_batch=None, engine_bytes=4, gpu_memory_utilization=0.9)
    assert any("engine" in complaint for complaint in make_plan(request, gpus(16, 8.5)).complaints)
    # Training asks for the memory of GPUs before it starts actors, and only if an actor has a GPU.
    monkeypatch.setattr("trial_ray.algorithms.startup.ray.cluster_resources", dict)
    asked = []
    monkeypatch.setattr("trial_ray.algorithms.startup.gpu_bytes", lambda resources: asked.append(resources) or 4 * GIB)
    with pytest.raises(ConfigError):
        require_memory(example(QWEN3))
    require_memory(example("alfworld_quickstart"))
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    {
        "alfworld_quickstart": 0,
        f"{QWEN3} --gpus 8 --gpu-memory 80": 0,
        f"{QWEN3} --gpus 1 --gpu-memory 16": 1,
        f"{QWEN3} --gpu-memory -1": 2,
    }.items(),
)
def test_exit_code_tells_whether_the_run_fits(arguments, code, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(f"plan {arguments}".split()) == code, capsys.readouterr().out
