"""The recorded ALFWorld episodes, as (turn by turn) material for prompts and hindsight views."""

import json
import lzma
from functools import cache
from itertools import pairwise

from shared_data import GOLDEN

FILE = GOLDEN / "alfworld_episodes.jsonl.xz"


@cache
def alfworld_episodes() -> list[dict]:
    with lzma.open(FILE, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def turns(episode: dict):
    """For every decision: keyword arguments of ``PromptBuilder.build``, the action taken, and the step it led to."""
    steps = episode["steps"]
    task = steps[0]["observation"].split("Your task is to: ")[1].strip()
    history = []
    for number, (before, after) in enumerate(pairwise(steps), 1):
        prompt = {
            "task": task,
            "observation": before["observation"],
            "admissible_actions": before["admissible_commands"],
            "history": list(history),
            "step": number,
        }
        yield prompt, after["action"], after
        history.append((before["observation"], after["action"]))
