"""Each method's loss and gradient, from trajectory groups to microbatches, against ragged float64 loops."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import method_reference as ref
import pytest
import torch
from method_updates import (
    Views,
    learner_losses,
    random_update,
    reference_gradients,
    reference_losses,
)

from trial_ray.algorithms.methods import method_names, new_config
from trial_ray.learner.connectors import group_turn_rows

SEEDS = range(4)
TOLERANCE = 1e-12
DOCS = Path(__file__).parents[2] / "docs"


def weigh(weights_of):
    def fill(turns):
        for turn, weight in zip(turns, weights_of(turns), strict=True):
            turn.weight = weight

    return fill


def gigpo_cases():
    """Both released modes, with the released statistics over rows and with those over trajectories."""
    for mode, statistics, (coefficient, discount) in itertools.product(
        ("mean_std_norm", "mean_norm"), ("trajectories", "rows"), ((1.0, 0.95), (0.3, 0.5))
    ):
        training = {"advantage_norm": mode, "advantage_statistics": statistics}
        training |= {"step_coeff": coefficient, "step_discount": discount}

        def advantages(turns, mode=mode, statistics=statistics, coefficient=coefficient, discount=discount):
            found = ref.gigpo_advantages(turns, mode, statistics, coefficient, discount)
            for turn, advantage in zip(turns, found, strict=True):
                turn.advantage = advantage

        yield Case("gigpo", ref.grpo, training=training, prepare=advantages)


def valued_weights(turns):
    return ref.relative_weights(turns, ref.anchor_means(turns, ref.discounted_successes(turns, 0.95)))


def weigh_tokens(turns):
    """By importance weights below, at and above 1."""
    for turn in turns:
        for place, token in enumerate(turn.tokens):
            token.importance = 0.5 * place


@dataclass
class Case:
    method: str
    loss: object
    iteration: int = 30
    training: dict = field(default_factory=dict)
    prepare: object = lambda turns: None
    statistics: str = "trajectories"

    def __str__(self) -> str:
        return "-".join([self.method, str(self.iteration), *(f"{key}={value}" for key, value in self.training.items())])


def trial_cases(method, prepare):
    """λ = 0.01 from iteration 25 on, as published; larger ones so that the clamp is met on both sides of its bound."""
    uniform = {"method": method, "prepare": prepare}
    for iteration, coefficient in ((1, 0.0), (24, 0.0), (25, 0.01), (150, 0.01)):
        yield Case(loss=lambda turns, c=coefficient: ref.trial(turns, c)[0], iteration=iteration, **uniform)
    for coefficient, alpha in ((0.3, 1.0), (2.0, 0.5), (2.0, 1e9)):
        training = {"hindsight_coeff": coefficient, "clamp_alpha": alpha}
        loss = lambda turns, c=coefficient, a=alpha: ref.trial(turns, c, a)[0]  # noqa: E731
        yield Case(loss=loss, training=training, **uniform)


def response_cases():
    """GSPO's ratio and the three means; the longest response is one of 512 tokens, the default limit."""
    for level, how in itertools.product(("token", "sequence"), ("tokens", "rows", "fixed_length")):
        loss = lambda turns, level=level, how=how: ref.by_response(turns, level, how, 512)  # noqa: E731
        training = {"ratio_level": level, "surrogate_mean": how, "importance_cap": 2.0}
        yield Case("grpo", loss, training=training, prepare=weigh_tokens)


CASES = [
    Case("grpo", ref.grpo),
    Case("grpo", ref.grpo, training={"advantage_statistics": "rows"}, statistics="rows"),
    Case("grpo", lambda turns: ref.grpo(turns, dual=None), training={"dual_clip": None}),
    Case("grpo", lambda turns: ref.grpo(turns, kl=0.5), training={"kl_coeff": 0.5}),
    Case("grpo", lambda turns: ref.grpo(turns, kl=0.0, entropy=0.2), training={"kl_coeff": 0.0, "entropy_coeff": 0.2}),
    Case("grpo", ref.grpo, training={"importance_cap": 2.0}, prepare=weigh_tokens),
    *response_cases(),
    *trial_cases("trial", weigh(ref.relative_weights)),
    *trial_cases("uniform", weigh(lambda turns: [1.0] * len(turns))),
    *[
        Case(
            "permuted",
            lambda turns: ref.trial(turns, 0.3)[0],
            iteration,
            {"hindsight_coeff": 0.3},
            weigh(lambda turns, iteration=iteration: ref.permuted_weights(turns, 3, iteration)),
        )
        for iteration in (25, 26)
    ],
    Case(
        "trial",
        lambda turns: ref.trial(turns, 0.3)[0],
        training={"value_weighting": True, "hindsight_coeff": 0.3},
        prepare=weigh(valued_weights),
    ),
    *[
        Case("rlsd", lambda turns, s=strength: ref.rlsd(turns, s), iteration)
        for iteration, strength in ((1, 0.495), (50, 0.25), (99, 0.005), (100, 0.0), (150, 0.0))
    ],
    *[
        Case("serl", lambda turns, s=strength: ref.serl(turns, s), iteration)
        for iteration, strength in ((1, 0.5), (26, 0.25), (50, 0.01), (51, 0.0), (150, 0.0))
    ],
    Case("sdar", ref.sdar),
    Case("grpo_opsd", ref.grpo_opsd),
    Case("opsd", ref.opsd_sampled, training={"divergence": "sampled"}),
    *gigpo_cases(),
]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.abs().max().item()
    return (found.detach() - expected).abs().max().item() / scale if scale else found.detach().abs().max().item()


def report(case: str, worst: dict[str, float]) -> None:
    print(case, *(f"{name} {error:.1e}" for name, error in worst.items()))  # shown by pytest -rP
    assert max(worst.values()) < TOLERANCE, worst


def fill(update, case):
    for turn, advantage in zip(update.turns, ref.row_advantages(update.turns, case.statistics), strict=True):
        turn.advantage = advantage
    case.prepare(update.turns)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradient_equal_the_loops(case):
    worst = {"loss": 0.0, "logp": 0.0, "entropy": 0.0}
    for seed in SEEDS:
        update = random_update(seed)
        fill(update, case)
        losses, outputs, _ = learner_losses(case.method, update, case.iteration, case.training)
        expected = reference_losses(update, case.loss)
        worst["loss"] = max(worst["loss"], relative_error(losses, expected.detach()))
        for name, leaf in (("logp", outputs["logprobs"]), ("entropy", outputs["entropy"])):
            (found,) = torch.autograd.grad(losses.sum(), leaf, retain_graph=True)
            worst[name] = max(worst[name], relative_error(found, reference_gradients(expected, update.tokens, name)))
    report(str(case), worst)


def test_full_vocabulary_opsd_equals_the_loops_in_hidden_states_and_head():
    worst = {"loss": 0.0, "hidden": 0.0, "head": 0.0}
    for seed in SEEDS:
        update = random_update(seed)
        views = Views(update, seed)
        losses, outputs, _ = learner_losses("opsd", update, 30, {}, views)
        found = torch.autograd.grad(losses.sum(), (views.hidden, views.weight, outputs["logprobs"]))
        hidden, weight = ([_scalars(row) for row in leaf] for leaf in (views.hidden, views.weight))
        for token, states, privileged in zip(update.tokens, hidden, views.teacher.tolist(), strict=True):
            logits = [sum(w * s for w, s in zip(row, states, strict=True)) for row in weight]
            teacher = [sum(w.detach() * p for w, p in zip(row, privileged, strict=True)) for row in weight]
            token.divergence = ref.jsd(logits, teacher)
        expected = reference_losses(update, ref.opsd_jsd)
        worst["loss"] = max(worst["loss"], relative_error(losses, expected.detach()))
        for name, leaves, gradient in (("hidden", hidden, found[0]), ("head", weight, found[1])):
            exact = torch.autograd.grad(expected.sum(), [each for row in leaves for each in row], retain_graph=True)
            worst[name] = max(worst[name], relative_error(gradient.reshape(-1), torch.stack(exact)))
        assert found[2].eq(0).all()
    report("opsd-jsd", worst)


def _scalars(row: torch.Tensor) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in row.tolist()]


def test_the_updates_meet_both_sides_of_every_bound():
    """Else the comparison above would leave a branch of some formula out."""
    seen = {name: set() for name in ("sign", "ratio", "dual", "gap", "k3", "saturated", "anchored", "rescaling")}
    for seed in SEEDS:
        update = random_update(seed)
        fill(update, Case("trial", None, prepare=weigh(ref.relative_weights)))
        plain = ref.row_advantages(update.turns, "trajectories")
        joint = ref.gigpo_advantages(update.turns, "mean_std_norm", "trajectories")
        seen["anchored"] |= {one != other for one, other in zip(plain, joint, strict=True)}
        for turn in update.turns:
            seen["sign"].add((turn.advantage > 0) - (turn.advantage < 0))
            for t in turn.tokens:
                ratio = torch.exp(t.logp - t.old).item()
                seen["ratio"].add((ratio > 1.2) - (ratio < 0.8))
                seen["dual"].add(turn.advantage < 0 and ratio > 3)
                seen["gap"].add((t.teacher - t.here > 2) - (t.teacher - t.here < -2))
                seen["k3"].add(ref.k3(t).item() >= 10)
                seen["rescaling"].add(abs(t.teacher - t.old) < 0.18)
        for coefficient in (0.01, 2.0):
            reference_losses(update, lambda turns, c=coefficient: _note(seen["saturated"], ref.trial(turns, c)))
    assert all(seen[name] == {-1, 0, 1} for name in ("sign", "ratio", "gap")), seen
    assert all(seen[name] == {False, True} for name in ("dual", "k3", "saturated", "anchored", "rescaling")), seen


def _note(seen, result):
    loss, saturated = result
    seen.add(saturated)
    return loss


@pytest.mark.parametrize("seed", [None, 0, 2**32 - 1, 2**32, 2**80, -1])
def test_weights_are_permuted_by_any_seed_and_by_each_in_its_own_way(seed):
    update = random_update(0)
    drawn = {}
    for own, iteration in ((seed, 1), (seed, 1), (seed, 2), (5, 1)):
        config = new_config("permuted").debugging(seed=own)
        rows = group_turn_rows(update.groups, config)
        rows.logprobs, rows.hindsight_logprobs = update.column("old"), update.column("teacher")
        config.method_class(config).prepare(rows, update.groups, iteration)
        same = drawn.setdefault((own, iteration), rows.weights)
        assert torch.equal(same, rows.weights)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(drawn.values(), 2))


def test_gigpos_advantages_do_not_depend_on_the_scale_of_the_reward():
    """Both terms are normalised, so that ω alone says how the step term counts beside the episode's."""
    update, found = random_update(0), []
    for scale in (1.0, 10.0, 1000.0):
        config = new_config("gigpo").training(reward_scale=scale, invalid_action_penalty=0.0)
        rows = group_turn_rows(update.groups, config)
        config.method_class(config).prepare(rows, update.groups, 1)
        found.append(rows.advantages)
    assert found[0].abs().max() > 0.5
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("method", method_names())
def test_every_logged_metric_is_documented(method):
    update = random_update(2)
    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    views = Views(update) if method == "opsd" else None
    _, _, logged = learner_losses(method, update, 1, {}, views)
    assert not [name for name in logged if f"`{name}`" not in page]
