"""What the second views show: the fact, the advice or the solution that a method asks for, and nothing of another turn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from chat_tokenizers import MODELS, chat_tokenizer
from synthetic_groups import synthetic_groups

from trial_ray.adapters import alfworld
from trial_ray.algorithms import GRPOConfig
from trial_ray.errors import ConfigError
from trial_ray.learner.rows import TurnRows
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.prompts.teacher_context import (
    OUTCOME,
    TeacherText,
    add_teacher_contexts,
    encode_teacher_text,
    outcome_text,
    require_room,
    teacher_text,
)
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn

FAMILY, OUTCOME_OF_TURN = "pick_and_place_simple", "You move the mug 1 to the shelf 1."
SOLUTION, PEER = ("go to desk 1", "take mug 1 from desk 1"), ("go to bed 1", "take mug 1 from bed 1")


def won(turn: Turn, solution=SOLUTION) -> Trajectory:
    return Trajectory("1", FAMILY, 0, [turn], success=True, ended="terminated", solution=solution)


def shown(view, outcome=OUTCOME_OF_TURN, solution=SOLUTION, skills=alfworld.SKILLS, peer=PEER) -> TeacherText:
    adapter = replace(alfworld.ADAPTER, skills=skills)
    return teacher_text(view, won(Turn(outcome=outcome), solution), 0, adapter, peer)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        ("outcome", "{message}\n\nOutcome after the reply:\n{text}{opening}"),
        (
            "feedback",
            "{message}\n\nThe environment's immediate answer to this step:\n{text}\n\nNow solve the task as it should be solved.\n"
            "{opening}",
        ),
        ("skill", "[Privileged advice on tasks of this kind]\n{text}\n\n{message}{opening}"),
        (
            "solution",
            "{message}\n\nA solution of this task for reference, as actions from its beginning:\n{text}\n\nSee why each of its "
            "steps is taken, then reach the same end by a reasoning of your own.\n{opening}",
        ),
        ("peer", "{message}\n\nThe actions of another attempt at this task, which succeeded:\n{text}\n{opening}"),
    ],
)
@pytest.mark.parametrize("model", ["qwen3", "tiny"])
def test_every_view_has_its_methods_lead_and_place(model, view, expected):
    tokenizer = chat_tokenizer(model)
    builder = PromptBuilder(tokenizer, alfworld.ADAPTER.template("tagged"), max_prompt_tokens=4096)
    prompt = builder.build(
        task="put a mug", observation="You see a mug.", admissible_actions=["look"], history=[], step=1
    )
    turn = Turn(prompt.ids, np.array([1], np.int32), insert_at=prompt.insert_at, outcome=OUTCOME_OF_TURN)
    group = TrajectoryGroup("1", [won(turn)])
    if view == "peer":
        group.trajectories = [
            replace(won(turn), success=False),
            replace(won(turn), turns=[Turn(action=action) for action in PEER]),
        ]
    config = GRPOConfig().environment("trial/ALFWorld-v0").training(teacher_context=view)
    add_teacher_contexts(group, config, tokenizer)
    rows = TurnRows(group.trajectories[0].turns, torch.zeros(1, dtype=torch.int64), torch.zeros(1))
    (row,) = rows.sequences([0], hindsight=True)
    parts = {"message": prompt.ids[: prompt.insert_at], "opening": prompt.ids[prompt.insert_at :]}
    texts = {name: tokenizer.decode(ids) for name, ids in parts.items()}
    assert tokenizer.decode(row.ids[:-1]) == expected.format(text=shown(view).text, **texts)
    (ordinary,) = rows.sequences([0])
    assert np.array_equal(ordinary.ids[:-1], prompt.ids)


@pytest.mark.parametrize("view", ["outcome", "feedback", "skill", "solution", "peer"])
def test_what_says_what_a_view_is_survives_a_cut(view):
    tokenizer = chat_tokenizer("qwen3")
    long = " ".join(f"shelf {index}" for index in range(500))
    found = shown(view, long, (long,), {"": long}, (long,))
    ids = encode_teacher_text(found, tokenizer, limit := 160)
    text = tokenizer.decode(ids)
    assert len(ids) == limit
    assert text.startswith(found.frame.lead + "shelf 0")
    assert " [cut] " in text
    assert text.endswith((" 499" if view != "outcome" else "succeeded.") + found.frame.close)
    least = limit - require_room(found.frame, tokenizer, limit)
    assert len(encode_teacher_text(found, tokenizer, least + 1)) == least + 1
    with pytest.raises(ConfigError, match=f"max_outcome_tokens is {least}, expected more than {least}:"):
        encode_teacher_text(found, tokenizer, least)


@pytest.mark.parametrize("view", ["feedback", "peer"])
def test_nothing_to_show_adds_nothing_to_the_prompt(view):
    assert encode_teacher_text(shown(view, " \n", peer=()), chat_tokenizer("qwen3")).tolist() == []


def test_a_failed_rollout_is_shown_the_first_that_succeeded():
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=4)
    lost, broken, first, second = group.trajectories
    for place, trajectory in enumerate(group.trajectories):
        trajectory.success = place > 0
        trajectory.turns = [replace(turn, action=f"{place}.{index}") for index, turn in enumerate(trajectory.turns)]
    broken.ended = "failed"
    assert group.peer_actions(lost) == tuple(f"2.{index}" for index in range(len(first.turns)))
    assert group.peer_actions(first) == group.peer_actions(second) == ()
    first.success = second.success = False
    assert group.peer_actions(lost) == ()


def test_the_solution_view_lists_the_actions_and_needs_some():
    assert shown("solution").text == "go to desk 1, take mug 1 from desk 1"
    with pytest.raises(ConfigError, match=r"`walkthrough`.*trial/ALFWorld-v0 has none"):
        shown("solution", solution=())


def test_only_a_terminal_turn_carries_its_consequence():
    ongoing = outcome_text("You pick up the apple 1.\n", terminal=False, success=False)
    assert ongoing == TeacherText("You pick up the apple 1.")
    won = outcome_text("You move it.", terminal=True, success=True).text
    lost = outcome_text("You move it.", terminal=True, success=False).text
    assert won == "You move it.\nThe episode ended: the task succeeded."
    assert lost == "You move it.\nThe episode ended: the task failed."
    assert outcome_text("", terminal=True, success=True).text == "The episode ended: the task succeeded."
    assert shown("feedback").text == OUTCOME_OF_TURN, "the answer alone"


@pytest.mark.parametrize("model", MODELS)
def test_special_tokens_in_an_outcome_stay_text(model):
    tokenizer = chat_tokenizer(model)
    specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    view = outcome_text(" ".join(specials), terminal=False, success=False)
    ids = encode_teacher_text(view, tokenizer)
    assert not set(ids.tolist()) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == OUTCOME.lead + view.text
