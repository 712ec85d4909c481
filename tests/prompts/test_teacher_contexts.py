"""What the second views show: the fact, the advice or the solution that a method asks for, and nothing of another turn."""

from dataclasses import replace

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer
from prompt_games import shown, writer_of
from synthetic_groups import synthetic_groups

from trial_ray import GRPOConfig
from trial_ray.adapters import alfworld
from trial_ray.errors import ConfigError
from trial_ray.learner.rows import scored_turn
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

QWEN = chat_tokenizer("qwen3")
OUTCOME_OF_TURN = "You move the mug 1 to the shelf 1."
SOLUTION, PEER = ("go to desk 1", "take mug 1 from desk 1"), ("go to bed 1", "take mug 1 from bed 1")


def won(turn, solution=SOLUTION):
    return Trajectory("1", "pick_and_place_simple", 0, [turn], success=True, ended="terminated", solution=solution)


def view_of(view, outcome=OUTCOME_OF_TURN, solution=SOLUTION, skills=alfworld.SKILLS, peer=PEER):
    adapter = replace(alfworld.ADAPTER, skills=skills)
    return teacher_text(view, won(Turn(outcome=outcome), solution), 0, adapter, peer)


VIEWS = {
    "outcome": "{message}\n\nOutcome after the reply:\n{text}{opening}",
    "feedback": "{message}\n\nThe environment's immediate answer to this step:\n{text}\n\nNow solve the task as it should be "
    "solved.\n{opening}",
    "skill": "[Privileged advice on tasks of this kind]\n{text}\n\n{message}{opening}",
    "solution": "{message}\n\nA solution of this task for reference, as actions from its beginning:\n{text}\n\nSee why each of "
    "its steps is taken, then reach the same end by a reasoning of your own.\n{opening}",
    "peer": "{message}\n\nThe actions of another attempt at this task, which succeeded:\n{text}\n{opening}",
}


@pytest.mark.parametrize(("view", "expected"), VIEWS.items())
def test_every_view_has_its_methods_lead_and_place(view, expected):
    prompt = writer_of(QWEN).write(shown("You see a mug."), ())
    turn = Turn(prompt.ids, np.array([1], np.int32), insert_at=prompt.insert_at, outcome=OUTCOME_OF_TURN)
    peer = replace(won(turn), turns=[Turn(action=action) for action in PEER])
    group = TrajectoryGroup("1", [replace(won(turn), success=view != "peer"), peer])
    config = GRPOConfig().environment("trial/ALFWorld-v0").training(teacher_context=view)
    add_teacher_contexts(group, config, QWEN)
    (turn,) = group.trajectories[0].turns
    message, opening = map(QWEN.decode, np.split(prompt.ids, [prompt.insert_at]))
    hindsight = QWEN.decode(scored_turn(turn, hindsight=True).ids[:-1])
    assert hindsight == expected.format(text=view_of(view).text, message=message, opening=opening)
    assert np.array_equal(scored_turn(turn).ids[:-1], prompt.ids)


@pytest.mark.parametrize("view", VIEWS)
def test_what_says_what_a_view_is_survives_a_cut(view):
    long = " ".join(f"shelf {index}" for index in range(500))
    found = view_of(view, long, (long,), {"": long}, (long,))
    ids = encode_teacher_text(found, QWEN, limit := 160)
    text = QWEN.decode(ids)
    assert len(ids) == limit
    assert text.startswith(found.frame.lead + "shelf 0")
    assert " [cut] " in text
    assert text.endswith((" 499" if view != "outcome" else "succeeded.") + found.frame.close)
    least = limit - require_room(found.frame, QWEN, limit)
    assert len(encode_teacher_text(found, QWEN, least + 1)) == least + 1
    with pytest.raises(ConfigError, match=f"max_outcome_tokens is {least}, expected more than {least}:"):
        encode_teacher_text(found, QWEN, least)


def test_a_failed_rollout_is_shown_the_first_that_succeeded():
    (group,) = synthetic_groups(num_groups=1)
    lost, broken, first, second = group.trajectories
    for place, trajectory in enumerate(group.trajectories):
        trajectory.success = place > 0
        trajectory.turns = [Turn(action=f"{place}.{index}") for index in range(2)]
    broken.ended = "failed"
    assert [group.peer_actions(each) for each in (lost, first, second)] == [("2.0", "2.1"), (), ()]
    first.success = second.success = False
    assert group.peer_actions(lost) == ()


def test_only_a_terminal_turn_carries_its_consequence():
    assert view_of("feedback").text == OUTCOME_OF_TURN, "the answer alone"
    assert outcome_text("You pick it up.\n", terminal=False, success=False) == TeacherText("You pick it up.")
    for outcome, success, expected in (
        ("You move it.", True, "You move it.\nThe episode ended: the task succeeded."),
        ("You move it.", False, "You move it.\nThe episode ended: the task failed."),
        ("", True, "The episode ended: the task succeeded."),
    ):
        assert outcome_text(outcome, terminal=True, success=success).text == expected


def test_special_tokens_in_an_outcome_stay_text():
    view = outcome_text(" ".join(QWEN.all_special_tokens), terminal=False, success=False)
    ids = encode_teacher_text(view, QWEN)
    assert not set(ids.tolist()) & set(QWEN.all_special_ids)
    assert QWEN.decode(ids) == OUTCOME.lead + view.text


def test_a_view_with_nothing_to_show_is_empty_or_refused():
    assert view_of("solution").text == "go to desk 1, take mug 1 from desk 1"
    for view in ("feedback", "peer"):
        assert encode_teacher_text(view_of(view, " \n", peer=()), QWEN).tolist() == []
    for view, lack in (("solution", "walkthrough"), ("skill", "advice")):
        with pytest.raises(ConfigError, match=rf"{lack}.*trial/ALFWorld-v0 has none"):
            view_of(view, solution=(), skills=None)
