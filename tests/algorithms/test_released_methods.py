"""Settings, recipes and rival methods have the values and gradients of released code (tests/support/record_methods.py)."""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from trial_ray.algorithms.methods import new_config
from trial_ray.learner.loss import microbatch_loss
from trial_ray.learner.rows import TokenBatch, group_turn_rows
from trial_ray.objectives.divergences import generalised_jsd
from trial_ray.trajectory import TeacherContext, Trajectory, TrajectoryGroup, Turn

TESTS = Path(__file__).parents[1]
RECORD = json.loads(lzma.decompress((TESTS / "data" / "released_methods.json.xz").read_bytes()))
PAGE = (TESTS.parent / "docs" / "methods.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^- \*\*(.+?)\*\*.*?: `(\w+=.+?)`", PAGE, re.MULTILINE))
ITERATION = 30
PLAIN = {"reward_scale": 10.0, "ref_kl_coeff": 0.0, "entropy_coeff": 0.0}
ONE_TURN = {"reward": "score", "invalid_action_penalty": 0.0}
"""In updates of one turn, an invalid turn is a truncated one."""


def column(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def groups_of(update: dict) -> list[TrajectoryGroup]:
    """The rollouts of an update; a turn's response is the places of its tokens. A failed rollout sees a successful peer."""
    groups, ends = {}, np.cumsum(update["length"])
    solved = {group for group, score in zip(update["group"], update["score"], strict=True) if score == 1}
    for row, group in enumerate(update["group"]):
        score, rollout, valid = (update[name][row] for name in ("score", "rollout", "valid"))
        own = Trajectory("", "", 0, [], score == 1, score, "terminated" if score == 1 else "turn_limit")
        turn = Turn(
            response_ids=np.arange(ends[row] - update["length"][row], ends[row]),
            observation=str(update["observation"][row]),
            valid=bool(valid),
            finish_reason="stop" if valid else "length",
            teacher_context=TeacherContext(np.zeros(int(score < 1 and group in solved), np.int32), 0),
        )
        groups.setdefault(group, {}).setdefault(rollout, own).turns.append(turn)
    return [TrajectoryGroup("", list(rollouts.values())) for rollouts in groups.values()]


def require_equal(method: str, kind: str, case: str, **training) -> None:
    """Compare the loss, its gradient and the advantages of every token, in each recorded update.

    Groups of one turn are left out: in released code their advantage is R or NaN, here 0.
    """
    config = new_config(method).training(**PLAIN | training)
    config.check_update()
    for update in RECORD[kind]:
        released, groups = update["released"][case], groups_of(update)
        rule = config.env_runners(max_response_tokens=max(update["length"])).method_class(config)
        if config.drop_zero_variance_groups:
            groups = [group for group in groups if rule.advantages([group]).any()]
        rows = group_turn_rows(groups, config)
        places = torch.from_numpy(np.concatenate([turn.response_ids for turn in rows.turns]))
        rows.logprobs, rows.hindsight_logprobs = column(update["old"])[places], column(update["teacher"])[places]
        rule.prepare(rows, groups, ITERATION)
        tokens = TokenBatch.from_rows(rows, range(len(rows)), "cpu")
        leaf = column(update["current"]).requires_grad_()
        outputs = {"logprobs": leaf[places], "entropy": torch.zeros(len(places))}
        if "logits" in released:
            leaf = column(released["logits"]).requires_grad_()
            teacher = column(released["teacher_logits"])
            outputs["divergence"] = generalised_jsd(leaf, teacher, config.jsd_mix, config.jsd_temperature)
            torch.testing.assert_close(outputs["divergence"].detach(), column(released["trl"]), rtol=1e-6, atol=1e-6)
        loss, _ = microbatch_loss(rule, config, tokens, outputs, ITERATION)
        sizes = Counter(update["group"])
        alone = torch.tensor([sizes[group] == 1 for group in update["group"]])
        compared = ~alone.repeat_interleave(torch.tensor(update["length"]))
        pairs = [(torch.autograd.grad(loss, leaf)[0], column(released["gradient"]).view_as(leaf))]
        for values in map(column, released["advantages"]):
            ours = values.index_copy(0, places, rule.token_advantages(tokens, leaf.detach(), ITERATION))
            pairs.append((ours, values))
        pairs = [(ours[compared], theirs[compared]) for ours, theirs in pairs]
        if not alone.any():
            pairs.append((loss.detach(), column(released["loss"])))
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * max(1e-3, theirs.abs().max().item()))


ROWS = {"advantage_statistics": "rows"}
HGPO_BASE = {"advantage_norm": "mean_norm", "length_exponent": 0.5, "base_group": True, **ROWS}
DYADIC = {"step_discount": 0.5, "invalid_action_penalty": 0.125}
CASES = {
    "rloo": {"advantage_estimator": "rloo"},
    "max_rl": {"advantage_estimator": "max_rl"},
    "cispo": {"policy_loss": "cispo", "clip_high": 0.28},
    "sapo": {"policy_loss": "sapo", "surrogate_mean": "rows"},
    "sapo_trl": {"policy_loss": "sapo", "surrogate_mean": "rows"},
    "rloo_cispo": {"advantage_estimator": "rloo", "policy_loss": "cispo"},
    "hgpo_serl": DYADIC,
    "hgpo_serl_base": {**DYADIC, **HGPO_BASE},
    "hgpo_adrs": {"drop_zero_advantages": False},
    "hgpo_adrs_base": {"drop_zero_advantages": False, **HGPO_BASE},
    "g2po": ROWS,
    "g2po_mean": {"advantage_norm": "mean_norm", **ROWS},
    "adrs": {"shaping_bound": 0.02, **ROWS},
    "adrs_paper": {"standardise_in_group": False, **ROWS},
    "sdpo_sampled": {"divergence": "sampled"},
    "sdpo_reverse": {},
    "sdpo_jsd": {"jsd_mix": 0.5},
    # Without a reward only the self-distillation is left.
    "skill_sd": {
        "distillation_coeff": 1.0,
        "reward_scale": 1e-30,
        "advantage_norm": "mean_norm",
        "invalid_action_penalty": 0.0,
    },
}
HELD = {
    "DAPO": ("dapo", "dapo_trl"),
    "Dr. GRPO": ("dr_grpo", "dr_grpo_trl"),
    "GSPO": ("gspo", "gspo_trl"),
    "CISPO": ("minimax", "minimax_trl"),
    "REINFORCE++-baseline": ("reinforce",),
}
"""Released code that each recipe of docs/methods.md equals."""


@pytest.mark.parametrize("case", CASES)
def test_settings_and_rivals_equal_released_code(case):
    if case in RECORD["settings"][0]["released"]:
        require_equal("grpo", "settings", case, **ONE_TURN, **CASES[case])
    else:
        require_equal(case if case == "skill_sd" else case.partition("_")[0], "rivals", case, **CASES[case])


def test_recipes_equal_released_code():
    assert RECIPES.keys() == HELD.keys()
    for name, cases in HELD.items():
        for case in cases:
            require_equal("grpo", "settings", case, **ONE_TURN, **eval(f"dict({RECIPES[name]})"))
