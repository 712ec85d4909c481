"""The check of an environment before any actor starts; an error names the environment and the missing requirement."""

import pytest
from faulty_env import CountingEnv
from riddle_env import Curt, RiddleEnv
from user_env import entry_of, registered

from trial_ray.adapters import EnvironmentAdapter
from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.startup import check_environment, list_tasks
from trial_ray.errors import ConfigError


def check(entry, style="plain", teacher_context=None):
    config = GRPOConfig().env_runners(prompt_style=style).training(teacher_context=teacher_context)
    check_environment(entry, entry.tasks(), config)


class ForgetfulTemplate(Curt):
    """Leaves long tasks out, which no made-up probe shows."""

    def render(self, context):
        return super().render(context) if len(context.task) < 13 else context.observation


class BrokenEnv(RiddleEnv):
    def step(self, action):
        raise OSError("motor broken")


class SeedlessEnv(RiddleEnv):
    """Ignores the seed of a reset."""

    def reset(self, **arguments):
        self.words = self.words[::-1]
        return super().reset(**arguments)


class ServedEnv(RiddleEnv):
    """Has a limit, as an environment on a server."""

    max_instances = 8


@pytest.mark.parametrize(
    ("entry", "needs", "told"),
    [
        (
            entry_of(RiddleEnv, {"told": ("task",)}),
            {},
            r"info of mine/Riddle-v0 lacks 'won', which reward='success' needs \(found task\).*success=",
        ),
        (entry_of(RiddleEnv), {"teacher_context": "solution"}, "'solution'.* but mine/Riddle-v0 has no `walkthrough`"),
        (
            entry_of(RiddleEnv, templates={"plain": ForgetfulTemplate()}),
            {},
            "ForgetfulTemplate of mine/Riddle-v0 drops the task: for the task 'guess the word'",
        ),
    ],
)
def test_a_missing_requirement_of_a_run_is_named(entry, needs, told):
    with pytest.raises(ConfigError, match=told):
        check(entry, **needs)


@pytest.mark.parametrize(("env_class", "warnings"), [(RiddleEnv, 0), (SeedlessEnv, 1)])
def test_a_reset_that_ignores_its_seed_causes_a_warning(env_class, warnings, caplog):
    check(entry_of(env_class, templates={"plain": Curt()}))
    told = ["differ in observation and admissible_actions" in record.message for record in caplog.records]
    assert told == [True] * warnings


@registered(ServedEnv)
def test_a_run_needs_as_many_sessions_as_parallel_episodes():
    config = GRPOConfig().environment(ServedEnv.ENV_ID).training(tasks_per_iteration=4, group_size=4)
    list_tasks(config.env_runners(num_env_runners=2, max_episodes_in_flight=4))
    with pytest.raises(ConfigError, match=r"16 episodes at once.* has 8 sessions"):
        list_tasks(config.env_runners(max_episodes_in_flight=128))
    list_tasks(config.training(tasks_per_iteration=2))  # which never has more to play
    with pytest.raises(ConfigError, match="256 episodes"):
        list_tasks(config.evaluation(evaluation_split="test"))


def test_keys_of_later_turns_are_not_required_without_known_actions():
    check(entry_of(RiddleEnv, {"told": ("task",)}), style="tools")


def test_an_error_of_the_environment_names_its_line():
    with pytest.raises(ConfigError, match="turn 1: OSError: motor broken") as caught:
        check(entry_of(BrokenEnv))
    assert caught.value.__notes__ == [f"in {__file__}, line {BrokenEnv.step.__code__.co_firstlineno + 1}"]


@registered(RiddleEnv, CountingEnv)
def test_every_environment_of_a_mixture_is_checked_in_the_driver():
    config = GRPOConfig().environment(
        environments=[(CountingEnv.ENV_ID, {}, 1.0), (RiddleEnv.ENV_ID, {"told": ()}, 1.0)]
    )
    with pytest.raises(ConfigError, match="info of mine/Riddle-v0 lacks 'won'"):
        list_tasks(config)
    list_tasks(config.environment(adapter=EnvironmentAdapter(RiddleEnv.ENV_ID, success=1.0)))
