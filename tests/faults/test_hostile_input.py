"""Settings of any text are accepted or refused with a typed error (see also ``tests/runs/test_hostile_records.py``)."""

import os

import pytest
from hostile_input import TEXTS, VALUES, WORDS, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from trial_ray import TRIALConfig
from trial_ray.runs.experiment import apply_overrides

pytestmark = pytest.mark.timeout(600)

BASE = TRIALConfig().environment("trial/ALFWorld-v0", env_config={"split": "train"}).rl_module(model_path="some/model")
SETTINGS = sorted(name for name in vars(BASE) if not name.startswith("_"))
LITERALS = (
    VALUES.map(repr) | TEXTS | st.sampled_from(["1e999", "-0", "0x", "[" * 200, "{'a':", "9" * 5000, "nan", "()"])
)
KEYS = st.sampled_from(SETTINGS) | WORDS | st.tuples(st.sampled_from(SETTINGS), WORDS).map(".".join)


@settings(max_examples=int(os.environ.get("HOSTILE_EXAMPLES", "200")))
@given(assignments=st.lists(st.tuples(KEYS, LITERALS).map("=".join) | TEXTS, min_size=1, max_size=3))
def test_overrides(assignments):
    before = dict(vars(BASE))
    config = refused(lambda: apply_overrides(BASE, assignments))
    if isinstance(config, TRIALConfig):
        refused(config.validate, ValueError)  # RLlib raises ValueError
    assert vars(BASE) == before
