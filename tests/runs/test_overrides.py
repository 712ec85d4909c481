"""``--set key=value``: types, nested keys, unknown keys; on an algorithm config and on a dataclass."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from rejections import misconfigured

from trial_ray import TRIALConfig
from trial_ray.errors import ConfigError
from trial_ray.runs.experiment import apply_overrides, override_dataclass

CONFIG = (
    TRIALConfig()
    .environment("trial/ALFWorld-v0", env_config={"split": "train", "num_games": 9})
    .rl_module(model_path="some/model")
    .engines(engine_kwargs={"dtype": "float32"})
)


def name_of(assignment):
    return re.split("[.=]", assignment)[0]


@pytest.mark.parametrize(
    ("assignment", "expected"),
    {
        "hindsight_coeff=1": 1.0,
        "engine='vllm'": "vllm",
        "model_path=123": "123",
        "dual_clip=none": None,
        "adam_betas=[0.9, 0.98]": (0.9, 0.98),
        "env_config.split=valid_seen": {"split": "valid_seen", "num_games": 9},
        # JSON and Python are both accepted, also mixed and for keys of unknown type.
        "engine_kwargs.dtype=None": {"dtype": None},
        "env_config={\"a\": true, 'b': [None, null, False]}": {"a": True, "b": [None, None, False]},
        "env_config.data=[1, two]": {"split": "train", "num_games": 9, "data": "[1, two]"},
        "clamp_alpha=1e400": math.inf,
        "sharding=none": "none",
    }.items(),
)
def test_values_have_the_type_of_their_setting(assignment, expected):
    value = getattr(apply_overrides(CONFIG, [assignment]), name_of(assignment))
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    "assignment",
    [
        "group_size=true",
        "seeded_sampling=1",
        "adam_betas=0.9",
        "env_config.num_games=many",
        "group_size.x=1",
        # JSON has no such type.
        "env_config={[1]: 2}",
        "sharding=None",
        # These numbers are not finite.
        "adam_betas=[0.9, 1e999]",
        "clamp_alpha=nan",
        'env_config={"a": [NaN]}',
        # An assignment needs a key and a value.
        "lr",
        "=3",
        "",
    ],
)
def test_other_types_are_refused(assignment):
    misconfigured(name_of(assignment) or None, apply_overrides, CONFIG, [assignment])


@pytest.mark.parametrize(
    ("assignment", "nearest"),
    {
        "hindsite_coeff=0.1": "hindsight_coeff",
        "env_config.spilt=train": "env_config.split",
        "engine_kwargs.dtyp=float32": "engine_kwargs.dtype",
    }.items(),
)
def test_errors_for_unknown_keys_name_the_nearest_key(assignment, nearest):
    misconfigured(f"Did you mean '{nearest}'", apply_overrides, CONFIG, [assignment])


def test_entries_are_added_to_a_dict():
    changed = apply_overrides(CONFIG, ["chat_template_kwargs.a=1", "chat_template_kwargs.b=2"])
    assert changed.chat_template_kwargs == {"a": 1, "b": 2}
    cloned = changed.rl_module(model_path=None, warm_start={"games": 3})
    assert apply_overrides(cloned, ["warm_start.seed=2"]).warm_start == {"games": 3, "seed": 2}
    misconfigured(r"Did you mean 'warm_start\.seed'", apply_overrides, cloned, ["warm_start.sed=2"])


def test_a_searched_value_can_be_fixed():
    searching = CONFIG.copy(copy_frozen=False).training(hindsight_coeff={"grid_search": [0.1, 0.2]})
    assert apply_overrides(searching, ["hindsight_coeff=0.3"]).hindsight_coeff == 0.3


@dataclass(frozen=True, slots=True)
class Settings:
    games: int = 5
    rate: float = 0.5
    model: str | None = None
    optimizer: Literal["muon", "adamw"] = "muon"
    env_config: Mapping[str, Any] = field(default_factory=lambda: {"difficulty": "tiny"})

    def __post_init__(self):
        if self.games < 1:
            raise ConfigError("games must be at least 1")


def test_dataclass_settings():
    changed = override_dataclass(
        Settings(), ["games=7", "rate=1", "model=x/y", "optimizer=adamw", "env_config.max_turns=9", "env_config.num=2"]
    )
    assert changed == Settings(7, 1.0, "x/y", "adamw", {"difficulty": "tiny", "max_turns": 9, "num": 2})


@pytest.mark.parametrize(
    ("assignment", "name"),
    {"game=3": "'games'", "games=many": "games", "games=0": "at least 1", "rate=1e400": "rate"}.items(),
)
def test_dataclass_settings_are_checked(assignment, name):
    misconfigured(name, override_dataclass, Settings(), [assignment])
