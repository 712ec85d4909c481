"""Training with real actors, engines and games: what a run guarantees from its first iteration to its resumption."""

import itertools
import os
import shutil
import signal
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from fault_checks import lost_rows
from faulty_run import pid
from nano_model import save_nano_model
from ray.exceptions import RayError
from small_learners import weights as learner_weights
from tiny_run import games_config
from transformers import AutoModelForCausalLM

from trial_ray.algorithms.actors import ENV_RUNNER
from trial_ray.engines.weights import weights_checksum
from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.learner.recording import read_training
from trial_ray.metrics import LEARNER
from trial_ray.models.loading import load_tokenizer
from trial_ray.process import EPISODE, RESPONSE, STEP
from trial_ray.rollout.recording import read_turns
from trial_ray.runs.checkpoints import find_model, write_manifest
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.metrics_file import flatten
from trial_ray.runs.replay import Replay

pytestmark = pytest.mark.e2e
SCHEDULE = [[0, 2e-3], [60, 1e-4]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """An untrained model whose logits are nevertheless far from uniform, so that a temperature shows."""
    folder = save_nano_model(tmp_path_factory.mktemp("model") / "nano")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    model.save_pretrained(folder)
    return str(folder)


def small_config(model_path, **training):
    """Small and exactly repeatable: seeded requests, one of them at a time, one thread."""
    return (
        games_config(model_path, max_turns=3, num_tasks=3, lr=1e-3, group_size=3)
        .training(hindsight_start_iteration=1, hindsight_coeff=1.0, clamp_alpha=10.0)
        .training(**training)
        .env_runners(max_response_tokens=8, seeded_sampling=True, temperature=0.7)
        .engines(engine_kwargs={"max_model_len": 508})
    )


def weights(algo):
    return learner_weights(algo.learner_group._learner)


@pytest.fixture(scope="module")
def uninterrupted(algorithm_of, model_path, tmp_path_factory):
    """Three iterations: results, weights, the run folder with checkpoints of the second and the third, and the algorithm."""
    config = small_config(model_path, lr=SCHEDULE)
    run = RunFolder.create(tmp_path_factory.mktemp("runs") / "run", config, Path(__file__), [])
    run.configure(config)
    algo = algorithm_of(config)
    initial, before, results = weights(algo), algo.actor_reports()["engine 0"], []
    for iteration in range(1, 4):
        results.append(algo.train())
        run.log(iteration, flatten(results[-1]))
        if iteration == 1:
            timeline, reports = algo.timeline(), algo.actor_reports()
        if iteration == 2:
            evaluated = [result.episodes for result in algo.evaluate_sets().values()]
        if iteration > 1:
            write_manifest(Path(algo.save_to_path(f"{run.checkpoints}/{iteration:06d}")))
    return SimpleNamespace(
        config=config,
        run=run,
        initial=initial,
        weights=weights(algo),
        results=results,
        evaluated=evaluated,
        timeline=timeline,
        reports=(before, reports),
        algo=algo,
    )


def test_a_replay_gives_the_weights_of_the_run_bit_for_bit(uninterrupted, tmp_path):
    run = uninterrupted.run
    assert Replay.of(run, 1).play().same_weights
    # Recording it elsewhere changes nothing, and what is recorded is the same.
    replay = Replay.of(run, 3, overrides=[f"training_folder={tmp_path}"])
    assert replay.changed
    found = replay.play()
    assert found.same_weights
    assert read_training(tmp_path).equals(read_training(run.training, 3))
    folder = find_model(run.checkpoints / "000003")
    assert found.weights == weights_checksum(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert load_tokenizer(str(folder)).chat_template
    assert found.metrics == found.recorded_metrics
    assert {"trial/dense_loss", "grpo/surrogate_loss", "engine/logprob_diff"} <= set(found.metrics)


def test_a_replay_with_another_method_and_setting_gives_other_weights(uninterrupted, tmp_path):
    found = Replay.of(uninterrupted.run, 3, "grpo", ["lr=1e-2"]).play()
    assert not found.same_weights
    assert found.metrics["engine/logprob_diff"] < 1e-5  # it began from the weights that sampled
    copy = RunFolder.reopen(shutil.copytree(uninterrupted.run.path, tmp_path / "run"))
    shutil.rmtree(copy.checkpoints / "000002")
    (copy.checkpoints / "000003").rename(copy.checkpoints / "000002")
    with pytest.raises(CheckpointError, match="the weights that sampled iteration 3 had"):
        Replay.of(copy, 3).play()


def test_a_reset_algorithm_trains_and_resumes_as_a_new_one(uninterrupted, model_path):
    """It has the actors of the last one, and continues bit for bit from the second checkpoint."""
    algo, run, results = uninterrupted.algo, uninterrupted.run, uninterrupted.results
    algo.reset_config(small_config(model_path, lr=1e-2, group_size=4).debugging(seed=9).to_dict())
    algo.train()
    before = pids(algo)
    assert algo.reset_config(small_config(model_path, lr=SCHEDULE).to_dict())
    assert pids(algo) == before
    assert torch.equal(weights(algo), uninterrupted.initial)
    again = algo.train()
    assert again["env_runners"] == results[0]["env_runners"]
    assert again["rows"] == results[0]["rows"]

    run.drop_records_after(2)
    algo.reset(uninterrupted.config.to_dict())
    algo.restore_from_path(f"{run.checkpoints}/000002")
    with pytest.raises(ConfigError, match="set_state"):
        algo.save_to_path(state=algo.get_state())
    assert [result.episodes for result in algo.evaluate_sets().values()] == uninterrupted.evaluated
    third = algo.train()
    run.log(3, flatten(third))  # Other tests read the record of this iteration, too.
    assert third["time_total_s"] == pytest.approx(results[1]["time_total_s"] + third["time_this_iter_s"])
    assert torch.equal(weights(algo), uninterrupted.weights)
    assert not torch.equal(uninterrupted.weights, uninterrupted.initial)
    assert flatten(results[1])[f"{LEARNER}trial/turn_score_mean"] > 0
    assert set(read_turns(run.trajectories)["iteration"].to_pylist()) == {1, 2, 3}
    assert Replay.of(run, 3).play().same_weights


def pids(algo):
    return {actor.name: ray.get(actor.handle.__ray_call__.remote(lambda self: os.getpid())) for actor in algo.actors()}


def wait_until_restarted(algo):
    [runner] = (actor.handle for actor in algo.actors() if actor.kind == ENV_RUNNER)
    for _ in range(100):
        with suppress(RayError):
            ray.get(runner.ping.remote(), timeout=60)
            return
        time.sleep(0.2)
    raise AssertionError("Ray did not restart the env runner")


@pytest.mark.faults
def test_wrong_settings_leave_no_actor_and_killed_actors_lose_no_group(uninterrupted, model_path):
    """Other engines are made where settings ask for them, and Ray makes env runners again with those that were in force first."""
    algo, recreated = uninterrupted.algo, []

    def note(env_runner_indices, is_evaluation, **others):
        recreated.append((env_runner_indices, is_evaluation, sorted(others)))

    before, actors = pids(algo), algo.actors()
    with pytest.raises(ConfigError, match="no folder"):
        algo.reset_config(small_config("/nowhere/at/all").to_dict())
    for actor in actors:
        with pytest.raises(RayError):
            ray.get(actor.handle.__ray_ready__.remote(), timeout=30)
    config = small_config(model_path, group_size=4).env_runners(max_response_tokens=6).engines(engine_kwargs={})
    assert algo.reset_config(config.to_dict())
    assert not set(pids(algo).values()) & set(before.values())
    algo.reset_config(config.training(group_size=2).callbacks(on_env_runners_recreated=note).to_dict())
    os.kill(pid(algo, ENV_RUNNER), signal.SIGKILL)
    ray.kill(algo.engine_pool.handles[0])
    metrics, notes = flatten(algo.train()), [([1], False, ["algorithm", "env_runner_group"])]
    assert metrics["groups/num_trained"] == 2
    assert metrics["env_runners/num_episodes"] == 4
    assert metrics["fault_tolerance/num_remote_worker_restarts"] == 1
    assert recreated == notes
    assert ray.get(algo.engine_pool.handles[0].weight_version.remote(), timeout=60) == algo.weight_version
    # Ray has restarted the env runner before anything notices its death.
    algo.reset_config(config.to_dict())
    os.kill(pid(algo, ENV_RUNNER), signal.SIGKILL)
    wait_until_restarted(algo)
    metrics = flatten(algo.train())
    assert metrics["groups/num_trained"] == 2
    assert metrics["groups/num_dropped"] == 0
    assert recreated == notes * 2
    assert metrics["fault_tolerance/num_remote_worker_restarts"] == 1, "of this run"


def test_engine_and_learner_agree_at_a_temperature_and_train_every_row(uninterrupted):
    """Sharp logits: untempered ones would differ by far more than the limit of 1e-3 nats, which stops a run."""
    for result in uninterrupted.results:
        learned, rows = result["learners"]["default_policy"], result["rows"]
        assert float(learned["engine"]["logprob_diff"]) < 1e-5
        assert float(learned["engine"]["ratio_mean"]) == pytest.approx(1, abs=1e-4)
        assert rows["sampled"] == result["env_runners"]["num_env_steps_sampled"]
        assert lost_rows({**result, "rows": {**rows, "stale": 0}}) == 0


def test_env_runners_engines_learners_and_the_timeline_count_alike(uninterrupted):
    """Phases and events are within the iteration's time."""
    result, (before, reports) = uninterrupted.results[0], uninterrupted.reports
    metrics, seconds = flatten(result), result["seconds"]
    prompts, responses, busy = (
        reports["engine 0"][name] - before[name] for name in ("prompt_tokens", "response_tokens", "busy_seconds")
    )
    assert prompts == metrics["env_runners/num_prompt_tokens"]
    assert responses == metrics["env_runners/num_response_tokens"]
    assert metrics[f"{LEARNER}update/tokens_trained"] == prompts + responses
    assert set(reports) == {"driver and learner", "engine 0", "env runner 1"}
    assert all(report["host_bytes"] > 50_000_000 for report in reports.values())
    assert 0 < sum(seconds.values()) <= metrics["time_this_iter_s"]
    assert metrics[f"{LEARNER}scoring/seconds"] + metrics[f"{LEARNER}update/seconds"] <= seconds["update"]
    assert 0 < busy < metrics["time_this_iter_s"]

    timeline = uninterrupted.timeline
    assert set(timeline.actors) == {"driver", "env runner 1", "engine 0"}
    assert timeline.iteration == 1
    named = defaultdict(list)
    for each in itertools.chain(*(actor.events for actor in timeline.actors.values())):
        named[each.name].append(each)
    assert {"sampling", "update", "sync", "scoring", "optimizer step", "load weights"} <= set(named)
    ended = timeline.began + timeline.seconds
    assert all(timeline.began <= each.began <= each.began + each.seconds <= ended for each in named[STEP])

    def total(name, count):
        return sum(each.counts[count] for each in named[name])

    turns = {len(named[RESPONSE]), total(EPISODE, "turns"), total(STEP, "finished")}
    assert len(named[EPISODE]) == metrics["env_runners/num_episodes"]
    assert turns == {metrics["env_runners/num_env_steps_sampled"]}
    assert total(RESPONSE, "response_tokens") == responses
