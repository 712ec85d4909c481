"""A prompt template and advice of the user's own: checked before anything starts, and taken wherever the config goes."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer
from own_texts import own_config
from ray import cloudpickle

from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.methods import new_config, with_method
from trial_ray.environments.templates import PlainTemplate, TaggedTemplate, describe_template
from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.evaluation.panel import Panel
from trial_ray.evaluation.panel_player import policy_protocol
from trial_ray.experiments.config_record import from_record, to_record
from trial_ray.hindsight.privileged_views import TurnContext, privileged_view
from trial_ray.learner.connectors import encode_views
from trial_ray.rollout.prompts import PromptBuilder
from trial_ray.rollout.trajectory import Trajectory, Turn

ENV_ID = "mine/Counting-v0"
SHOWN = {"task": "count", "observation": "You count: 0.", "admissible_actions": ["count"], "history": [], "step": 1}
ELSEWHERE = """
import sys
from ray import cloudpickle
with open(sys.argv[1], "rb") as file:
    config = cloudpickle.load(file)
config.validate()
from trial_ray.hindsight.privileged_views import TurnContext, privileged_view
from trial_ray.models.tokenizer import build_tokenizer
from trial_ray.learner.connectors import encode_views
from trial_ray.rollout.prompts import PromptBuilder
tokenizer = build_tokenizer()
builder = PromptBuilder.from_config(tokenizer, config)
prompt = builder.build(task="count", observation="You look.", admissible_actions=["look"], history=[], step=1)
context = TurnContext("mine/Counting-v0", "counting", "", False, False, skills=config.skills)
print("captain, choose one: look" in tokenizer.decode(prompt.ids), builder.template.project(" look ").action)
print(privileged_view("skill", context).text)
"""


@pytest.fixture
def own(tmp_path):
    return own_config(tmp_path)


def config_of(**rollouts) -> GRPOConfig:
    return GRPOConfig().environment(ENV_ID).policy(model_path="some/model").rollouts(**rollouts)


def test_prompts_and_advice_are_those_of_the_config(own):
    tokenizer = chat_tokenizer("tiny")
    own.validate()
    prompt = PromptBuilder.from_config(tokenizer, own).build(**SHOWN)
    assert "captain, choose one: count" in tokenizer.decode(prompt.ids)
    turn = Turn(*[np.zeros(1, np.int32)] * 3, 1, 0, "You count: 0.", "count", True, "You count: 1.", 0.0, "stop")
    for family, advice in {"counting": "count on", "dancing": "think first"}.items():
        (evidence,) = encode_views([Trajectory("one", family, 0, [turn])], own, tokenizer)
        assert tokenizer.decode(evidence).rstrip().endswith(advice)


def test_both_travel_by_value_to_where_the_experiment_file_is_not(own, tmp_path):
    payload = tmp_path / "config.pkl"
    payload.write_bytes(cloudpickle.dumps(own))
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, payload], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True look", "Advice for this kind of task: count on"]


def test_both_are_kept_by_copies_and_by_other_methods(own):
    for config in (own.copy(copy_frozen=False), with_method(own, "rlsd")):
        assert config.prompt_template.address == "captain"
        assert config.skills == {"counting": "count on", "": "think first"}
        config.validate()


@pytest.mark.parametrize(
    ("template", "style", "told"),
    [
        ("be nice", "plain", "prompt_template is 'be nice', expected an object with a style"),
        (PlainTemplate, "plain", "prompt_template is <class .*PlainTemplate'>, expected an object"),
        (PlainTemplate(), "tagged", "'plain' responses, but prompt_style is 'tagged'; set both alike"),
        (None, "json", "prompt_style is 'json', expected one of 'tagged', 'plain'"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template, style, told):
    with pytest.raises(ConfigError, match=told):
        config_of(prompt_template=template, prompt_style=style).validate()


def test_a_warm_start_clones_for_the_environments_own_template_alone():
    config = config_of(prompt_template=PlainTemplate(), prompt_style="plain").policy(model_path=None, warm_start={})
    with pytest.raises(ConfigError, match="leave one of them out"):
        config.validate()


@pytest.mark.parametrize(
    ("skills", "told"),
    [
        ("think", "skills is 'think', expected a dict"),
        ({"counting": "count on"}, 'needs general advice under the key ""'),
        ({"": ""}, "expected a family"),
        ({"": "think", "counting": None}, r"skills\['counting'\] is None"),
        ({"": "think", 3: "x"}, r"skills\[3\]"),
    ],
)
def test_advice_that_leaves_families_without_any_is_refused(skills, told):
    with pytest.raises(ConfigError, match=told):
        config_of().training(skills=skills).validate()


def test_the_skill_view_needs_advice_and_says_where_to_give_it():
    config = new_config("sdar").environment(ENV_ID).policy(model_path="some/model")
    with pytest.raises(ConfigError, match=rf"{ENV_ID} offers no 'skill' view.*training\(skills="):
        config.validate()
    config.training(skills={"": "think"}).validate()


def test_advice_of_the_config_replaces_that_of_the_environment():
    env = "trial/ALFWorld-v0"
    context = TurnContext(env, "pick_and_place_simple", "", False, False, skills={"": "think"})
    assert privileged_view("skill", context).text == "Advice for this kind of task: think"


def test_the_record_shows_both_and_is_not_read_as_if_there_were_no_template(own, tmp_path):
    record = json.loads(json.dumps(to_record(with_method(own, "sdar"))))
    assert record["settings"]["skills"] == {"counting": "count on", "": "think first"}
    assert record["settings"]["prompt_template"] == describe_template(own.prompt_template)
    with pytest.raises(CheckpointError, match=r"template of its own \(Curt"):
        from_record(record)
    plain = json.loads(json.dumps(to_record(config_of().training(skills={"": "think"}))))
    assert plain["settings"]["prompt_template"] is None
    assert from_record(plain).skills == {"": "think"}


def test_a_template_is_told_from_another_that_writes_other_words():
    first, again, other = TaggedTemplate("You count."), TaggedTemplate("You count."), TaggedTemplate("You sing.")
    assert describe_template(first) == describe_template(again) != describe_template(other)


def test_evaluations_with_different_templates_are_not_compared_as_equals():
    panel = Panel(ENV_ID, "train", ("one",))
    first, second = (policy_protocol(config_of(prompt_template=TaggedTemplate(role)), panel) for role in "ab")
    assert first != second
    assert "prompt_template" not in policy_protocol(config_of(), panel)  # what was recorded before stays comparable
