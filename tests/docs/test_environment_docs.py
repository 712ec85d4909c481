"""``docs/assets/views.txt`` shows prompts of real turns: they are rendered again and compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from third_party import ALFWORLD, WEBSHOP_1K

from trial_ray.adapters.registry import make_entries
from trial_ray.adapters.templates import PromptContext
from trial_ray.prompts.teacher_context import OUTCOME, outcome_view

ROOT = Path(__file__).parents[2]
VIEWS = ROOT / "docs" / "assets" / "views.txt"
BOOK = "look_at_obj_in_light-Book-None-DeskLamp-308/trial_T20190908_020029_636862"
SHOWN = [
    ("trial/ALFWorld-v0", {"split": "valid_unseen", "data": ALFWORLD}, BOOK, 3),
    ("trial/ALFWorld-v0", {"split": "valid_unseen", "data": ALFWORLD}, BOOK, 4),
    ("trial/WebShop-v0", {"split": "test", "data": WEBSHOP_1K}, "3", 1),
    ("trial/WebShop-v0", {"split": "test", "data": WEBSHOP_1K}, "3", 3),
]


def render_views(env_id: str, settings: dict, task: str, turn: int) -> tuple[str, str]:
    """The ordinary message of one turn of the walkthrough, and the evidence that its hindsight view adds."""
    (entry,) = make_entries([(env_id, settings, 1.0)])
    env = entry.make()
    try:
        observation, info = env.reset(options={"task": task})
        history: list[tuple[str, str]] = []
        for step, action in enumerate(env.unwrapped.walkthrough, 1):
            shown = PromptContext(info["task"], observation.strip(), info["admissible_actions"], history[-2:], step)
            answer, _, terminated, _, info = env.step(action)
            if step == turn:
                view = outcome_view(answer, terminal=terminated, success=info["won"])
                return entry.adapter.template("tagged").render(shown), OUTCOME.lead + view.text
            history.append((observation, action))
            observation = answer
    finally:
        env.close()
    raise AssertionError(f"the walkthrough has no turn {turn}")


@pytest.mark.data
@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: f"{shown[0]}, turn {shown[3]}")
def test_the_file_of_views_shows_them_as_they_are(shown):
    views = VIEWS.read_text(encoding="utf-8")
    ordinary, evidence = render_views(*shown)
    assert f"```text\n{ordinary}\n```" in views
    assert f"```text\n{evidence.lstrip()}\n```" in views
