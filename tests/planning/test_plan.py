"""The planner: sizes out of configurations, memory against torch and measurements, what fits, what is proposed and refused."""

from __future__ import annotations

import json
import re
import shlex
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
from trial_ray.planning.memory import GIB, PlanRequest, learner_memory
from trial_ray.planning.time import gpu_bytes, gpu_like, installed_gpus, step_time
from trial_ray.runs.experiment import load_experiment

ROOT = Path(__file__).parents[2]
QWEN3 = ROOT / "tuned_examples" / "alfworld_qwen3_1.7b.py"


def asked_for(name: str) -> PlanRequest:
    return PlanRequest.of(load_experiment(ROOT / "tuned_examples" / f"{name}.py").config)


def with_engines(engine_kwargs, **settings) -> PlanRequest:
    config = load_experiment(QWEN3).config.copy(copy_frozen=False)
    return PlanRequest.of(config.engines(engine_kwargs=engine_kwargs, colocate=False, **settings))


@pytest.fixture(scope="module")
def qwen3() -> PlanRequest:
    """Eight learners and eight engines on a GPU each, whatever the tuned example asks for by now."""
    request = asked_for("alfworld_qwen3_1.7b")
    apart = {"num_gpus_per_learner": 1, "num_gpus_per_engine": 1, "colocate": False, "gpu_memory_utilization": 0.8}
    plain = {"sharding": "none", "lora_rank": 0, "num_references": 1, "gradient_checkpointing": True}
    return replace(request, num_learners=8, num_engines=8, **apart, **plain)


def gpus(number: int, gib: float = 80) -> Machine:
    return Machine(number, gib * GIB)


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_parameters_are_counted_and_not_estimated(model_path):
    shape = model_shape(model_path)
    assert shape.parameters == sum(each.numel() for each in load_causal_lm(model_path, "float32").parameters())
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    configs = [LlamaConfig(vocab_size=50, **sizes, tie_word_embeddings=tied) for tied in (True, False)]
    tied, apart = map(ModelShape.of_config, configs)
    assert apart.parameters == tied.parameters + 50 * 64
    assert apart.matmul_parameters == tied.matmul_parameters == tied.parameters
    # What the models' own cards say: 1.7 and 3.09 billion.
    assert model_shape("Qwen/Qwen3-1.7B").parameters == 1_720_574_976
    assert model_shape("Qwen/Qwen2.5-3B-Instruct").parameters == 3_085_938_688


# -- memory ------------------------------------------------------------------------------------------------------------


def test_master_weights_gradients_and_optimizer_are_sixteen_bytes_a_parameter(qwen3):
    # Qwen3-1.7B, rank 1: q 2048+2048, k and v 2048+1024 each, o 2048+2048, gate and up 2048+6144 each, down 6144+2048.
    adapters = learner_memory(replace(qwen3, lora_rank=1)).items["adapters"]
    assert adapters == 4 * 28 * (4096 + 2 * 3072 + 4096 + 3 * 8192)
    items = learner_memory(qwen3).items
    static = items["weights"] + items["gradients"] + items["optimizer"]
    assert static == 16 * 1_720_574_976
    sharded = learner_memory(replace(qwen3, sharding="fsdp")).items
    assert [sharded[name] for name in ("weights", "gradients", "optimizer", "reference")] == [
        items[name] / 8 for name in ("weights", "gradients", "optimizer", "reference")
    ]


def test_predicted_peaks_are_within_a_fifth_of_the_measured_ones():
    measured = json.loads((ROOT / "docs/results/measurements/plan.json").read_text())["details"]
    assert set(measured) == {"tiny", "135M"}
    for found in measured.values():
        predicted = learner_memory(asked_for(found["experiment"])).total
        assert 0.8 < predicted / found["measured_bytes"] < 1.2


def test_arguments_of_both_engines_and_vllms_own_are_planned_for():
    both, own = ({"max_batch": 16, "kv_cache_gib": 3.0}, {"max_num_seqs": 16, "kv_cache_memory_bytes": 3 * GIB})
    for arguments in (both, own):
        request = with_engines(arguments)
        assert (request.most_rows, request.kv_cache_gib) == (16, 3)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_plan_has_the_defaults_of_vllm_as_it_is_started(on_gpu, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    started = VLLMEngine("nowhere", max_model_len=100)._arguments
    request = with_engines({}, engine="vllm", num_gpus_per_engine=float(on_gpu))
    assert request.most_rows == started["max_num_seqs"]
    if on_gpu:  # elsewhere the cache has a given size, and no share is used
        assert request.gpu_memory_utilization == started["gpu_memory_utilization"]
    assert request.kv_cache_gib == (None if on_gpu else started["kv_cache_memory_bytes"] / GIB)


def test_where_not_one_row_fits_the_plan_says_what_would_be_needed(qwen3):
    request = replace(qwen3, engine="transformers", max_batch=None, engine_bytes=4, gpu_memory_utilization=0.9)
    plan = make_plan(request, gpus(16, 8.5))
    assert any(complaint.startswith("each engine needs") for complaint in plan.complaints)


# -- what fits ---------------------------------------------------------------------------------------------------------


def test_too_few_gpus_are_reported_and_shared_in_the_proposal(qwen3):
    plan = make_plan(qwen3, gpus(8))
    assert plan.complaints == ("learners (8 x 1) and engines (8 x 1) need 16 GPUs; there are 8",)
    fitting, changes = nearest_fit(qwen3, gpus(8))
    assert not fitting.complaints
    assert {"num_gpus_per_learner=0.5", "num_gpus_per_engine=0.5", "colocate=True"} < set(changes)
    assert any(change.startswith("engine_kwargs.gpu_memory_utilization=") for change in changes)
    assert not make_plan(qwen3, gpus(16)).complaints


@pytest.mark.parametrize(
    "fixed", [{"max_staleness": 1}, {"weight_transfer": "nccl"}, {"sharding": "fsdp", "fsdp_size": 4}]
)
def test_what_excludes_colocation_on_all_gpus_is_not_proposed_with_it(fixed, qwen3):
    assert nearest_fit(replace(qwen3, **fixed), gpus(6)) is None


def test_adapters_are_not_proposed_to_a_run_with_a_lagged_teacher(qwen3):
    request = replace(qwen3, num_learners=1, num_engines=1)
    assert "lora_rank=32" in nearest_fit(request, gpus(1, 24))[1]
    assert nearest_fit(replace(request, teacher_sync_iterations=1), gpus(1, 24)) is None


def test_what_settings_keep_on_the_host_is_planned(qwen3):
    def planned(actor, **settings):
        found = make_plan(replace(qwen3, **settings), gpus(16)).actors
        return next(each.total for each in found if each.actor == actor)

    more = planned("env runner", environment_processes=True) - planned("env runner", environment_processes=False)
    assert more == 56 * 2**20 * qwen3.max_episodes_in_flight
    awake, asleep = (planned("engine's host part", colocate=True, sleep_level=level) for level in (2, 1))
    assert asleep - awake == qwen3.shape.parameters * qwen3.engine_bytes


def test_the_engine_has_requests_of_evaluations_and_of_groups_in_flight(qwen3):
    request = replace(qwen3, num_engines=1, trajectories=64, max_staleness=1, evaluated=100)
    assert request.requests_per_engine == 128
    assert replace(request, evaluated=256).requests_per_engine == 256


def test_the_engine_beside_a_learner_gets_what_the_learner_leaves(qwen3):
    fitting, _ = nearest_fit(qwen3, gpus(1))
    share = fitting.request.gpu_memory_utilization
    assert share * 80 * GIB + fitting.actors[0].kept <= 80 * GIB
    assert make_plan(replace(fitting.request, gpu_memory_utilization=share + 0.1), gpus(1)).complaints


def test_a_learner_leaves_room_for_the_engine_that_sleeps_beside_it(qwen3):
    shared = replace(
        qwen3, num_learners=1, num_engines=1, num_gpus_per_learner=0.5, num_gpus_per_engine=0.5, colocate=True,
        gpu_memory_utilization=0.3,
    )  # fmt: skip
    needed = (learner_memory(shared).total + SLEEPING_ENGINE_BYTES) / GIB
    assert not make_plan(shared, gpus(1, needed + 0.1)).complaints
    (complaint,) = make_plan(shared, gpus(1, needed - 0.1)).complaints
    assert complaint.startswith("each learner needs")
    assert "including the 2.0 that the engine keeps" in complaint


def test_smaller_gpus_ask_for_more_changes_until_nothing_helps(qwen3):
    changes = {gib: nearest_fit(qwen3, gpus(1, gib)) for gib in (80, 42, 24, 2)}
    assert changes[42] is not None
    assert "max_tokens_per_forward" in " ".join(changes[42][1])
    assert "lora_rank=32" in changes[24][1]
    assert changes[2] is None


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "H100"),
        ("NVIDIA GeForce RTX 3090", 24.0, "L4"),
        ("", 80.0, "A100-80G"),
    ],
)
def test_a_gpu_has_the_speed_of_its_name_or_else_of_its_memory(name, memory, expected):
    assert gpu_like(memory, name).name == expected


def test_the_gpus_of_this_host_are_read_with_their_names(monkeypatch):
    printed = "NVIDIA H100 80GB HBM3, 81559, 580.95.05\nNVIDIA L4, 23034, 580.95.05\n[N/A], [N/A], [N/A]\n"
    done = SimpleNamespace(stdout=printed, returncode=0)
    monkeypatch.setattr("trial_ray.planning.time.shutil.which", lambda name: name)
    monkeypatch.setattr("trial_ray.planning.time.subprocess.run", lambda *a, **k: done)
    assert [gpu.mib for gpu in installed_gpus()[0]] == [81559, 23034]
    assert gpu_bytes({}) == 81559 * 2**20
    assert gpu_bytes({"accelerator_type:H200": 1.0, "CPU": 8.0}) == 140 * GIB


def test_time_shrinks_with_learners_and_a_view_in_front_of_the_prompt_is_computed_whole(qwen3):
    request, device = replace(qwen3, num_references=0, teacher_context=None), gpu_like(80)

    def seconds(**changes):
        return step_time(replace(request, **changes), device)[0]

    eight, four = seconds(), seconds(num_learners=4)
    assert four["scoring"] == pytest.approx(2 * eight["scoring"])
    assert eight["update"] < four["update"] < 2 * eight["update"]  # each takes the whole optimizer step
    assert seconds(sharding="fsdp")["update"] < eight["update"]
    assert four["sampling"] == eight["sampling"]
    assert seconds(teacher_context="outcome")["scoring"] == pytest.approx(1.3 * eight["scoring"])
    assert seconds(teacher_context="skill")["scoring"] == pytest.approx(2 * eight["scoring"])


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_run_that_does_not_fit_is_refused_with_the_numbers_and_the_way_out(qwen3):
    with pytest.raises(
        ConfigError, match=r"each learner needs \d+\.\d GiB of a GPU's 24\.0.*It would fit with sharding="
    ):
        require_fit(qwen3, Machine(None, 24 * GIB))
    require_fit(qwen3, Machine(None, None))  # nothing is known of the GPUs


def test_training_asks_for_room_before_any_actor(monkeypatch):
    config = load_experiment(QWEN3).config
    monkeypatch.setattr("trial_ray.algorithms.startup.ray.cluster_resources", dict)
    found = []
    monkeypatch.setattr("trial_ray.algorithms.startup.gpu_bytes", lambda resources: found.append(resources) or 4 * GIB)
    with pytest.raises(ConfigError, match="does not fit"):
        require_memory(config)
    require_memory(load_experiment(ROOT / "tuned_examples" / "alfworld_quickstart.py").config)
    assert len(found) == 1  # nothing is asked where no actor has a GPU


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["alfworld_quickstart"], 0, "fits"),
        ([QWEN3, "--gpus", 1, "--gpu-memory", 16], 1, "does not fit"),
        ([QWEN3, "--gpu-memory", -1], 2, "--gpu-memory is -1"),
        ([QWEN3, "--set", "gradient_checkpoint=True"], 2, "Did you mean 'gradient_checkpointing'"),
    ],
)
def test_the_command_prints_the_prediction_and_tells_whether_it_fits(arguments, code, words, capsys):
    assert cli.main(["plan", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    assert words in printed.out + printed.err


PLANNED = {
    command
    for page in (ROOT / "docs").glob("*.md")
    for command in re.findall(r"^(?: {4})?trial-ray (plan .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("command", sorted(PLANNED))
def test_what_a_page_plans_fits(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(shlex.split(command)) == 0, capsys.readouterr().out
