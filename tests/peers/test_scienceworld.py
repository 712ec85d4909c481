"""``trial/ScienceWorld-v0``: the simulator's own answers and splits and rewards of turns."""

import pytest
from seeded_games import make

ENV_ID = "trial/ScienceWorld-v0"
SETTINGS = {"task": "find-living-thing", "simplifications": "easy"}


@pytest.fixture(scope="module")
def simulator():
    simulator = pytest.importorskip("scienceworld").ScienceWorldEnv(envStepLimit=1000)
    yield simulator
    simulator.close()


@pytest.mark.parametrize("task", ["find-living-thing", "boil"])
def test_answers_and_scores_are_those_of_the_simulator(simulator, task):
    simulator.load(task, 4, "easy", generateGoldPath=True)
    shown, state = simulator.reset()
    solution = simulator.get_gold_action_sequence()
    env = make(ENV_ID, {"task": task, "simplifications": "easy", "list_actions": True})
    observation, info = env.reset(options={"task": f"{task}/4"})
    assert observation == shown.strip()
    assert info["admissible_actions"] == state["valid"]
    assert state["taskDesc"].strip() == f"Task Description:\n{info['task']}"
    rewards = [info["score"]]
    for action in ["dance", *solution]:
        shown, gained, done, state = simulator.step(action)
        observation, reward, terminated, truncated, info = env.step(action)
        assert observation == shown.strip()
        assert reward == gained / 100
        assert terminated == done
        assert truncated is False
        assert info["score"] == state["score"] / 100
        assert info["admissible_actions"] == state["valid"]
        assert info["invalid_action"] == (action == "dance")
        rewards.append(reward)
        if done:  # some solutions continue after the goal
            break
    assert info["won"] is True
    assert sum(rewards) == pytest.approx(1.0)
    assert sum(reward > 0 for reward in rewards) > 2
    env.close()


def test_splits_are_its_own(simulator):
    env = make(ENV_ID, SETTINGS).unwrapped
    simulator.load(SETTINGS["task"], 0, "easy")
    own = (simulator.get_variations_train(), simulator.get_variations_dev(), simulator.get_variations_test())
    listed = [env.tasks(split) for split in ("train", "valid", "test")]
    assert listed == [[f"find-living-thing/{number}" for number in numbers] for numbers in own]
    env.reset(options={"task": listed[0][0]})
    env.tasks("test")
    assert env.step("look around")[1] == 0.0
    env.close()
