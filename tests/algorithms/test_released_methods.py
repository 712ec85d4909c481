"""Settings, recipes and rival methods have the values and gradients of released code (tests/support/record_methods.py)."""

import itertools
import json
import lzma
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from snippets import DOCS

from trial_ray.algorithms.methods import new_config
from trial_ray.learner.loss import microbatch_loss
from trial_ray.learner.rows import TokenBatch, group_turn_rows
from trial_ray.objectives.divergences import generalised_jsd
from trial_ray.sweeps import study as studies
from trial_ray.trajectory import TeacherContext, Trajectory, TrajectoryGroup, Turn

RECORD = json.loads(lzma.decompress((Path(__file__).parents[1] / "data/released_methods.json.xz").read_bytes()))
PAGE = (DOCS / "methods.md").read_text(encoding="utf-8")
ITERATION = 30
PLAIN = {"reward_scale": 10.0, "ref_kl_coeff": 0.0, "entropy_coeff": 0.0}
ONE_TURN = {"reward": "score", "invalid_action_penalty": 0.0}
"""In updates of one turn, an invalid turn is a truncated one."""


def column(values):
    return torch.tensor(values, dtype=torch.float64)


def groups_of(update):
    """The rollouts of an update; a turn's response is the places of its tokens. A failed rollout sees a successful peer."""
    groups, ends = {}, np.cumsum(update["length"])
    solved = {group for group, score in zip(update["group"], update["score"], strict=True) if score == 1}
    for row, group in enumerate(update["group"]):
        score, rollout, valid, length = (update[name][row] for name in ("score", "rollout", "valid", "length"))
        own = Trajectory("", "", 0, [], score == 1, score, "terminated" if score == 1 else "turn_limit")
        turn = Turn(
            response_ids=np.arange(ends[row] - length, ends[row]),
            observation=str(update["observation"][row]),
            valid=bool(valid),
            finish_reason="stop" if valid else "length",
            teacher_context=TeacherContext(np.zeros(int(score < 1 and group in solved)), 0),
        )
        groups.setdefault(group, {}).setdefault(rollout, own).turns.append(turn)
    return [TrajectoryGroup("", list(rollouts.values())) for rollouts in groups.values()]


ROWS = {"advantage_statistics": "rows"}
MEAN = {"advantage_norm": "mean_norm", **ROWS}
CASES = {
    "rloo": {"advantage_estimator": "rloo"},
    "max_rl": {"advantage_estimator": "max_rl"},
    "cispo": {"policy_loss": "cispo", "clip_high": 0.28},
    "sapo": {"policy_loss": "sapo", "surrogate_mean": "rows"},
    "hgpo-serl": {},
    "hgpo-adrs": {"drop_zero_advantages": False},
    "hgpo-base": {"drop_zero_advantages": False, "length_exponent": 0.5, "base_group": True, **MEAN},
    "g2po": ROWS,
    "g2po-mean": MEAN,
    "adrs": {"shaping_bound": 0.02, **ROWS},
    "adrs-paper": {"standardise_in_group": False, **ROWS},
    "sdpo-sampled": {"divergence": "sampled"},
    "sdpo": {},
    "sdpo-jsd": {"jsd_mix": 0.5},
    "opsd": {"jsd_mix": 0.9, "jsd_temperature": 0.7},
    "opd": {"teacher_model": "another"},
    # A reward of almost 0 leaves only the self-distillation in the loss of Skill-SD.
    "skill_sd": {
        "distillation_coeff": 1.0,
        "reward_scale": 1e-30,
        "advantage_norm": "mean_norm",
        "invalid_action_penalty": 0.0,
    },
}
RECIPE_CASES = {
    "DAPO": "dapo",
    "Dr. GRPO": "dr_grpo",
    "GSPO": "gspo",
    "CISPO": "minimax",
    "REINFORCE++-baseline": "reinforce",
}
RECIPES = {
    name: eval(f"dict({settings})")
    for name, settings in re.findall(r"^- \*\*(.+?)\*\*.*?: `(\w+=.+?)`", PAGE, re.MULTILINE)
}
CASES |= {RECIPE_CASES[name]: settings for name, settings in RECIPES.items()}


def test_league_plays_the_recipes_of_the_page():
    # Groups that are drawn again would give DAPO more rollouts than the others.
    played = RECIPES | {"RLOO": CASES["rloo"], "DAPO": RECIPES["DAPO"] | {"max_refills": 0}}
    assert all(played[name] == settings for name, settings in studies.RECIPES.values())


@pytest.mark.parametrize("case", CASES)
def test_settings_recipes_and_rivals_equal_released_code(case):
    """The loss, its gradient and the advantages of every token are equal in each recorded update.

    Groups of one turn are left out: in released code their advantage is R or NaN, here 0.
    """
    is_setting = case in RECORD["settings"][0]["released"]
    kind, method, extra = ("settings", "grpo", ONE_TURN) if is_setting else ("rivals", case.partition("-")[0], {})
    config = new_config(method).training(**PLAIN | extra | CASES[case])
    config.check_update()
    names = RECORD[kind][0]["released"].keys() & {case, f"{case}_trl"}
    for name, update in itertools.product(names, RECORD[kind]):
        released, groups = update["released"][name], groups_of(update)
        rule = config.env_runners(max_response_tokens=max(update["length"])).method_class(config)
        if config.drop_zero_variance_groups:
            groups = [group for group in groups if rule.advantages([group]).any()]
        rows = group_turn_rows(groups, config)
        places = torch.from_numpy(np.concatenate([turn.response_ids for turn in rows.turns]))
        rows.logprobs, rows.hindsight_logprobs = column(update["old"])[places], column(update["teacher"])[places]
        rule.prepare(rows, groups, ITERATION)
        tokens = TokenBatch.from_rows(rows, range(len(rows)), "cpu")
        leaf = column(released.get("current", update["current"])).requires_grad_()
        outputs = {"logprobs": leaf[places], "entropy": torch.zeros(len(places))}
        if "logits" in released:
            leaf = column(released["logits"]).requires_grad_()
            teacher = column(released["teacher_logits"])
            outputs["divergence"] = generalised_jsd(leaf, teacher, config.jsd_mix, config.jsd_temperature)
            torch.testing.assert_close(
                outputs["divergence"].detach(), column(released["divergences"]), rtol=0, atol=1e-6
            )
        loss, _ = microbatch_loss(rule, tokens, outputs, ITERATION)
        sizes = Counter(update["group"])
        compared = torch.from_numpy(np.repeat([sizes[group] > 1 for group in update["group"]], update["length"]))
        pairs = [(torch.autograd.grad(loss, leaf)[0], column(released["gradient"]).view_as(leaf))]
        for values in map(column, released.get("advantages", [])):
            ours = values.index_copy(0, places, rule.token_advantages(tokens, leaf.detach(), ITERATION))
            pairs.append((ours, values))
        pairs = [(ours[compared], theirs[compared]) for ours, theirs in pairs]
        if compared.all():
            pairs.append((loss.detach(), column(released["loss"])))
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * max(1e-3, theirs.abs().max().item()))
