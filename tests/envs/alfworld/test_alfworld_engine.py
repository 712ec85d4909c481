"""The engine repeats recordings of the stock engine, also in several threads."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from recordings import alfworld_episodes
from third_party import ALFWORLD

from trial_envs.alfworld.engine import AlfredEngine
from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.alfworld.families import FAMILIES
from trial_envs.alfworld.generator import generate, task_ids


@pytest.fixture(scope="module", autouse=True)
def module_cache(tmp_path_factory):
    """A cache folder for this module, in which the index of the release is written once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def chosen_episodes(origin: str) -> list[dict]:
    """Return all own episodes; of the published episodes, both of one game per family, with alternating splits."""
    episodes = alfworld_episodes(origin)
    if origin == "own":
        return episodes
    splits = ("train", "valid_seen", "valid_unseen")
    chosen = []
    for number, family in enumerate(FAMILIES):
        of_family = [e for e in episodes if e["family"] == family and e["split"] == splits[number % 3]]
        chosen += [e for e in of_family if e["trial"] == of_family[0]["trial"]]
    return chosen


def test_recorded_episodes_of_the_stock_engine_are_repeated(origin):
    episodes = chosen_episodes(origin)
    assert {episode["family"] for episode in episodes} == set(FAMILIES)
    assert len(episodes) >= 12
    environments = {}
    for episode in episodes:
        split = episode["split"]
        if split not in environments:
            environments[split] = ALFWorldEnv(split, data=ALFWORLD if origin == "published" else None)
        env = environments[split]
        for step in episode["steps"]:
            reward, terminated, truncated = 0.0, False, False
            if step["action"] is None:
                observation, info = env.reset(options={"task": f"{episode['name']}/{episode['trial']}"})
            else:
                observation, reward, terminated, truncated, info = env.step(step["action"])
            assert observation == step["observation"]
            assert info["admissible_actions"] == step["admissible_commands"]
            assert (info["won"], info["score"], reward) == (step["won"], float(step["score"] or 0), float(step["won"]))
            assert (terminated or truncated) == bool(step["done"])
        assert info["won"] == episode["won"]
        assert info["family"] == episode["family"]
    for env in environments.values():
        env.close()


def play(task_id: str, engine: AlfredEngine) -> list:
    rng = random.Random(task_id)
    engine.load(generate(task_id).text)
    state = engine.reset()
    history = [state]
    for _ in range(20):
        state = engine.step(rng.choice(state.admissible_commands))
        history.append(state)
    return history


def test_threads_take_turns_and_get_the_same_answers():
    def run(_: object) -> list:
        engine = AlfredEngine()
        found = [play(task_id, engine) for task_id in task_ids("tiny", 3, 3)]
        engine.close()
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(8))) == [run(None)] * 8
