"""The prompts in ``docs/assets/views.txt`` are those of real turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from third_party import ALFWORLD, WEBSHOP_1K

from trial_ray.adapters.registry import make_entries
from trial_ray.adapters.templates import PromptContext
from trial_ray.prompts.teacher_context import OUTCOME, outcome_text

VIEWS = (Path(__file__).parents[2] / "docs" / "assets" / "views.txt").read_text(encoding="utf-8")
BOOK = "look_at_obj_in_light-Book-None-DeskLamp-308/trial_T20190908_020029_636862"


@pytest.mark.data
@pytest.mark.parametrize(
    ("env_id", "settings", "task", "turns"),
    [
        ("trial/ALFWorld-v0", {"split": "valid_unseen", "data": ALFWORLD}, BOOK, (3, 4)),
        ("trial/WebShop-v0", {"split": "test", "data": WEBSHOP_1K}, "3", (1, 3)),
    ],
)
def test_views_are_those_of_real_turns(env_id, settings, task, turns):
    (entry,) = make_entries([(env_id, settings, 1.0)])
    env = entry.make()
    observation, info = env.reset(options={"task": task})
    history: list[tuple[str, str]] = []
    for step, action in enumerate(env.unwrapped.walkthrough, 1):
        context = PromptContext(info["task"], observation.strip(), info["admissible_actions"], history[-2:], step)
        answer, _, terminated, _, info = env.step(action)
        if step in turns:
            hindsight = OUTCOME.lead + outcome_text(answer, terminal=terminated, success=info["won"]).text
            for text in (entry.adapter.template("tagged").render(context), hindsight.lstrip()):
                assert f"```text\n{text}\n```" in VIEWS
        history.append((observation, action))
        observation = answer
    env.close()
