"""The engine repeats recordings of the stock engine, also in several threads."""

import random
from concurrent.futures import ThreadPoolExecutor

from recordings import alfworld_episodes
from third_party import ALFWORLD

from trial_envs.alfworld.engine import AlfredEngine
from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.alfworld.families import FAMILIES
from trial_envs.alfworld.games import OFFICIAL_SPLITS
from trial_envs.alfworld.generator import generate, task_ids


def chosen_episodes(origin):
    """Return all own episodes; of the published episodes, both of one game per family, with alternating splits."""
    episodes = alfworld_episodes(origin)
    if origin == "own":
        return episodes
    chosen = []
    for family, split in zip(FAMILIES, OFFICIAL_SPLITS[:3] * 2, strict=True):
        of_family = [episode for episode in episodes if (episode["family"], episode["split"]) == (family, split)]
        chosen += [episode for episode in of_family if episode["trial"] == of_family[0]["trial"]]
    return chosen


def test_recorded_episodes_of_the_stock_engine_are_repeated(origin):
    episodes = chosen_episodes(origin)
    assert {episode["family"] for episode in episodes} == set(FAMILIES)
    assert len(episodes) >= 12
    data = ALFWORLD if origin == "published" else None
    environments = {split: ALFWorldEnv(split, data) for split in {episode["split"] for episode in episodes}}
    for episode in episodes:
        env = environments[episode["split"]]
        first, *later = episode["steps"]
        observation, info = env.reset(options={"task": f"{episode['name']}/{episode['trial']}"})
        compare(first, observation, 0.0, False, False, info)
        for step in later:
            compare(step, *env.step(step["action"]))
        assert info["family"] == episode["family"]


def compare(step, observation, reward, terminated, truncated, info):
    assert observation == step["observation"]
    assert info["admissible_actions"] == step["admissible_commands"]
    assert info["won"] == step["won"]
    assert info["score"] == float(step["score"] or 0)
    assert reward == float(step["won"])
    assert (terminated or truncated) == bool(step["done"])


def play(task_id, engine):
    rng = random.Random(task_id)
    engine.load(generate(task_id).text)
    history = [engine.reset()]
    for _ in range(20):
        history.append(engine.step(rng.choice(history[-1].admissible_commands)))
    return history


def test_threads_take_turns_and_get_the_same_answers():
    def run(_):
        engine = AlfredEngine()
        found = [play(task_id, engine) for task_id in task_ids("tiny", 3, 3)]
        engine.close()
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(8))) == [run(None)] * 8
