"""Tools make the commands of their environments, and their schemas describe all arguments."""

import pytest

from trial_envs.alfworld.families import FAMILIES
from trial_envs.alfworld.tool_env import ALFWorldToolEnv
from trial_envs.chat import user_message, with_task
from trial_envs.search_qa.tool_env import SearchQAToolEnv
from trial_envs.webshop.tool_env import WebShopToolEnv
from trial_envs.wrappers import Recording, read_episodes
from trial_ray.prompts.tool_calls import ToolSet


def call(env, command):
    """Call the tool of a command with the command's arguments."""
    name, arguments = ToolSet(type(env)).call_of(command)
    return getattr(env, name)(**arguments)


def test_every_family_is_won_by_tool_calls(tmp_path):
    env = ALFWorldToolEnv(split="generated", difficulty="official", families=FAMILIES)
    env._env = Recording(env._env, tmp_path / "episodes.jsonl")
    for task in range(len(FAMILIES)):
        first = env.reset(task=task, prompt=[])
        assert first.count("Your task is to: ") == 1
        assert {"inventory", "help"} & {*first.split("Actions: ")[1].split(", ")} == {"inventory"}
        walkthrough = env._env.unwrapped.walkthrough
        assert [call(env, command) for command in walkthrough][-1].endswith("The episode is over.")
        assert env.get_reward() == 1.0
        assert env.look() == "The episode is over."
        *_, episode = read_episodes(tmp_path / "episodes.jsonl")
        assert [step.action for step in episode.steps] == [None, *walkthrough]


def test_the_first_message_has_the_task_once():
    """ScienceWorld and board games of TextArena state the task only in ``info``."""
    info = {"task": "Boil water.", "admissible_actions": []}
    assert user_message(with_task("A kitchen.", info), info) == "Boil water.\n\nA kitchen."
    assert with_task("A kitchen. Boil water.", info) == "A kitchen. Boil water."


@pytest.mark.parametrize("tools", [WebShopToolEnv, SearchQAToolEnv])
def test_products_and_answers_are_found_by_tool_calls(tools, own_cache):
    env = tools(split="generated", difficulty="tiny", num_games=8)
    for task in range(8):
        env.reset(task=task)
        for action in env._env.unwrapped.walkthrough:
            call(env, action)
        assert env.get_reward() == 1.0


def test_the_arguments_of_every_tool_are_texts():
    for env, names in {
        ALFWorldToolEnv: "clean close cool examine go_to heat inventory look move open slice take use",
        WebShopToolEnv: "click search",
        SearchQAToolEnv: "answer search",
    }.items():
        tools = ToolSet(env)
        assert tools.names == names.split()
        for schema in tools.schemas:
            parameters = schema["function"]["parameters"]
            assert {each["type"] for each in parameters["properties"].values()} <= {"string"}
            assert parameters.get("required", []) == [*parameters["properties"]]
