"""The gradient of a whole optimizer step against a plain float64 loop over the rows, one forward pass a row and view.

The loop shares no code with the package: prompts are put together here, log-probabilities come from the model's own logits, and
advantages, weights and losses from ``method_reference``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import method_reference as ref
import numpy as np
import pytest
import torch
from small_learners import build_learner, config_of, gradients, update, weights, worst
from synthetic_groups import synthetic_groups

from trial_ray.errors import WeightSyncError
from trial_ray.learner.method import Method
from trial_ray.objectives import IMPORTANCE_MODES
from trial_ray.objectives.losses import weighted_likelihood_loss

EVIDENCE_LEAD = "\n\nOutcome after the reply:\n"
MICROBATCH_ROWS = 7
TRAINING = {
    "minibatch_rows": 1000,
    "microbatch_rows": MICROBATCH_ROWS,
    "batch_shards": 1,
    "ref_kl_coeff": 0.0,
    "entropy_coeff": 0.001,
    "reward_scale": 10.0,
    "grad_clip": None,
    "lr": 1e-3,
    "model_dtype": "float64",
}
VERSION = 7
ACTIVE = {"hindsight_coeff": 1.5, "clamp_alpha": 1.0, "hindsight_start_iteration": 1}


@pytest.fixture(scope="module")
def model_path(exact_model_path):
    return exact_model_path


def new_groups(num_groups: int = 3):
    return synthetic_groups(num_groups=num_groups, max_turns=5, seed=5)


def turns_of(groups):
    return [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]


@pytest.fixture(scope="module")
def groups():
    groups, rng = new_groups(), np.random.default_rng(5)
    for turn in turns_of(groups):
        turn.logprobs[:] = rng.uniform(-9, -3, len(turn.logprobs))
    return groups


def exact_learner(method: str, model_path: str, temperature: float = 1.0, **settings):
    config = config_of(method, model_path, **{**TRAINING, **settings})
    return build_learner(config.env_runners(temperature=temperature))


@pytest.fixture(scope="module")
def kl_gradients(model_path):
    """Compute the gradients of the KL term only. Its small coefficient makes them small, but they must not become 0."""
    groups = new_groups()
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.success = False

    @functools.cache
    def compute(model_dtype: str, compute_dtype: str | None) -> torch.Tensor:
        settings = {"ref_kl_coeff": 1e-4, "entropy_coeff": 0.0, "invalid_action_penalty": 0.0}
        settings |= {"model_dtype": model_dtype, "compute_dtype": compute_dtype}
        learner, generator = exact_learner("grpo", model_path, **settings), torch.Generator().manual_seed(0)
        for parameter in learner.policy_module.policy_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.data += 0.2 * parameter.data.abs().mean() * noise
        return torch.cat([value.double().reshape(-1) for _, value in sorted(gradients(learner, groups).items())])

    return compute


@pytest.mark.parametrize(
    ("model_dtype", "compute_dtype", "limit"),
    [("float32", None, 1e-4), ("float32", "bfloat16", 0.1), ("bfloat16", None, 0.1)],
)
def test_small_gradients_of_every_dtype_are_those_of_float64(kl_gradients, model_dtype, compute_dtype, limit):
    exact, rounded = kl_gradients("float64", None), kl_gradients(model_dtype, compute_dtype)
    assert (rounded - exact).norm() < limit * exact.norm()
    assert (rounded != 0).sum() > 0.99 * (exact != 0).sum()


# --- the loop


def log_likelihoods(lm, prompt, response, temperature):
    logits = lm(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / temperature
    logprobs = torch.log_softmax(logits, -1)
    return logprobs[torch.arange(len(response)), torch.tensor(response)], -(logprobs.exp() * logprobs).sum(-1)


def hindsight_prompt(turn, trajectory, tokenizer):
    text = turn.outcome
    if turn is trajectory.turns[-1] and trajectory.ended == "terminated":
        text += f"\nThe episode ended: the task {'succeeded' if trajectory.success else 'failed'}."
    evidence = tokenizer.encode(EVIDENCE_LEAD + text, add_special_tokens=False)
    return [*turn.prompt_ids[: turn.insert_at], *evidence, *turn.prompt_ids[turn.insert_at :]]


def importance(tokens, reported, cap, mode):
    logs = [token.old - engine for token, engine in zip(tokens, reported, strict=True)]
    ratios = [math.exp(math.fsum(logs))] * len(logs) if mode.startswith("sequence") else map(math.exp, logs)
    return [ratio if ratio <= cap else cap * mode.endswith("truncate") for ratio in ratios]


def records(lm, tokenizer, groups, temperature, cap, mode):
    turns = []
    rollouts = ((number, trajectory) for number, group in enumerate(groups) for trajectory in group.trajectories)
    for index, (group, trajectory) in enumerate(rollouts):
        for turn in trajectory.turns:
            response = turn.response_ids.tolist()
            logp, entropy = log_likelihoods(lm, turn.prompt_ids.tolist(), response, temperature)
            with torch.no_grad():
                prompt = hindsight_prompt(turn, trajectory, tokenizer)
                teacher, _ = log_likelihoods(lm, prompt, response, temperature)
            tokens = [
                ref.Token(p.item(), t.item(), 0.0, False, p, e) for p, t, e in zip(logp, teacher, entropy, strict=True)
            ]
            if cap is not None:
                reported = turn.logprobs.tolist()
                for token, weight in zip(tokens, importance(tokens, reported, cap, mode), strict=True):
                    token.importance = weight
            last = turn is trajectory.turns[-1]
            turns.append(ref.TurnRecord(group, index, turn.observation, turn.valid, trajectory.success, last, tokens))
    for turn, advantage in zip(turns, ref.row_advantages(turns, "trajectories"), strict=True):
        turn.advantage = advantage
    for turn, weight in zip(turns, ref.relative_weights(turns), strict=True):
        turn.weight = weight
    return turns


def loop_gradients(learner, groups, temperature, coefficient=None, cap=None, mode="token_truncate"):
    """Return the gradients by the parameters' names, and whether the clamp was saturated in some microbatches."""
    lm = learner.policy_module.lm
    lm.zero_grad()
    turns = records(lm, learner.policy_module.tokenizer, groups, temperature, cap, mode)
    pieces = np.array_split(np.arange(len(turns)), -(-len(turns) // MICROBATCH_ROWS))
    assert len(set(map(len, pieces))) > 1  # microbatches have unequal weights
    saturated, total = set(), 0.0
    for piece in pieces:
        rows = [turns[row] for row in piece]
        if coefficient is None:
            loss = ref.grpo(rows, kl=0.0)
        else:
            loss, clamped = ref.trial(rows, coefficient, kl=0.0)
            saturated.add(clamped)
        total = total + len(rows) / len(turns) * loss
    total.backward()
    result = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()
    return result, saturated


@pytest.mark.parametrize(
    ("method", "own", "of_loop"),
    [
        ("grpo", {}, {}),
        ("trial", ACTIVE, {"coefficient": 1.5}),
        *[
            ("grpo", {"importance_cap": 1.2, "importance_mode": mode}, {"cap": 1.2, "mode": mode})
            for mode in IMPORTANCE_MODES
        ],
    ],
)
def test_step_has_the_gradient_of_the_loop(method, own, of_loop, model_path, groups):
    """The temperature matters, and passes of any size give the same gradient."""
    learner = exact_learner(method, model_path, 0.7, **own)
    expected, saturated = loop_gradients(learner, groups, 0.7, **of_loop)
    assert worst(gradients(learner, groups), expected) < 1e-12
    split = gradients(exact_learner(method, model_path, 0.7, max_tokens_per_forward=60, **own), groups)
    assert worst(split, expected) < 1e-12
    assert method == "grpo" or saturated == {False, True}
    assert worst(expected, loop_gradients(learner, groups, 1.0, **of_loop)[0]) > 1e-3


# --- what must not change the gradient


class WhitenedAdvantages(Method):
    """A hook over the whole microbatch."""

    def token_advantages(self, tokens, logprobs, iteration):
        return whitened(tokens.advantages + logprobs)


class WhitenedDense(Method):
    def dense_loss(self, tokens, fwd_out, iteration):
        coefficients = whitened(tokens.hindsight_logprobs - fwd_out["logprobs"].detach())
        return weighted_likelihood_loss(fwd_out["logprobs"], coefficients, tokens.mask), {}


def whitened(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / values.std()


@pytest.mark.parametrize(
    ("method", "own", "rule"),
    [
        ("trial", ACTIVE, None),
        ("grpo", {"ratio_level": "sequence", "surrogate_mean": "rows"}, None),
        ("grpo", {"surrogate_mean": "fixed_length"}, None),
        ("rlsd", {}, WhitenedAdvantages),
        ("rlsd", {}, WhitenedDense),
    ],
)
def test_no_memory_split_changes_the_gradient(method, own, rule, model_path, groups):
    def step(max_tokens: int) -> dict[str, torch.Tensor]:
        learner = exact_learner(method, model_path, max_tokens_per_forward=max_tokens, **own)
        if rule is not None:
            learner.method = learner.passes._method = learner.scoring._method = rule(learner.config)
        return gradients(learner, groups)

    whole = step(100_000)
    assert max(worst(step(tokens), whole) for tokens in (60, 1)) < 1e-12


def test_a_split_is_forwarded_twice_only_if_the_clamp_acts(model_path, groups, monkeypatch):
    def forwards(method, iteration=30, **training) -> int:
        learner = exact_learner(method, model_path, max_tokens_per_forward=60, **training)
        calls, forward = [], learner.policy_module.forward_train
        monkeypatch.setattr(learner.policy_module, "forward_train", lambda batch: calls.append(1) or forward(batch))
        gradients(learner, groups, iteration)
        return len(calls)

    plain = forwards("grpo")
    assert forwards("trial", 1, hindsight_coeff=0.3, hindsight_start_iteration=2) == plain
    assert forwards("trial", **{**ACTIVE, "clamp_alpha": math.inf}) == plain
    assert forwards("sdar") == forwards("rlsd") == plain
    assert forwards("trial", **ACTIVE) == 2 * plain


@pytest.mark.parametrize(("method", "own"), [("grpo", {}), ("trial", {**ACTIVE, "clamp_alpha": 1e-9})])
def test_rollouts_without_a_gradient_get_no_backward_pass(method, own, model_path, monkeypatch):
    """Two of three groups have equal rewards, and TRIAL's saturated clamp removes the gradient of their dense term."""
    groups = new_groups()
    for trajectory in (trajectory for group in groups[:2] for trajectory in group.trajectories):
        trajectory.success = True
    for number, group in enumerate(groups):
        for turn in turns_of([group]):
            turn.prompt_ids[0] = 10 + number  # prompts of a group share a prefix, so its rows are computed together
    own = {**own, "entropy_coeff": 0.0, "invalid_action_penalty": 0.0, "microbatch_rows": 1000}
    whole = gradients(exact_learner(method, model_path, **own), groups)
    passes, backward = [], torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *given: passes.append(1) or backward(*given))

    def split(groups, **changed):
        passes.clear()
        result = gradients(exact_learner(method, model_path, **{**own, **changed}, max_tokens_per_forward=60), groups)
        return result, len(passes)

    result, needed = split(groups)
    assert worst(result, whole) < 1e-12
    assert split(groups, entropy_coeff=0.001)[1] > 2 * needed  # with an entropy term all rows have a gradient
    zeros, last = split(groups[:2])
    assert (last, any(bool(gradient.any()) for gradient in zeros.values())) == (1, False)


# --- what must not be trained on


def sampled_by(groups, *versions):
    """Return the same groups with turns sampled by these versions of the weights, in turns."""
    number, groups = itertools.cycle(versions), [dataclasses.replace(group) for group in groups]
    for group in groups:
        group.trajectories = [dataclasses.replace(trajectory) for trajectory in group.trajectories]
        for trajectory in group.trajectories:
            trajectory.turns = [dataclasses.replace(turn, weight_version=next(number)) for turn in trajectory.turns]
    return groups


@pytest.mark.parametrize(
    ("versions", "reported", "max_diff"),
    [
        ((VERSION,), -5.0, None),
        ((VERSION,), math.nan, None),
        ((VERSION,), -math.inf, None),
        ((VERSION - 1, VERSION), -5.0, None),
        ((VERSION - 1,), math.nan, 100.0),
    ],
)
def test_responses_of_another_policy_are_not_trained_on(versions, reported, max_diff, model_path):
    groups = sampled_by(new_groups(1), *versions)
    for turn in turns_of(groups):
        turn.logprobs[:] = reported
    learner = exact_learner("grpo", model_path, max_logprob_diff=max_diff, importance_cap=1.5)
    before = weights(learner)
    with pytest.raises(WeightSyncError, match=f"at most {max_diff or 0.001:g}"):
        update(learner, groups, weight_version=VERSION)
    assert torch.equal(weights(learner), before)


def test_older_rows_may_differ_and_their_age_is_logged(model_path, groups):
    learner = exact_learner("grpo", model_path, max_logprob_diff=None, importance_cap=1.5)
    results = update(learner, sampled_by(groups, VERSION - 1, VERSION - 2), weight_version=VERSION)
    engine, rows = ({name: float(value) for name, value in results[key].items()} for key in ("engine", "rows"))
    assert engine["logprob_diff"] == 0
    assert (rows["staleness_max"], rows["staleness_mean"]) == (2, pytest.approx(1.5, abs=0.1))
    assert 0 < engine["effective_sample_size"] < 1 < engine["ratio_max"]
