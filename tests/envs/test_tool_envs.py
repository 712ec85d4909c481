"""Tools make the commands of their environments, and their schemas describe all arguments."""

import inspect
import re

import pytest
from transformers.utils import get_json_schema

from trial_envs.alfworld.families import FAMILIES
from trial_envs.alfworld.tool_env import ALFWorldToolEnv
from trial_envs.chat import user_message, with_task
from trial_envs.webshop.tool_env import WebShopToolEnv
from trial_envs.wrappers import Recording, read_episodes

COMMANDS = [
    (r"go to (.+)", "go_to"),
    (r"take (.+) from (.+)", "take"),
    (r"move (.+) to (.+)", "move"),
    (r"(open|close|use|examine) (.+)", None),
    (r"(heat|cool|clean|slice) (.+) with (.+)", None),
    (r"(look|inventory)", None),
    (r"search\[(.+)\]", "search"),
    (r"click\[(.+)\]", "click"),
]
ALFWORLD = {"split": "generated", "difficulty": "tiny", "num_games": 60}
SHOP = {"split": "generated", "difficulty": "tiny", "num_games": 10}


def call(env, command):
    """Call the tool of a command with the command's arguments."""
    for pattern, name in COMMANDS:
        if match := re.fullmatch(pattern, command):
            groups = match.groups()
            return getattr(env, name or groups[0])(*groups if name else groups[1:])
    raise AssertionError(f"no tool for {command!r}")


def test_every_family_is_won_by_tool_calls(tmp_path):
    env = ALFWorldToolEnv(**ALFWORLD | {"families": FAMILIES, "difficulty": "official"})
    env._env = Recording(env._env, tmp_path / "episodes.jsonl")
    for task in range(len(FAMILIES)):
        first = env.reset(task=task, prompt=[])
        assert first.count("Your task is to: ") == 1
        assert {"inventory", "help"} & {*first.split("Actions: ")[1].split(", ")} == {"inventory"}
        walkthrough = env._env.unwrapped.walkthrough
        answer = [call(env, command) for command in walkthrough][-1]
        assert answer.endswith("The episode is over.")
        assert env.get_reward() == 1.0
        assert env.look() == "The episode is over."
        *_, episode = read_episodes(tmp_path / "episodes.jsonl")
        assert [step.action for step in episode.steps] == [None, *walkthrough]


def test_the_first_message_has_the_task_once():
    """ScienceWorld and board games of TextArena state the task only in ``info``."""
    info = {"task": "Boil water.", "admissible_actions": []}
    assert user_message(with_task("A kitchen.", info), info) == "Boil water.\n\nA kitchen."
    assert with_task("A kitchen. Boil water.", info) == "A kitchen. Boil water."


def test_a_purchase_is_made_by_tool_calls():
    env = WebShopToolEnv(**SHOP)
    for task in range(5):
        env.reset(task=task)
        for action in env._env.unwrapped.walkthrough:
            call(env, action)
        assert env.get_reward() == env._env.unwrapped.purchase.reward.reward > 0.0


@pytest.mark.parametrize(
    ("env", "names"),
    [
        (ALFWorldToolEnv, "clean close cool examine go_to heat inventory look move open slice take use"),
        (WebShopToolEnv, "click search"),
    ],
)
def test_the_schemas_describe_every_argument(env, names):
    """TRL's trainer offers the public methods to the model, except these two; a schema needs all descriptions."""
    methods = dict(inspect.getmembers(env, predicate=inspect.isfunction))
    offered = {name: each for name, each in methods.items() if name[0] != "_" and name not in ("reset", "get_reward")}
    assert " ".join(sorted(offered)) == names
    for name, tool in offered.items():
        schema = get_json_schema(tool)["function"]
        assert (schema["name"], schema["return"]["type"]) == (name, "string")
        arguments = dict.fromkeys([*inspect.signature(tool).parameters][1:], "string")
        assert {name: each["type"] for name, each in schema["parameters"]["properties"].items()} == arguments
        assert schema["parameters"].get("required", []) == [*arguments]
