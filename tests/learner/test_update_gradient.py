"""The gradient of a whole optimizer step against a plain float64 loop over the rows, one forward pass a row and view.

The loop shares no code with the product: prompts are put together here, log-probabilities come from the model's own logits,
and advantages, weights and losses from ``method_reference``.
"""

from __future__ import annotations

import method_reference as ref
import numpy as np
import pytest
import torch
from small_learners import build_learner
from synthetic_groups import synthetic_groups

from trial_ray.algorithms import GRPOConfig, TRIALConfig
from trial_ray.algorithms.methods.sdar import SDARConfig
from trial_ray.errors import WeightSyncError

EVIDENCE_LEAD = "\n\nOutcome after the reply:\n"
TRAINING = {
    "minibatch_rows": 1000,
    "microbatch_rows": 7,
    "batch_shards": 1,
    "kl_coeff": 0.0,
    "entropy_coeff": 0.001,
    "reward_scale": 10.0,
    "grad_clip": None,
    "lr": 1e-3,
    "max_logprob_gap": 100.0,  # no engine sampled the groups
}
ACTIVE = {"hindsight_coeff": 1.5, "clamp_alpha": 1.0, "hindsight_start_iteration": 1}


@pytest.fixture(scope="module")
def model_path(exact_model_path):
    return exact_model_path


@pytest.fixture(scope="module")
def groups():
    return synthetic_groups(vocab_size=400, num_groups=3, group_size=4, most_turns=5, seed=5)


def learner_of(model_path: str, config_class=TRIALConfig, temperature: float = 1.0, **training):
    config = config_class().environment("trial/ALFWorld-v0").env_runners(temperature=temperature)
    return build_learner(
        config.rl_module(model_path=model_path, model_dtype="float64").training(**{**TRAINING, **training})
    )


def gradients(learner, groups, iteration: int = 30) -> dict[str, torch.Tensor]:
    """The gradient that the learner would apply in its only step."""
    names = {id(parameter): name for name, parameter in learner.policy_module.lm.named_parameters()}
    found = {}
    learner.apply_gradients = lambda each: found.update(
        {names[id(ref_)]: value.clone() for ref_, value in each.items()}
    )
    learner.update(episodes=list(groups), timesteps={"training_iteration": iteration})
    return found


# --- the loop


def log_likelihoods(lm, prompt, response, temperature):
    ids = torch.tensor([[*prompt, *response]])
    logits = lm(ids).logits[0, len(prompt) - 1 : -1] / temperature
    logprobs = torch.log_softmax(logits, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[torch.arange(len(response)), torch.tensor(response)], entropy


def hindsight_prompt(turn, trajectory, tokenizer):
    text = turn.outcome
    if turn is trajectory.turns[-1] and trajectory.ended == "terminated":
        text += f"\nThe episode ended: the task {'succeeded' if trajectory.success else 'failed'}."
    evidence = tokenizer.encode(EVIDENCE_LEAD + text, add_special_tokens=False)
    return [*turn.prompt_ids[: turn.insert_at], *evidence, *turn.prompt_ids[turn.insert_at :]]


def records(lm, tokenizer, groups, temperature):
    trajectory_number, turns = 0, []
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                response = turn.response_ids.tolist()
                logp, entropy = log_likelihoods(lm, turn.prompt_ids.tolist(), response, temperature)
                with torch.no_grad():
                    teacher, _ = log_likelihoods(
                        lm, hindsight_prompt(turn, trajectory, tokenizer), response, temperature
                    )
                tokens = [
                    ref.Token(old=p.item(), teacher=t.item(), frozen=0.0, in_action=False, logp=p, entropy=e)
                    for p, t, e in zip(logp, teacher, entropy, strict=True)
                ]
                last = turn is trajectory.turns[-1]
                turns.append(
                    ref.TurnRecord(
                        number, trajectory_number, turn.observation, turn.valid, trajectory.success, last, tokens
                    )
                )
            trajectory_number += 1
    for turn, advantage in zip(turns, ref.row_advantages(turns, "trajectories"), strict=True):
        turn.advantage = advantage
    for turn, weight in zip(turns, ref.relative_weights(turns), strict=True):
        turn.weight = weight
    return turns


def loop_gradients(learner, groups, temperature, coefficient, microbatch_rows=7):
    lm = learner.policy_module.lm
    lm.zero_grad()
    turns = records(lm, learner.policy_module.tokenizer, groups, temperature)
    pieces = -(-len(turns) // microbatch_rows)
    # As even as whole rows allow, the longer ones first.
    sizes = [len(turns) // pieces + (piece < len(turns) % pieces) for piece in range(pieces)]
    assert len(set(sizes)) > 1, "the tail must be shorter, or its weight is not tested"
    saturated, total, start = set(), 0.0, 0
    for size in sizes:
        rows = turns[start : start + size]
        if coefficient is None:
            loss = ref.grpo(rows, kl=0.0)
        else:
            loss, clamped = ref.trial(rows, coefficient, kl=0.0)
            saturated.add(clamped)
        total = total + size / len(turns) * loss
        start += size
    total.backward()
    found = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()
    return found, saturated


def worst(found, expected) -> float:
    scale = max(each.abs().max().item() for each in expected.values())
    return max((found[name] - expected[name]).abs().max().item() for name in expected) / scale


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("method", ["grpo", "trial"])
def test_a_whole_step_has_the_gradient_of_the_loop(method, temperature, model_path, groups):
    config_class, own = (GRPOConfig, {}) if method == "grpo" else (TRIALConfig, ACTIVE)
    learner = learner_of(model_path, config_class, temperature, **own)
    expected, saturated = loop_gradients(learner, groups, temperature, own.get("hindsight_coeff"))
    error = worst(gradients(learner, groups), expected)
    print(f"{method}, T = {temperature}: largest relative error {error:.1e}")  # shown by pytest -rP
    assert error < 1e-12
    assert method == "grpo" or saturated == {False, True}
    other = loop_gradients(learner, groups, 1.7 - temperature, own.get("hindsight_coeff"))[0]
    assert worst(expected, other) > 1e-3, "the temperature must make a difference, or it is not tested"


# --- what must not change the gradient


@pytest.mark.parametrize("scope", ["microbatch", "minibatch"])
@pytest.mark.parametrize("budget", [200, 60, 1])
def test_no_memory_split_changes_the_gradient(scope, budget, model_path, groups):
    whole, split = (
        gradients(learner_of(model_path, max_tokens_per_forward=tokens, clamp_scope=scope, **ACTIVE), groups)
        for tokens in (100_000, budget)
    )
    assert worst(split, whole) < 1e-12


def test_a_split_is_forwarded_twice_only_where_the_clamp_acts(model_path, groups, monkeypatch):
    def forwards(config_class, iteration, **training) -> int:
        learner = learner_of(model_path, config_class, max_tokens_per_forward=60, **training)
        calls = []
        forward = type(learner.policy_module).forward_train
        monkeypatch.setattr(
            type(learner.policy_module), "forward_train", lambda *args: calls.append(1) or forward(*args)
        )
        gradients(learner, groups, iteration)
        monkeypatch.undo()
        return len(calls)

    plain = forwards(GRPOConfig, 30)
    assert forwards(TRIALConfig, 1, hindsight_coeff=0.3, hindsight_start_iteration=2) == plain
    assert forwards(TRIALConfig, 30, **{**ACTIVE, "clamp_alpha": float("inf")}) == plain
    assert forwards(SDARConfig, 30) == plain
    assert forwards(TRIALConfig, 30, **ACTIVE) == 2 * plain


def test_the_clamp_of_a_minibatch_compares_the_scalars_of_all_its_rows(model_path, groups):
    """One microbatch of all rows is the minibatch, so both scopes must then agree; with several they differ."""
    one = {**ACTIVE, "microbatch_rows": 1000}
    alone, together = (gradients(learner_of(model_path, clamp_scope=s, **one), groups) for s in CLAMP_SCOPES)
    assert worst(together, alone) < 1e-12
    several = [gradients(learner_of(model_path, clamp_scope=s, **ACTIVE), groups) for s in CLAMP_SCOPES]
    assert worst(*several) > 1e-6


CLAMP_SCOPES = ("microbatch", "minibatch")


def test_equal_weighting_counts_microbatches_and_not_rows(model_path, groups):
    by_rows, equal = (
        gradients(learner_of(model_path, GRPOConfig, microbatch_weighting=rule), groups) for rule in ("rows", "equal")
    )
    assert worst(equal, by_rows) > 1e-4


# --- what must not be trained on


@pytest.mark.parametrize("reported", [-5.0, float("nan"), float("-inf")])
def test_responses_of_another_policy_are_not_trained_on(reported, model_path):
    groups = synthetic_groups(vocab_size=400, num_groups=1)
    for turn in (turn for trajectory in groups[0].trajectories for turn in trajectory.turns):
        turn.logprobs[:] = reported
    learner = learner_of(model_path, GRPOConfig, max_logprob_gap=None)
    before = [parameter.clone() for parameter in learner.policy_module.lm.parameters()]
    with pytest.raises(WeightSyncError, match=r"disagree by .* nats a token.*expected at most 0\.001"):
        learner.update(episodes=groups, timesteps={"training_iteration": 1})
    assert all(torch.equal(*pair) for pair in zip(before, learner.policy_module.lm.parameters(), strict=True))


def test_every_row_is_trained_once_and_counted(model_path, groups):
    num_rows = sum(len(group) for group in groups)
    for epochs in (1, 2):
        learner = learner_of(model_path, GRPOConfig, minibatch_rows=10, num_epochs=epochs)
        seen = []
        backward = learner.passes.backward
        learner.passes.backward = lambda table, microbatches, *args, b=backward, s=seen: (
            s.extend(row for each in microbatches for row in each.rows) or b(table, microbatches, *args)
        )
        results = learner.update(episodes=list(groups), timesteps={"training_iteration": 1})
        assert sorted(seen) == sorted(list(range(num_rows)) * epochs)
        assert results["default_policy"]["num_module_steps_trained"] == epochs * num_rows
        assert np.isfinite(float(results["default_policy"]["total_loss"]))
