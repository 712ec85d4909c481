"""Each method's loss and gradient, from trajectory groups to microbatches, against ragged float64 loops."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from functools import partial

import method_reference as ref
import pytest
import torch
from method_updates import (
    Views,
    learner_losses,
    random_update,
    reference_gradients,
    reference_losses,
    scored_rows,
)

from trial_ray.algorithms.methods import method_names, new_config

SEEDS = range(4)
TOLERANCE = 1e-12


def setting(name, values_of):
    """A preparation that gives the turns something."""

    def fill(turns):
        for turn, value in zip(turns, values_of(turns), strict=True):
            setattr(turn, name, value)

    return fill


weigh, own_advantages = partial(setting, "weight"), partial(setting, "advantage")


def gigpo_cases():
    """Both released modes, with the released statistics over rows and with those over trajectories."""
    for mode, statistics, (coefficient, discount, reward) in itertools.product(
        ("mean_std_norm", "mean_norm"),
        ("trajectories", "rows"),
        ((1.0, 0.95, "success"), (0.3, 0.5, "score"), (1.0, 0.5, "return")),
    ):
        training = {"advantage_norm": mode, "advantage_statistics": statistics, "reward": reward}
        training |= {"step_coeff": coefficient, "step_discount": discount}
        own = {
            "mode": mode,
            "statistics": statistics,
            "coefficient": coefficient,
            "discount": discount,
            "reward": reward,
        }
        yield Case("gigpo", training=training, prepare=own_advantages(partial(ref.gigpo_advantages, **own)))


def per_turn_cases():
    for mode, (coefficient, discount) in itertools.product(
        ("mean_std_norm", "mean_norm"), ((1.0, 0.95), (0.3, 0.0), (2.0, 1.0))
    ):
        training = {"reward": "per_turn", "advantage_norm": mode}
        training |= {"turn_coeff": coefficient, "turn_discount": discount}
        advantages = partial(ref.per_turn_advantages, mode=mode, coefficient=coefficient, discount=discount)
        yield Case("grpo", training=training, prepare=own_advantages(advantages))


def agentopsd_cases():
    for mix, bound, decay in ((0.5, 0.2, 1.0), (1.0, 0.9, 0.95), (0.3, 0.2, 0.0)):
        training = {"revision_mix": mix, "revision_bound": bound, "belief_decay": decay}
        advantages = partial(ref.agentopsd_advantages, mix=mix, bound=bound, decay=decay)
        yield Case("agentopsd", training=training, prepare=own_advantages(advantages))


def stepopsd_cases():
    """λ of the first iteration is a step below 0.2, as released."""
    for iteration, strength in ((1, 0.196), (25, 0.1), (150, 0.0)):
        factors = weigh(partial(ref.step_factors, strength=strength))
        yield Case("stepopsd", partial(ref.stepopsd, strength=strength), iteration, prepare=factors)


def weigh_tokens(turns):
    """By importance weights below, at and above 1."""
    for turn in turns:
        for place, token in enumerate(turn.tokens):
            token.importance = 0.5 * place


@dataclass
class Case:
    method: str
    loss: object = ref.grpo
    iteration: int = 30
    training: dict = field(default_factory=dict)
    prepare: object = lambda turns: None
    statistics: str = "trajectories"

    def __str__(self) -> str:
        return "-".join([self.method, str(self.iteration), *(f"{key}={value}" for key, value in self.training.items())])


def trial_cases():
    """λ = 0.01 from iteration 25 on, as published; larger ones so that the clamp is met on both sides of its bound."""
    prepare = weigh(ref.relative_weights)
    for iteration, coefficient in ((24, 0.0), (25, 0.01)):
        yield Case("trial", lambda turns, c=coefficient: ref.trial(turns, c)[0], iteration, prepare=prepare)
    for coefficient, alpha in ((0.3, 1.0), (2.0, 0.5), (2.0, 1e9)):
        training = {"hindsight_coeff": coefficient, "clamp_alpha": alpha}
        loss = lambda turns, c=coefficient, a=alpha: ref.trial(turns, c, a)[0]  # noqa: E731
        yield Case("trial", loss, training=training, prepare=prepare)


def response_cases():
    """GSPO's ratio and the three means; the longest response is one of 512 tokens, the default limit."""
    for level, how in itertools.product(("token", "sequence"), ("tokens", "rows", "fixed_length")):
        loss = lambda turns, level=level, how=how: ref.by_response(turns, level, how, 512)  # noqa: E731
        training = {"ratio_level": level, "surrogate_mean": how, "importance_cap": 2.0}
        yield Case("grpo", loss, training=training, prepare=weigh_tokens)


CASES = [
    Case("grpo"),
    Case("grpo", training={"advantage_statistics": "rows"}, statistics="rows"),
    Case("grpo", lambda turns: ref.grpo(turns, dual=None), training={"dual_clip": None}),
    Case("grpo", lambda turns: ref.grpo(turns, clips=(0.9, 1.5)), training={"clip_low": 0.1, "clip_high": 0.5}),
    Case("grpo", lambda turns: ref.grpo(turns, kl=0.5), training={"ref_kl_coeff": 0.5}),
    Case(
        "grpo", lambda turns: ref.grpo(turns, kl=0.0, entropy=0.2), training={"ref_kl_coeff": 0.0, "entropy_coeff": 0.2}
    ),
    Case("grpo", training={"importance_cap": 2.0}, prepare=weigh_tokens),
    *response_cases(),
    *trial_cases(),
    Case(
        "uniform",
        lambda turns: ref.trial(turns, 0.3)[0],
        training={"hindsight_coeff": 0.3},
        prepare=weigh(lambda turns: [1.0] * len(turns)),
    ),
    *[
        Case("rlsd", lambda turns, s=strength: ref.rlsd(turns, s), iteration)
        for iteration, strength in ((1, 0.495), (50, 0.25), (99, 0.005), (150, 0.0))
    ],
    *[
        Case("serl", lambda turns, s=strength: ref.serl(turns, s), iteration)
        for iteration, strength in ((1, 0.5), (26, 0.25), (50, 0.01), (150, 0.0))
    ],
    Case("sdar", ref.sdar),
    Case("grpo_opsd", ref.grpo_opsd),
    Case("opsd", ref.opsd_sampled, training={"divergence": "sampled"}),
    *gigpo_cases(),
    *per_turn_cases(),
    *agentopsd_cases(),
    *stepopsd_cases(),
]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.abs().max().item()
    return (found.detach() - expected).abs().max().item() / scale if scale else found.detach().abs().max().item()


def fill(update, case):
    for turn, advantage in zip(update.turns, ref.row_advantages(update.turns, case.statistics), strict=True):
        turn.advantage = advantage
    case.prepare(update.turns)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradient_equal_the_loops(case):
    for seed in SEEDS:
        update = random_update(seed)
        fill(update, case)
        losses, outputs = learner_losses(case.method, update, case.iteration, case.training)
        expected = reference_losses(update, case.loss)
        wanted = [expected.detach(), *(reference_gradients(expected, update.tokens, name) for name in outputs)]
        found = [losses, *torch.autograd.grad(losses.sum(), list(outputs.values()))]
        assert max(map(relative_error, found, wanted)) < TOLERANCE


def test_full_vocabulary_opsd_equals_the_definition_in_hidden_states_and_head():
    for seed in SEEDS:
        update = random_update(seed)
        views = Views(update, seed)
        losses, outputs = learner_losses("opsd", update, 30, {}, views)
        found = torch.autograd.grad(losses.sum(), (views.hidden, views.weight, outputs["logp"]))
        logits, teacher = views.hidden @ views.weight.T, views.teacher @ views.weight.detach().T
        for token, divergence in zip(update.tokens, ref.jsd(logits, teacher), strict=True):
            token.divergence = divergence
        expected = reference_losses(update, ref.opsd_jsd)
        wanted = (expected.detach(), *torch.autograd.grad(expected.sum(), (views.hidden, views.weight)))
        assert max(map(relative_error, (losses, *found), wanted)) < TOLERANCE
        assert found[2].eq(0).all()


def test_methods_without_a_clamp_are_computed_in_parts():
    clamped = {"trial", "uniform", "permuted"}
    methods = {name: new_config(name) for name in method_names()}
    assert {name for name, each in methods.items() if not each.method_class(each).adds_up(30)} == clamped


@pytest.mark.parametrize("seed", [None, 0, 2**32, -1])
def test_weights_are_permuted_by_any_seed_and_by_each_in_its_own_way(seed):
    """Each turn of a trajectory takes the weight of another one; then the mean over its tokens is restored."""
    update = random_update(0)
    drawn = {}
    for own, iteration in ((seed, 1), (seed, 1), (seed, 2), (5, 1)):
        config = new_config("permuted").debugging(seed=own)
        rows = scored_rows(update, config)
        config.method_class(config).prepare(rows, update.groups, iteration)
        same = drawn.setdefault((own, iteration), rows.weights)
        assert torch.equal(same, rows.weights)
        own_weights, places = ref.relative_weights(update.turns), rows.weights.tolist()
        for number in {turn.trajectory for turn in update.turns}:
            of = [place for place, turn in enumerate(update.turns) if turn.trajectory == number]
            dealt, kept = ([values[place] for place in of] for values in (places, own_weights))
            ratios = [new / old for new, old in zip(sorted(dealt), sorted(kept), strict=True)]
            assert ratios == pytest.approx([ratios[0]] * len(of))
            assert len(of) == 1 or all(
                new != pytest.approx(ratios[0] * old) for new, old in zip(dealt, kept, strict=True)
            )
            tokens = [len(update.turns[place].tokens) for place in of]
            assert sum(map(operator.mul, tokens, dealt)) == pytest.approx(sum(tokens))
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(drawn.values(), 2))
