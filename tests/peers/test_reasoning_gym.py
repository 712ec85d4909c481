"""``trial/ReasoningGym-v0``: questions and scores are those of Reasoning Gym itself."""

import pytest
from seeded_games import make

DATASETS = ["chain_sum", "family_relationships", "mini_sudoku", "propositional_logic", "rearc", "sokoban"]


@pytest.mark.parametrize("dataset", DATASETS)
def test_questions_and_scores_are_its_own(dataset):
    gym, seed = pytest.importorskip("reasoning_gym"), 2_000_011
    data = gym.create_dataset(dataset, seed=seed, size=1)
    entry = data[0]
    for answer in (entry["answer"], "0", "", "no idea"):
        env = make("trial/ReasoningGym-v0", {"dataset": dataset})
        observation, info = env.reset(options={"task": f"{dataset}/{seed}"})
        assert observation == info["task"] == entry["question"].strip()
        assert env.unwrapped.walkthrough == ((str(entry["answer"]),) if entry["answer"] is not None else ())
        score = data.score_answer(str(answer), entry)
        _, reward, terminated, truncated, info = env.step(str(answer))
        assert (reward, info["score"]) == pytest.approx((score, score))
        assert terminated is True
        assert truncated is False
        assert info["won"] == (score >= 1)
        env.close()
