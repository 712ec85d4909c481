"""The gradient of a whole optimizer step against a plain float64 loop over the rows, one forward pass a row and view.

The loop shares no code with the package: prompts are put together here, log-probabilities come from the model's own logits, and
advantages, weights and losses from ``method_reference``.
"""

import itertools
import math
from types import SimpleNamespace

import method_reference as ref
import numpy as np
import pytest
import torch
from architectures import VOCABULARY, random_model
from small_learners import build_learner, config_of, gradients, refuses, update, worst
from synthetic_groups import changed, synthetic_groups

from trial_ray.algorithms.methods import new_config
from trial_ray.errors import WeightSyncError
from trial_ray.learner.loss import WeightedMeans
from trial_ray.learner.passes import MicrobatchPasses
from trial_ray.learner.rows import group_turn_rows
from trial_ray.learner.update_plan import plan_update

EVIDENCE_LEAD = "\n\nOutcome after the reply:\n"
MICROBATCH_ROWS = 7
TRAINING = {
    "minibatch_rows": 1000,
    "microbatch_rows": MICROBATCH_ROWS,
    "ref_kl_coeff": 0.0,
    "reward_scale": 10.0,
    "grad_clip": None,
    "model_dtype": "float64",
    "mask_truncated": True,
}
VERSION = 7
ACTIVE = {"hindsight_coeff": 1.5, "clamp_alpha": 1.0, "hindsight_start_iteration": 1}


def new_groups(num_groups=3):
    return synthetic_groups(num_groups=num_groups, max_turns=5, seed=5)


def turns_of(groups):
    return [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]


@pytest.fixture
def groups():
    """Some responses are truncated, so that nothing is learned from them; the engine's log-probabilities are others.

    Turns of a rollout are sampled at two temperatures.
    """
    rng = np.random.default_rng(5)
    return changed(
        new_groups(),
        lambda turn, index: {
            "logprobs": rng.uniform(-9, -3, len(turn.logprobs)).astype(np.float32),
            "finish_reason": "length" if rng.random() < 0.2 else "stop",
            "temperature": (0.7, 1.2)[index % 2],
        },
    )


@pytest.fixture
def exact_learner(exact_model_path):
    """Return a function that builds a learner of a method, whose gradients are exact."""
    return lambda method, **settings: build_learner(config_of(method, exact_model_path, **TRAINING | settings))


# --- the loop


def log_likelihoods(lm, prompt, turn):
    response = turn.response_ids.tolist()
    logits = lm(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / turn.temperature
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


def records(lm, tokenizer, groups, cap, mode):
    turns = []
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                logp, entropy = log_likelihoods(lm, turn.prompt_ids, turn)
                teacher, _ = log_likelihoods(lm, hindsight_prompt(turn, trajectory, tokenizer), turn)
                tokens = [
                    ref.Token(p.item(), t.item(), 0.0, False, p, e)
                    for p, t, e in zip(logp, teacher, entropy, strict=True)
                ]
                if cap is not None:
                    weights = importance(tokens, turn.logprobs.tolist(), cap, mode)
                    for token, weight in zip(tokens, weights, strict=True):
                        token.importance = weight
                state = (turn.observation, turn.valid, trajectory.success, turn is trajectory.turns[-1])
                truncated = turn.finish_reason == "length"
                turns.append(ref.TurnRecord(number, id(trajectory), *state, tokens, truncated=truncated))
    for turn, advantage in zip(turns, ref.row_advantages(turns), strict=True):
        turn.advantage = advantage
    eligible = [turn for turn in turns if not turn.truncated]
    for turn, weight in zip(eligible, ref.relative_weights(eligible), strict=True):
        turn.weight = weight
    return turns, len(eligible)


def loop_gradients(learner, groups, coefficient=None, cap=None, mode="", **settings):
    """Return the gradients by the parameters' names, and whether the clamp was saturated in some microbatches."""
    lm = learner.policy_module.lm
    turns, num_eligible = records(lm, learner.policy_module.tokenizer, groups, cap, mode)
    saturated = set()
    for piece in np.array_split(np.arange(len(turns)), math.ceil(len(turns) / MICROBATCH_ROWS)):
        rows = [turns[row] for row in piece if not turns[row].truncated]
        if coefficient is None:
            loss = ref.grpo(rows, kl=0.0, **settings)
        else:
            loss, clamped = ref.trial(rows, coefficient, kl=0.0)
            saturated.add(clamped)
        (len(rows) / num_eligible * loss).backward()
    return {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}, saturated


@pytest.mark.parametrize(
    ("method", "own", "of_loop"),
    [
        ("grpo", {"ratio_level": "sequence", "surrogate_mean": "rows"}, {"level": "sequence", "how": "rows"}),
        ("grpo", {"surrogate_mean": "fixed_length"}, {"how": "fixed_length"}),
        ("trial", ACTIVE, {"coefficient": 1.5}),
        *[
            ("grpo", {"importance_cap": 1.2, "importance_mode": mode}, {"cap": 1.2, "mode": mode})
            for mode in ("token_truncate", "sequence_mask")
        ],
    ],
)
def test_step_has_the_gradient_of_the_loop(method, own, of_loop, exact_learner, groups):
    """Passes of any size give the same gradient."""
    learner = exact_learner(method, **own)
    expected, saturated = loop_gradients(learner, groups, **of_loop)
    assert worst(gradients(learner, groups), expected) < 1e-12
    split = exact_learner(method, max_tokens_per_forward=60, **own)
    assert worst(gradients(split, groups), expected) < 1e-12
    assert method == "grpo" or saturated == {False, True}


# --- passes that are not needed


def test_a_split_is_forwarded_twice_only_if_the_clamp_acts(exact_learner, groups):
    def forwarded(method, iteration=30, **training):
        learner = exact_learner(method, max_tokens_per_forward=60, **training)
        return int(update(learner, groups, iteration)["update"]["tokens_forwarded"])

    plain = forwarded("grpo")
    assert forwarded("trial", 1, hindsight_coeff=0.3, hindsight_start_iteration=2) == plain
    assert forwarded("trial", **ACTIVE | {"clamp_alpha": math.inf}) == plain
    assert forwarded("trial", **ACTIVE) == 2 * plain


@pytest.mark.parametrize(("method", "own"), [("grpo", {}), ("trial", ACTIVE | {"clamp_alpha": 1e-9})])
def test_rollouts_without_a_gradient_get_no_backward_pass(method, own, exact_learner, monkeypatch):
    """Two of three groups have equal rewards, and TRIAL's saturated clamp removes the gradient of their dense term."""
    groups, passes, backward = new_groups(), [], torch.autograd.backward
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            trajectory.success |= number < 2
        for turn in turns_of([group]):
            turn.prompt_ids[0] = 10 + number  # prompts of a group share a prefix, so its rows are computed together
    monkeypatch.setattr(torch.autograd, "backward", lambda *given: passes.append(1) or backward(*given))

    def step(groups, tokens=60, **changed):
        passes.clear()
        own_terms = {"entropy_coeff": 0.0, "invalid_action_penalty": 0.0, "microbatch_rows": 1000, **own, **changed}
        learner = exact_learner(method, **own_terms, max_tokens_per_forward=tokens)
        return gradients(learner, groups), len(passes)

    result, needed = step(groups)
    assert worst(result, step(groups, 100_000)[0]) < 1e-12
    assert step(groups, entropy_coeff=0.001)[1] > 2 * needed  # with an entropy term all rows have a gradient
    zeros, last = step(groups[:2])
    assert (last, any(bool(gradient.any()) for gradient in zeros.values())) == (1, False)


@pytest.mark.parametrize("name", ["llama", "mistral"])  # in trees, padded
@pytest.mark.parametrize("method", ["grpo", "trial"])
def test_no_pass_has_more_inputs_than_allowed(name, method):
    limit, num_inputs = 300, []

    def forward_train(batch):
        """Compute nothing, and note the number of inputs of a pass with a gradient."""
        packed = batch["sequences"]
        if torch.is_grad_enabled():
            num_inputs.append(sum(pack.input_ids.numel() for pack in packed.packs))
        return dict(zip(("logprobs", "entropy"), torch.zeros(2, len(packed.tokens), requires_grad=True), strict=True))

    config = new_config(method).training(max_tokens_per_forward=limit)
    groups = synthetic_groups(VOCABULARY, num_groups=40, seed=1)
    rows = group_turn_rows(groups, config)
    rows.logprobs = rows.hindsight_logprobs = torch.zeros(int(rows.lengths.sum()))
    rows.weights = torch.ones(len(rows))
    module = SimpleNamespace(lm=random_model(name), teacher=None, sharded=None, forward_train=forward_train)
    passes = MicrobatchPasses(module, config.method_class(config), WeightedMeans())
    tokens = [[turn.num_tokens for turn in trajectory.turns] for group in groups for trajectory in group.completed]
    passes.backward(rows, plan_update(tokens, config, 1).steps[0], 1)
    assert max(num_inputs) <= limit < sum(num_inputs)


# --- other precision


def test_gradients_in_bfloat16_are_close_and_the_reference_is_the_policy(exact_learner, groups):
    def learner_of(**settings):
        return exact_learner("grpo", **{"ref_kl_coeff": 0.01, "model_dtype": "float32", **settings})

    expected = gradients(learner_of(), groups)
    half = learner_of(model_dtype="bfloat16")
    saving = learner_of(compute_dtype="bfloat16", gradient_checkpointing=True)
    for learner in (half, saving):
        assert worst(gradients(learner, groups), expected) < 0.1
    reference, policy = saving.policy_module.reference, saving.policy_module.lm
    assert policy.is_gradient_checkpointing
    assert saving.get_optimizer("default_policy").param_groups[0]["fused"]
    modules = reference.get_decoder().modules()
    assert {each.weight.dtype for each in modules if isinstance(each, torch.nn.Linear)} == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    with torch.no_grad(), saving.policy_module.autocast():
        ids = torch.arange(20, 60)[None]
        assert torch.equal(reference(input_ids=ids).logits, policy(input_ids=ids).logits)


# --- what must not be trained on


def aged(groups, *ages):
    """Return the groups with turns that weights of these ages sampled, in turns."""
    age = itertools.cycle(ages)
    return changed(groups, lambda *_: {"weight_version": VERSION - next(age)})


@pytest.mark.parametrize(
    ("ages", "reported", "max_diff"),
    [((0,), -5.0, None), ((0,), math.nan, None), ((1, 0), -5.0, None), ((1,), math.nan, 100.0)],
)
def test_responses_of_another_policy_are_not_trained_on(ages, reported, max_diff, exact_learner):
    groups = aged(new_groups(1), *ages)
    for turn in turns_of(groups):
        turn.logprobs[:] = reported
    learner = exact_learner("grpo", max_logprob_diff=max_diff, importance_cap=1.5)
    refuses(learner, groups, WeightSyncError, f"at most {max_diff or 0.001:g}", weight_version=VERSION)


def test_older_rows_may_differ_and_their_age_is_logged(exact_learner, groups):
    learner = exact_learner("grpo", max_logprob_diff=None, importance_cap=1.5)
    results = update(learner, aged(groups, 1, 2), weight_version=VERSION)
    engine, rows = ({name: float(value) for name, value in results[key].items()} for key in ("engine", "rows"))
    assert engine["logprob_diff"] == 0
    assert (rows["staleness_max"], rows["staleness_mean"]) == (2, pytest.approx(1.5, abs=0.1))
    assert 0 < engine["effective_sample_size"] < 1 < engine["ratio_max"]
