"""Hostile and broken input is accepted or refused with a typed error (see also ``tests/runs/test_hostile_records.py``)."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from pathlib import Path

import gymnasium
import pytest
import torch
from hostile_input import TEXTS, VALUES, WORDS, changed_json, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nano_model import save_nano_model

from trial_envs.wrappers import ActionProjection, HistoryWindow, Recording, read_episodes
from trial_ray.algorithms import TRIALConfig
from trial_ray.learner.state import save_optimizers
from trial_ray.runs.checkpoints import (
    CHECKPOINT_MARK,
    MANIFEST,
    MODEL_INSIDE_CHECKPOINT,
    newest_whole_checkpoint,
    require_own,
    require_whole,
    write_manifest,
)
from trial_ray.runs.experiment import apply_overrides

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


MAX_EXAMPLES = int(os.environ.get("HOSTILE_EXAMPLES", "200"))
"""Maximum number of examples of a test; the numbers below are for a thorough run."""


def examples(number: int):
    return settings(
        max_examples=min(number, MAX_EXAMPLES),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


# -- settings


BASE = TRIALConfig().environment("trial/ALFWorld-v0", env_config={"split": "train"}).rl_module(model_path="some/model")
SETTINGS = sorted(name for name in vars(BASE) if not name.startswith("_"))
LITERALS = (
    VALUES.map(repr) | TEXTS | st.sampled_from(["1e999", "-0", "0x", "[" * 200, "{'a':", "9" * 5000, "nan", "()"])
)
KEYS = st.sampled_from(SETTINGS) | WORDS | st.tuples(st.sampled_from(SETTINGS), WORDS).map(".".join)


@examples(1300)
@given(assignments=st.lists(st.tuples(KEYS, LITERALS).map("=".join) | TEXTS, min_size=1, max_size=3))
def test_overrides(assignments):
    before = dict(vars(BASE))
    config = refused(lambda: apply_overrides(BASE, assignments))
    if isinstance(config, TRIALConfig):
        refused(config.validate, ValueError)  # RLlib raises ValueError
    assert vars(BASE) == before


# -- actions


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded") / "episodes.jsonl"
    made = {
        "home": gymnasium.make("trial/ALFWorld-v0", split="generated", difficulty="tiny", num_games=2, max_turns=50),
        "shop": gymnasium.make("trial/WebShop-v0", split="generated", num_products=30, num_games=2, max_turns=50),
        "game": gymnasium.make("trial/TextWorld-v0", level=1, num_games=1, max_turns=50),
    }
    wrapped = {name: Recording(HistoryWindow(ActionProjection(env)), path) for name, env in made.items()}
    yield {**wrapped, "path": path}
    for env in wrapped.values():
        env.close()


@pytest.mark.parametrize("name", ["home", "shop", "game"])
def test_actions(games, name):
    env = games[name]

    @examples(40)
    @given(
        actions=st.lists(
            st.tuples(TEXTS, st.sampled_from(["", "search[", "click[", "go to "])), min_size=10, max_size=10
        )
    )
    def play(actions):
        env.reset(seed=0)
        for action, verb in actions:
            text = f"<think>.</think><action>{verb}{action}{']' if verb.endswith('[') else ''}</action>"
            observation, reward, terminated, truncated, _ = env.step(text)
            assert isinstance(observation, str)
            assert math.isfinite(reward)
            if terminated or truncated:
                return

    play()
    env.reset(seed=0)
    env.step("<action>" + "x" * 1_000_000 + "</action>")
    env.reset(seed=0)  # reset writes the episode
    assert any(step.action and len(step.action) > 999_999 for step in list(read_episodes(games["path"]))[-1].steps)


# -- checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoints" / "000002"
    learner = folder / "learner_group" / "learner"
    save_nano_model(folder / MODEL_INSIDE_CHECKPOINT)
    (folder / CHECKPOINT_MARK).write_text(json.dumps({"type": "Algorithm"}))
    (folder / "algorithm_state.pkl").write_bytes(b"\x80\x05}\x94.")
    save_optimizers(optimizer(), 2, learner, sharded=False)
    write_manifest(folder)
    return folder


def optimizer():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    made = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(3)).sum().backward()
    made.step()
    return {"default": made}


def files_of(checkpoint):
    return sorted(path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())


def restored(checkpoint, folder):
    """Return a copy of a checkpoint as the newest of two."""
    shutil.copytree(checkpoint, folder / "000001", copy_function=os.link)
    shutil.copytree(checkpoint, folder / "000002")
    return folder / "000002"


def test_checkpoints_cut_at_every_boundary(checkpoint, tmp_path):
    """Truncate each file, with and without the files that are written after it."""
    files = files_of(checkpoint)
    for index, name in enumerate(files):
        size = (checkpoint / name).stat().st_size
        for end, unwritten in itertools.product({0, 1, size // 2, size - 1}, [[], files[index + 1 :]]):
            shutil.rmtree(tmp_path)
            newest = restored(checkpoint, tmp_path)
            (newest / name).write_bytes((checkpoint / name).read_bytes()[:end])
            for later in unwritten:
                (newest / later).unlink()
            found, damages = newest_whole_checkpoint(tmp_path)
            # Without its mark, the folder is no checkpoint; otherwise the damage is detected.
            same = name.name == MANIFEST and end == size - 1 and not unwritten  # only the final line break is missing
            assert found == tmp_path / ("000002" if same else "000001"), (name, end)
            assert same or damages or not (newest / CHECKPOINT_MARK).is_file(), (name, end)


@examples(500)
@given(data=st.data())
def test_manifests(tmp_path_factory, checkpoint, data):
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    folder = folder_of(tmp_path_factory, "manifest")
    newest = restored(checkpoint, folder)
    (newest / MANIFEST).write_bytes(json.dumps(changed := data.draw(changed_json(manifest))).encode())
    whole = refused(lambda: require_whole(newest))
    own = refused(lambda: require_own(newest))
    if changed != manifest:
        assert isinstance(whole, Exception) or isinstance(own, Exception)


def folder_of(tmp_path_factory, name: str) -> Path:
    """Return an empty folder."""
    folder = tmp_path_factory.getbasetemp() / f"case-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
