"""Environment adapters: their check, their defaults, and their place in a config."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
from riddle_env import Curt, RiddleEnv
from user_env import registered

from trial_ray.adapters import EnvironmentAdapter, ReportLabels, WarmStartSpec
from trial_ray.adapters.adapter import begin
from trial_ray.adapters.external import GEM, REASONING_GYM, TEXTARENA, AnswerReader
from trial_ray.adapters.registry import find_adapter
from trial_ray.adapters.templates import PlainTemplate
from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.methods import new_config
from trial_ray.errors import ConfigError

ENV_ID = RiddleEnv.ENV_ID
OWN = EnvironmentAdapter(ENV_ID, templates={"plain": Curt()}, skills={"words": "spell it", "": "think first"})


class TaskLessSystem(Curt):
    """A conversation whose system message does not say the task, though its first message does."""

    style = "conversation"

    def system(self, task):
        return "play"


class FirstTask(Curt):
    """Shows the task in the first turn alone."""

    def render(self, context):
        return super().render(context) if context.step == 1 else context.observation


@pytest.fixture(autouse=True)
def environment():
    with registered(RiddleEnv):
        yield


def config_of(method="grpo", adapter=OWN):
    config = new_config(method).environment(ENV_ID, adapter=adapter).rl_module(model_path="some/model")
    return config.env_runners(prompt_style="plain")


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("templates", {"plain": "be nice"}, "template is 'be nice', expected an object with a style"),
        ("templates", {"tagged": PlainTemplate()}, "a template for 'plain' responses under 'tagged'"),
        ("templates", {"plain": FirstTask()}, "FirstTask of .* drops the task.*at step 2"),
        ("templates", {"conversation": Curt()}, r"template is Curt\(.*conversation also a system\(task\)"),
        ("templates", {"conversation": TaskLessSystem()}, "drops the task.*system message"),
        ("skills", {"words": "spell it"}, 'general advice in skills under the key ""'),
        ("success", float("nan"), "success = nan, expected a finite return"),
        ("score", 1.0, "score = 1.0, expected a function"),
        ("tools", "act", "tools = 'act', expected a subclass"),
        ("labels", ReportLabels([("take", "stealing")]), r"labels\.action_patterns = .*class out of acquisition"),
        (
            "warm_start",
            WarmStartSpec(demonstrator=partial(print, threading.Lock())),
            "cannot be sent to actors: warm_start cannot be pickled",
        ),
    ],
)
def test_an_unusable_adapter_is_refused_with_its_field(field, value, told):
    with pytest.raises(ConfigError, match=told):
        EnvironmentAdapter(ENV_ID, **{field: value}).check()


def test_a_config_checks_its_adapters():
    with pytest.raises(ConfigError, match="drops the task"):
        config_of(adapter=EnvironmentAdapter(ENV_ID, templates={"plain": FirstTask()})).validate()
    with pytest.raises(ConfigError, match="adapter is for 'mine/Other-v0', but the run plays mine/Riddle-v0"):
        config_of(adapter=EnvironmentAdapter("mine/Other-v0")).validate()
    with pytest.raises(ConfigError, match="adapter is 'mine', expected an EnvironmentAdapter"):
        config_of(adapter=["mine"])
    config_of().validate()


def test_the_skill_context_needs_advice():
    with pytest.raises(ConfigError, match=rf"{ENV_ID} has no 'skill' teacher context.*EnvironmentAdapter\(skills="):
        config_of("sdar", adapter=None).validate()
    config_of("sdar").validate()


def test_defaults_of_the_adapter_replace_defaults_of_the_config():
    assert GRPOConfig(algo_class=SimpleNamespace).build_algo(env="trial/WebShop-v0").config.max_prompt_tokens == 4096
    assert GRPOConfig().env_runners(max_prompt_tokens=300).environment("trial/WebShop-v0").max_prompt_tokens == 300
    own = EnvironmentAdapter(ENV_ID, defaults={"prompt_style": "plain", "lr": 0.5})
    config = GRPOConfig().environment(ENV_ID, adapter=own)
    assert config.prompt_style == "plain"
    assert config.lr == 0.5
    with pytest.raises(ConfigError, match="mine/Riddle-v0 has a default for 'prompt_stile', which is not a setting"):
        GRPOConfig().environment(ENV_ID, adapter=EnvironmentAdapter(ENV_ID, defaults={"prompt_stile": "plain"}))


@pytest.mark.parametrize(
    "adapter", [GEM, REASONING_GYM, TEXTARENA, EnvironmentAdapter(ENV_ID)], ids=lambda each: each.name
)
def test_the_adapters_keep_the_case_of_actions(adapter):
    adapter.check()
    assert find_adapter(adapter.env_id) == adapter
    response = "<think>It is Bob.</think><action>[Bob]</action>"
    for style in ("tagged", "conversation"):
        assert adapter.template(style).project(response).action == "[Bob]"


def test_the_answer_is_read_again_in_every_episode():
    expert = AnswerReader()
    begin(expert, "1 + 2 =", "", 0, lambda: ("3",))
    assert expert.act("", ()) == "3"
    begin(expert, "Write a poem.", "", 0, lambda: ())
    with pytest.raises(ConfigError, match="no answer"):
        expert.act("", ())
