"""A setting is declared once, and what is read from the declaration: methods, help, checks, tables."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import pytest
from ray import tune
from rejections import misconfigured

from trial_ray import TRIALConfig
from trial_ray.config.declare import Section, Settings, check_settings, fields_of, set_defaults, setting


class BoxSettings(Settings):
    side: float = setting(2.0, "length of a side, in metres", above=0)
    load: float = setting(2.0, above=0, infinite=True)
    count: int = setting(1, at_least=1)
    lid: bool = setting(False)
    share: float | None = setting(0.5, "what is full", within=(0, 1))
    wood: str = setting("oak", one_of=("oak", "pine"))
    lock: Literal["key", "code"] | None = setting(None)
    sizes: tuple[int, int] = setting((1, 2))
    labels: dict[str, str] = setting(factory=dict)
    anything: object = setting(3)

    box = Section("Set the box.")


class Box(BoxSettings):
    def __init__(self):
        set_defaults(self)


def test_every_instance_has_its_own_values():
    first, second = Box(), Box()
    assert vars(first).keys() == fields_of(Box).keys()
    first.labels["top"] = "fragile"
    assert second.labels == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"side": np.float32(1)},
        {"load": float("inf")},
        {"share": None},
        {"sizes": [1, 2]},
        {"anything": "whatever"},
        {"side": tune.uniform(1, 2)},
        {"side": {"grid_search": [1, 2]}},
        {"labels": {"a": "b"}},
    ],
)
def test_values_that_fit(settings):
    check_settings(Box().box(**settings))


@pytest.mark.parametrize(
    ("message", "settings"),
    {
        "side is 0, expected a float above 0.": {"side": 0},
        "side is nan, expected a float above 0.": {"side": float("nan")},
        "side is inf, expected a finite float above 0.": {"side": float("inf")},
        "side is True, expected a float above 0.": {"side": True},
        "count is 1.0, expected an int of at least 1.": {"count": 1.0},
        "lid is 1, expected a bool.": {"lid": 1},
        "share is 2, expected a float in [0, 1], or None.": {"share": 2},
        "wood is 'fir', expected one of 'oak', 'pine'.": {"wood": "fir"},
        "lock is 'bolt', expected one of 'key', 'code', or None.": {"lock": "bolt"},
        "expected a dict[str, str].": {"labels": []},
    }.items(),
)
def test_other_values_are_refused_with_what_was_found_and_what_is_expected(settings, message):
    misconfigured(re.escape(message), check_settings, Box().box(**settings))


class Crate(Box):
    side: float = setting(5.0)
    share: float | None = setting(0.1, "how much is full", within=(0, 0.5))


def test_a_new_default_keeps_documentation_and_range():
    check_settings(Crate())
    for settings, found in (({"side": 0}, "a float above 0"), ({"share": 0.6}, r"a float in \[0, 0.5\]")):
        misconfigured(f"expected {found}", check_settings, Crate().box(**settings))
    assert (Crate().side, Box().side) == (5.0, 2.0)
    assert "side: length of a side, in metres." in Crate.box.__doc__
    assert "share: how much is full." in Crate.box.__doc__


def test_declarations_that_could_not_be_set_are_refused():
    misconfigured(r"side needs its type: write `side: TYPE = setting\(DEFAULT\)`", type, "Wrong", (Box,), {"side": 1.0})
    for kind, told in (("float", "depth has no default"), ("Depth", "'Depth' is not defined")):
        misconfigured(told, type, "Wrong", (Box,), {"__annotations__": {"depth": kind}, "__module__": __name__})


# --- the training configs


def test_training_takes_rllibs_settings_and_refuses_unknown_ones():
    config = TRIALConfig().training(lr=0.1, hindsight_coeff=0.2, num_epochs=2)
    assert (config.lr, config.hindsight_coeff, config.num_epochs) == (0.1, 0.2, 2)
    for keyword, told in {
        "hindsite_coeff": r"TRIALConfig\.training\(\) has no setting 'hindsite_coeff'\. Did you mean 'hindsight_coeff'",
        "grad_clop": "Did you mean 'grad_clip'",
        "num_engines": r"It is set by \.engines\(num_engines=\.\.\.\)",
    }.items():
        misconfigured(told, config.training, lr=0.5, **{keyword: 1})
    assert config.lr == 0.1
    misconfigured(r"no setting 'split'\. Did you mean 'evaluation_split'", config.evaluation, split="valid_seen")
