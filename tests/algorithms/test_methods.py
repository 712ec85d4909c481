"""Each method's loss and gradient, from trajectory groups to microbatches, against float64 loops: a table of cases."""

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

SEEDS = range(2)
TOLERANCE = 1e-12


def setting(name, values_of):
    """Return a preparation that sets an attribute of each turn."""

    def fill(turns):
        for turn, value in zip(turns, values_of(turns), strict=True):
            setattr(turn, name, value)

    return fill


weigh, own_advantages = partial(setting, "weight"), partial(setting, "advantage")


@dataclass
class Case:
    """A method, its loss as a loop, and the settings with which both are compared."""

    method: str
    loss: object = ref.grpo
    iteration: int = 30
    training: dict = field(default_factory=dict)
    prepare: object = lambda turns: None
    statistics: str = "trajectories"

    def __str__(self) -> str:
        return "-".join([self.method, str(self.iteration), *(f"{key}={value}" for key, value in self.training.items())])


def advantage_case(method, advantages, published, **settings):
    """Return a case of a method that differs in its advantages, with settings by the names of the loop and of the config."""
    training = {setting: settings[name] for name, setting in published.items() if name in settings}
    return Case(method, training=training, prepare=own_advantages(partial(advantages, **settings)))


def gigpo_cases():
    """Both released modes, with the released statistics over rows and with those over trajectories."""
    names = {"mode": "advantage_norm", "statistics": "advantage_statistics", "reward": "reward"}
    names |= {"coefficient": "step_coeff", "discount": "step_discount"}
    for mode, statistics, (coefficient, discount, reward) in itertools.product(
        ("mean_std_norm", "mean_norm"),
        ("trajectories", "rows"),
        ((1.0, 0.95, "success"), (0.3, 0.5, "score"), (1.0, 0.5, "return")),
    ):
        own = {"coefficient": coefficient, "discount": discount, "reward": reward}
        yield advantage_case("gigpo", ref.gigpo_advantages, names, mode=mode, statistics=statistics, **own)


def per_turn_cases():
    names = {"mode": "advantage_norm", "coefficient": "turn_coeff", "discount": "turn_discount"}
    for mode, (coefficient, discount) in itertools.product(
        ("mean_std_norm", "mean_norm"), ((1.0, 0.95), (0.3, 0.0), (2.0, 1.0))
    ):
        settings = {"mode": mode, "coefficient": coefficient, "discount": discount}
        case = advantage_case("grpo", ref.per_turn_advantages, names, **settings)
        case.training["reward"] = "per_turn"
        yield case


def agentopsd_cases():
    names = {"mix": "revision_mix", "bound": "revision_bound", "decay": "belief_decay"}
    for values in ((0.5, 0.2, 1.0), (1.0, 0.9, 0.95), (0.3, 0.2, 0.0)):
        yield advantage_case("agentopsd", ref.agentopsd_advantages, names, **dict(zip(names, values, strict=True)))


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


def trial(coefficient, alpha=1.0):
    return lambda turns: ref.trial(turns, coefficient, alpha)[0]


def trial_cases():
    """λ = 0.01 from iteration 25 on, as published, and larger λ, so that the clamp acts on both sides of its bound."""
    prepare = weigh(ref.relative_weights)
    for iteration, coefficient in ((24, 0.0), (25, 0.01)):
        yield Case("trial", trial(coefficient), iteration, prepare=prepare)
    for coefficient, alpha in ((0.3, 1.0), (2.0, 0.5), (2.0, 1e9)):
        training = {"hindsight_coeff": coefficient, "clamp_alpha": alpha}
        yield Case("trial", trial(coefficient, alpha), training=training, prepare=prepare)


def response_cases():
    """GSPO's ratio and the three means; the maximum response length is 512 tokens by default."""
    for level, how in itertools.product(("token", "sequence"), ("tokens", "rows", "fixed_length")):
        training = {"ratio_level": level, "surrogate_mean": how, "importance_cap": 2.0}
        yield Case("grpo", partial(ref.grpo, level=level, how=how), training=training, prepare=weigh_tokens)


CASES = [
    Case("grpo"),
    Case("grpo", training={"advantage_statistics": "rows"}, statistics="rows"),
    Case("grpo", partial(ref.grpo, dual=None), training={"dual_clip": None}),
    Case("grpo", partial(ref.grpo, clips=(0.9, 1.5)), training={"clip_low": 0.1, "clip_high": 0.5}),
    Case("grpo", partial(ref.grpo, kl=0.5), training={"ref_kl_coeff": 0.5}),
    Case("grpo", partial(ref.grpo, kl=0.0, entropy=0.2), training={"ref_kl_coeff": 0.0, "entropy_coeff": 0.2}),
    *response_cases(),
    *trial_cases(),
    Case(
        "uniform",
        trial(0.3),
        training={"hindsight_coeff": 0.3},
        prepare=weigh(lambda turns: [1.0] * len(turns)),
    ),
    *[
        Case("rlsd", partial(ref.rlsd, strength=strength), iteration)
        for iteration, strength in ((1, 0.495), (50, 0.25), (99, 0.005), (150, 0.0))
    ],
    *[
        Case("serl", partial(ref.serl, strength=strength), iteration)
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


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return (result.detach() - expected).abs().max().item() / (expected.abs().max().item() or 1.0)


def fill(update, case):
    for turn, advantage in zip(update.turns, ref.row_advantages(update.turns, case.statistics), strict=True):
        turn.advantage = advantage
    case.prepare(update.turns)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradient_equal_the_loops(case):
    for seed in SEEDS:
        update = random_update(seed)
        fill(update, case)
        losses, leaves = learner_losses(case.method, update, case.iteration, case.training)
        loop = reference_losses(update, case.loss)
        expected = [loop.detach(), *(reference_gradients(loop, update.tokens, name) for name in leaves)]
        results = [losses, *torch.autograd.grad(losses.sum(), list(leaves.values()))]
        assert max(map(relative_error, results, expected)) < TOLERANCE


def test_full_vocabulary_opsd_equals_its_definition():
    for seed in SEEDS:
        update = random_update(seed)
        views = Views(update, seed)
        losses, outputs = learner_losses("opsd", update, 30, {}, views)
        found = torch.autograd.grad(losses.sum(), (views.hidden, views.head.weight, outputs["logp"]))
        logits, teacher = views.hidden @ views.head.weight.T, views.teacher @ views.head.weight.detach().T
        for token, divergence in zip(update.tokens, ref.jsd(logits, teacher), strict=True):
            token.divergence = divergence
        expected = reference_losses(update, ref.opsd_jsd)
        wanted = (expected.detach(), *torch.autograd.grad(expected.sum(), (views.hidden, views.head.weight)))
        assert max(map(relative_error, (losses, *found), wanted)) < TOLERANCE
        assert found[2].eq(0).all()


def test_methods_without_a_clamp_are_computed_in_parts():
    clamped = {"trial", "uniform", "permuted"}
    methods = {name: new_config(name) for name in method_names()}
    assert {name for name, each in methods.items() if not each.method_class(each).adds_up(30)} == clamped


@pytest.mark.parametrize("seed", [None, 0, 2**32, -1])
def test_permuted_weights_follow_the_seed_and_the_iteration(seed):
    """Each turn of a trajectory gets another turn's weight, times a factor that restores the mean over the tokens."""
    update, drawn = random_update(2), {}  # whose weights in a trajectory differ
    for own, iteration in ((seed, 1), (seed, 1), (seed, 2), (5, 1)):
        config = new_config("permuted").debugging(seed=own)
        rows = scored_rows(update, config)
        config.method_class(config).prepare(rows, update.groups, iteration)
        assert torch.equal(drawn.setdefault((own, iteration), rows.weights), rows.weights)
        weights = list(zip(update.turns, ref.relative_weights(update.turns), rows.weights.tolist(), strict=True))
        for number in {turn.trajectory for turn in update.turns}:
            turns, before, after = zip(*(row for row in weights if row[0].trajectory == number), strict=True)
            ratios = [new / old for new, old in zip(sorted(after), sorted(before), strict=True)]
            assert ratios == pytest.approx([ratios[0]] * len(turns))
            assert len(turns) == 1 or not any(
                new == pytest.approx(ratios[0] * old) for new, old in zip(after, before, strict=True)
            )
            tokens = [len(turn.tokens) for turn in turns]
            assert sum(map(operator.mul, tokens, after)) == pytest.approx(sum(tokens))
    assert not any(torch.equal(first, second) for first, second in itertools.combinations(drawn.values(), 2))
