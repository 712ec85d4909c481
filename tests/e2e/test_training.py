"""Training with real actors, engines and games: what a run guarantees from its first iteration to its resumption."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from nano_model import save_nano_model
from ray.exceptions import RayError
from tiny_run import with_small_actors, with_small_games
from transformers import AutoModelForCausalLM

from trial_ray.algorithms import GRPO, TRIALConfig
from trial_ray.engines.weights import weights_checksum
from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.learner.recording import read_training
from trial_ray.models.loading import load_tokenizer
from trial_ray.process import EPISODE, RESPONSE, STEP
from trial_ray.rollout.recording import read_turns
from trial_ray.runs.checkpoints import find_model, write_manifest
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.metrics_file import flatten
from trial_ray.runs.replay import Replay

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    """An untrained model whose logits are nevertheless far from uniform, so that a temperature shows."""
    folder = save_nano_model(tmp_path_factory.mktemp("model") / "nano")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    model.save_pretrained(folder)
    return str(folder)


def small_config(model_path: str, **training) -> TRIALConfig:
    """Small and exactly repeatable: seeded requests, one of them at a time, one thread."""
    settings = {
        "lr": 1e-3,
        "group_size": 3,
        "tasks_per_iteration": 2,
        "minibatch_rows": 12,
        "microbatch_rows": 6,
        "ref_kl_coeff": 0.0,
        "hindsight_start_iteration": 1,
        "hindsight_coeff": 1.0,
        "clamp_alpha": 10.0,
    }
    return (
        with_small_games(with_small_actors(TRIALConfig()), max_turns=3, num_tasks=3)
        .rl_module(model_path=model_path)
        .training(**{**settings, **training})
        .env_runners(max_response_tokens=8, seeded_sampling=True)
        .engines(engine_kwargs={"max_model_len": 508})
    )


def weights(algo: GRPO) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for _, tensor in algo.learner_group._learner.policy_module.named_weights()])


@pytest.fixture(scope="module")
def uninterrupted(algorithm_of, model_path, tmp_path_factory) -> SimpleNamespace:
    """Four iterations: results, weights, the run folder with checkpoints of the second and the third, and the algorithm."""
    config = small_config(model_path, lr=[[0, 2e-3], [60, 1e-4]])
    run = RunFolder.create(tmp_path_factory.mktemp("runs") / "run", config, Path(__file__), [])
    run.configure(config)
    algo = algorithm_of(config)
    initial, results = weights(algo).clone(), []
    for iteration in range(1, 5):
        results.append(algo.train())
        run.log(iteration, flatten(results[-1]))
        if iteration == 2:
            evaluation_sets = algo.evaluate_sets()
        if iteration in (2, 3):
            algo.save_to_path(str(run.checkpoints / f"{iteration:06d}"))
            write_manifest(run.checkpoints / f"{iteration:06d}")
    trained = weights(algo).clone()
    return SimpleNamespace(
        config=config,
        run=run,
        initial=initial,
        weights=trained,
        results=results,
        evaluation_sets=evaluation_sets,
        algo=algo,
    )


def test_a_replay_gives_the_weights_of_the_run_bit_for_bit(uninterrupted, tmp_path):
    run = uninterrupted.run
    found = {iteration: Replay.of(run, iteration).play() for iteration in (1, 3)}
    assert all(each.same_weights for each in found.values())
    folder = find_model(run.checkpoints / "000003")
    assert found[3].weights == weights_checksum(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert load_tokenizer(str(folder)).chat_template
    assert found[3].metrics == found[3].recorded_metrics
    assert {"trial/dense_loss", "grpo/surrogate_loss", "engine/logprob_diff"} <= set(found[3].metrics)
    # Recording it elsewhere changes nothing, and what is recorded is the same.
    again = Replay.of(run, 3, overrides=[f"training_folder={tmp_path}"])
    assert again.changed
    assert again.play().same_weights
    assert read_training(tmp_path).equals(read_training(run.training, 3))


def test_a_replay_with_another_method_and_setting_gives_other_weights(uninterrupted):
    found = Replay.of(uninterrupted.run, 3, "grpo", ["lr=1e-2"]).play()
    assert not found.same_weights
    assert found.metrics["engine/logprob_diff"] < 1e-5  # it began from the weights that sampled


def test_a_replay_does_not_begin_from_other_weights(uninterrupted, tmp_path):
    copy = shutil.copytree(uninterrupted.run.path, tmp_path / "run")
    (copy / "checkpoints" / "000002").rename(copy / "checkpoints" / "old")
    (copy / "checkpoints" / "000003").rename(copy / "checkpoints" / "000002")
    with pytest.raises(CheckpointError, match="the weights that sampled iteration 3 had"):
        Replay.of(RunFolder.reopen(copy), 3).play()


def test_resuming_gives_the_weights_of_an_uninterrupted_run(uninterrupted):
    run = uninterrupted.run
    run.drop_records_after(2)
    resumed = uninterrupted.algo
    resumed.reset(uninterrupted.config.to_dict())
    resumed.restore_from_path(str(run.checkpoints / "000002"))
    with pytest.raises(ConfigError, match="set_state"):
        resumed.save_to_path(state=resumed.get_state())
    assert resumed.iteration == 2
    assert _episodes(resumed.evaluate_sets()) == _episodes(uninterrupted.evaluation_sets)
    results = [resumed.train() for _ in range(2)]
    trained = [uninterrupted.results[1]["time_total_s"], *(each["time_this_iter_s"] for each in results)]
    assert results[1]["time_total_s"] == pytest.approx(sum(trained))
    assert torch.equal(weights(resumed), uninterrupted.weights)
    assert not torch.equal(uninterrupted.weights, uninterrupted.initial)
    assert float(uninterrupted.results[1]["learners"]["default_policy"]["trial"]["turn_score_mean"]) > 0
    assert set(read_turns(run.trajectories)["iteration"].to_pylist()) == {1, 2, 3, 4}
    assert Replay.of(run, 3).play().same_weights


def _episodes(results) -> list:
    return [episode for result in results.values() for episode in result.episodes]


def test_conversations_are_trained_as_they_were_sampled(uninterrupted, model_path):
    """The third turns exceed the limit of prompts, so that the conversation starts again with the second."""
    config = small_config(model_path).env_runners(prompt_style="conversation", max_prompt_tokens=500, history_window=1)
    uninterrupted.algo.reset_config(config.to_dict())
    result = uninterrupted.algo.train()
    assert float(result["learners"]["default_policy"]["engine"]["logprob_diff"]) < 1e-5
    assert float(result["learners"]["default_policy"]["trial"]["turn_score_mean"]) > 0
    assert float(result["env_runners"]["cut_history_rate"]) == pytest.approx(1 / 3)


def pids(algo: GRPO) -> dict[str, int]:
    return {actor.name: ray.get(actor.handle.__ray_call__.remote(lambda self: os.getpid())) for actor in algo.actors()}


def test_a_reset_algorithm_trains_as_a_new_one_with_the_actors_of_the_last(uninterrupted, model_path):
    algo = uninterrupted.algo
    algo.reset_config(small_config(model_path, lr=1e-2, group_size=4).debugging(seed=9).to_dict())
    algo.train()
    before = pids(algo)
    assert algo.reset_config(small_config(model_path, lr=[[0, 2e-3], [60, 1e-4]]).to_dict())
    assert pids(algo) == before
    assert torch.equal(weights(algo), uninterrupted.initial)
    found = [algo.train() for _ in range(4)]
    assert torch.equal(weights(algo), uninterrupted.weights)
    for ours, expected in zip(found, uninterrupted.results, strict=True):
        assert ours["env_runners"] == expected["env_runners"]
        assert ours["rows"] == expected["rows"]


def wait_until_restarted(runner) -> None:
    for _ in range(100):
        with suppress(RayError):
            ray.get(runner.ping.remote(), timeout=60)
            return
        time.sleep(0.2)
    raise AssertionError("Ray did not restart the env runner")


def test_a_killed_env_runner_and_a_killed_engine_are_replaced_and_lose_no_group(uninterrupted, model_path):
    """Those of a reset algorithm: Ray makes an env runner again with the settings that it was made with first."""
    algo, recreated = uninterrupted.algo, []

    def note(env_runner_indices, is_evaluation, **others):
        recreated.append((env_runner_indices, is_evaluation, sorted(others)))

    algo.reset_config(small_config(model_path, group_size=4).callbacks(on_env_runners_recreated=note).to_dict())
    os.kill(next(actor for actor in algo.actors() if actor.name == "env runner 1").progress().pid, signal.SIGKILL)
    ray.kill(algo.engine_pool.handles[0])
    result = algo.train()
    assert result["groups"]["num_trained"] == 2
    assert result["env_runners"]["num_episodes"] == 8
    assert result["fault_tolerance"]["num_remote_worker_restarts"] == 1
    assert recreated == [([1], False, ["algorithm", "env_runner_group"])]
    assert ray.get(algo.engine_pool.handles[0].weight_version.remote(), timeout=60) == algo.weight_version
    # Ray has restarted the env runner before anything notices its death.
    runner = next(actor for actor in algo.actors() if actor.name == "env runner 1")
    os.kill(runner.progress().pid, signal.SIGKILL)
    wait_until_restarted(runner.handle)
    result = algo.train()
    assert (result["groups"]["num_trained"], result["groups"]["num_dropped"]) == (2, 0)
    assert recreated == [([1], False, ["algorithm", "env_runner_group"])] * 2
    algo.reset_config(small_config(model_path).to_dict())
    assert algo.train()["fault_tolerance"]["num_remote_worker_restarts"] == 0


@pytest.mark.parametrize(
    "engine",
    ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)])],
)
def test_engine_and_learner_agree_at_another_temperature_and_every_row_is_trained(engine, algorithm_of, model_path):
    """Sharp logits: untempered ones would differ by far more than the limit of 1e-3 nats, which stops a run."""
    config = small_config(model_path, num_epochs=2).env_runners(temperature=0.7).engines(engine=engine)
    algo = algorithm_of(config)
    before = algo.actor_reports()["engine 0"]
    results = [algo.train() for _ in range(2)]
    _check_counts(results, algo.actor_reports(), before)
    _check_timeline(algo.timeline(), results[-1])
    for result in results:
        learned = result["learners"]["default_policy"]
        print(f"{engine}: logprob diff {float(learned['engine']['logprob_diff']):.1e} at T = 0.7")
        assert float(learned["engine"]["logprob_diff"]) < 1e-5
        assert float(learned["engine"]["ratio_mean"]) == pytest.approx(1, abs=1e-4)
        rows = result["rows"]
        assert rows["sampled"] == rows["given_to_learners"] + rows["left_out"] + rows["redrawn"]
        assert rows["sampled"] == result["env_runners"]["num_env_steps_sampled"]
        assert learned["num_module_steps_trained"] + learned["rows"]["skipped"] == 2 * rows["given_to_learners"]


def _check_counts(results, reports, before) -> None:
    """Env runners, engines and learners counted the same tokens; the phases are within the iterations' time."""
    sampled = [result["env_runners"] for result in results]
    prompts, responses = (sum(each[f"num_{kind}_tokens"] for each in sampled) for kind in ("prompt", "response"))
    engine = {
        name: reports["engine 0"][name] - before[name] for name in ("prompt_tokens", "response_tokens", "busy_seconds")
    }
    assert (engine["prompt_tokens"], engine["response_tokens"]) == (prompts, responses)
    trained = sum(result["learners"]["default_policy"]["update"]["tokens_trained"] for result in results)
    assert trained == 2 * (prompts + responses)
    assert set(reports) == {"driver and learner", "engine 0", "env runner 1"}
    assert all(report["host_bytes"] > 50_000_000 for report in reports.values())
    for result in results:
        seconds, learner = result["seconds"], result["learners"]["default_policy"]
        assert 0 < sum(seconds.values()) <= result["time_this_iter_s"]
        assert learner["scoring"]["seconds"] + learner["update"]["seconds"] <= seconds["update"]
        assert 0 < engine["busy_seconds"] < sum(each["time_this_iter_s"] for each in results)


def _check_timeline(timeline, result) -> None:
    """Events are within the iteration, and their counts are its metrics'."""
    assert set(timeline.actors) == {"driver", "env runner 1", "engine 0"}
    events = [each for found in timeline.actors.values() for each in found.events]
    named = {name: [each for each in events if each.name == name] for name in {each.name for each in events}}
    assert timeline.iteration == 2
    assert {"sampling", "update", "sync", "scoring", "optimizer step", "load weights", STEP} <= set(named)
    ended = timeline.began + timeline.seconds
    assert all(timeline.began <= each.began <= each.began + each.seconds <= ended for each in named[STEP])
    sampled = result["env_runners"]
    assert len(named[EPISODE]) == sampled["num_episodes"]
    assert (
        sum(each.counts["turns"] for each in named[EPISODE]) == len(named[RESPONSE]) == sampled["num_env_steps_sampled"]
    )
    assert sum(each.counts["finished"] for each in named[STEP]) == len(named[RESPONSE])
    assert sum(each.counts["response_tokens"] for each in named[RESPONSE]) == sampled["num_response_tokens"]


def test_other_engines_are_made_where_settings_ask_for_them_and_wrong_settings_leave_no_actor(
    uninterrupted, model_path
):
    algo = uninterrupted.algo
    before = pids(algo)
    assert algo.reset_config(
        small_config(model_path).env_runners(max_response_tokens=6).engines(engine_kwargs={}).to_dict()
    )
    assert not set(pids(algo).values()) & set(before.values())
    algo.train()
    actors = algo.actors()
    with pytest.raises(ConfigError, match="no folder"):
        algo.reset_config(small_config("/nowhere/at/all").to_dict())
    for actor in actors:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.handle.__ray_ready__.remote(), timeout=30)
    assert algo.reset_config(small_config(model_path).to_dict())
    assert algo.train()["groups"]["num_trained"] == 2
