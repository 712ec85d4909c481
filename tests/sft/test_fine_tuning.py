"""Supervised fine-tuning: its loss, its held-out measures, the policy that is kept, and its continuation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_learners import build_learner, gradients, worst
from synthetic_groups import synthetic_groups

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.algorithms import GRPOConfig
from trial_ray.errors import CheckpointError
from trial_ray.models.loading import load_causal_lm
from trial_ray.models.tiny import build_tokenizer
from trial_ray.sft.training import FineTuning, SFTConfig, SFTSettings, held_out_scores, split_tasks
from trial_ray.trajectory import Trajectory, TrajectoryGroup

SETTINGS = SFTSettings(epochs=2, learning_rate=1e-2, batch_rows=6, checks=3, held_out=0.3)


@pytest.fixture(scope="module")
def episodes() -> list[Trajectory]:
    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
    texts = ("look", "go to desk 1", "take pencil 1 from desk 1")
    responses = [np.array([*tokenizer.encode(text), tokenizer.eos_token_id], np.int32) for text in texts]
    groups = synthetic_groups(num_groups=8, group_size=1, max_turns=4, responses=responses, seed=3)
    return [each for group in groups for each in group.trajectories if each.turns]


def config_of(model_path: str) -> GRPOConfig:
    return GRPOConfig().environment("trial/ALFWorld-v0").rl_module(model_path=model_path)


def own_loss(model_path: str, episodes) -> tuple[torch.Tensor, torch.nn.Module, float]:
    """Mean over response tokens, one plain forward pass per turn, and the share of most likely tokens."""
    lm, losses, right = load_causal_lm(model_path, "float32"), [], []
    for turn in (turn for each in episodes for turn in each.turns):
        ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.response_ids])).long()
        logits = lm(input_ids=ids[None, :-1]).logits[0][-len(turn.response_ids) :]
        targets = ids[-len(turn.response_ids) :]
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        right.append(logits.argmax(-1) == targets)
    return torch.cat(losses).mean(), lm, torch.cat(right).float().mean().item()


def test_gradient_is_that_of_the_mean_over_response_tokens(model_path, episodes):
    """Turns have different lengths, and microbatches different numbers of tokens."""
    config = SFTConfig().environment("trial/ALFWorld-v0").rl_module(model_path=model_path)
    config.training(
        microbatch_rows=3, minibatch_rows=1000, microbatch_weighting="tokens", batch_shards=1, ref_kl_coeff=0.0,
        entropy_coeff=0.0, grad_clip=None,
    )  # fmt: skip
    learner = build_learner(config)
    found = gradients(learner, [TrajectoryGroup(each.task_id, [each]) for each in episodes])
    loss, lm, accuracy = own_loss(model_path, episodes)
    loss.backward()
    assert worst(found, {name: parameter.grad for name, parameter in lm.named_parameters()}) < 1e-4
    nll, right = held_out_scores(learner, episodes)
    assert nll == pytest.approx(loss.item(), rel=1e-5)
    assert right == pytest.approx(accuracy)


def test_tasks_are_not_shared_with_the_held_out_episodes(episodes):
    training, held_out = split_tasks(episodes, 0.3)
    assert len(training) + len(held_out) == len(episodes)
    assert not {each.task_id for each in training} & {each.task_id for each in held_out}
    assert split_tasks(episodes[:1], 0.3) == (episodes[:1], [])


def weights(folder) -> torch.Tensor:
    return torch.cat([each.flatten() for each in load_causal_lm(str(folder), "float32").parameters()])


class Interrupted(Exception):
    pass


@pytest.mark.actors
def test_continues_where_it_was_interrupted(ray_session, model_path, episodes, tmp_path):
    def tune(name: str, settings=SETTINGS, stop_after: int | None = None) -> FineTuning:
        tuning = FineTuning(config_of(model_path), settings, episodes, tmp_path / name)

        def on_check(check):
            if check.step and check.step == stop_after:
                raise Interrupted

        tuning.run(lambda step, loss: None, on_check)
        return tuning

    whole = tune("whole")
    with pytest.raises(Interrupted):
        tune("cut", stop_after=whole._every)
    with pytest.raises(CheckpointError):
        tune("cut", SFTSettings(**{**vars(SETTINGS), "epochs": 3}))
    continued = tune("cut")
    assert continued.checks == whole.checks
    assert whole.checks[-1].loss < whole.checks[0].loss
    for tuning in (whole, continued):
        folder = tuning.finish({})
        assert (folder / "sft.json").is_file()
        assert not folder.with_name(f"{folder.name}.partial").exists()
    assert torch.equal(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
