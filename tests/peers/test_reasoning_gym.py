"""``trial/ReasoningGym-v0``: questions and scores are those of Reasoning Gym itself."""

from __future__ import annotations

import pytest
from seeded_games import check_games, make

from trial_envs.errors import GeneratorSettingError

pytestmark = pytest.mark.peers

ENV_ID = "trial/ReasoningGym-v0"
DATASETS = [
    "chain_sum",
    "countdown",
    "family_relationships",
    "letter_counting",
    "mini_sudoku",
    "pool_matrix",
    "propositional_logic",
    "rearc",
    "simple_integration",
    "sokoban",
    "spell_backward",
    "syllogism",
]


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("seed", [0, 2_000_011])
def test_questions_and_scores_are_its_own(dataset, seed):
    gym = pytest.importorskip("reasoning_gym")
    data = gym.create_dataset(dataset, seed=seed, size=1)
    entry = data[0]
    for answer in (entry["answer"], "0", "", "no idea"):
        env = make(ENV_ID, {"dataset": dataset})
        observation, info = env.reset(options={"task": f"{dataset}/{seed}"})
        assert observation == info["task"] == entry["question"].strip()
        assert env.unwrapped.walkthrough == ((str(entry["answer"]),) if entry["answer"] is not None else ())
        score = data.score_answer(str(answer), entry)
        _, reward, terminated, truncated, info = env.step(str(answer))
        assert (reward, info["score"]) == pytest.approx((score, score))
        assert (terminated, truncated, info["won"]) == (True, False, score >= 1)
        env.close()


def test_a_question_is_a_pure_function_of_its_id():
    check_games(ENV_ID, "dataset", {dataset: ["1", "2"] for dataset in DATASETS})


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"dataset": "sums"}, "no data set 'sums'"),
        ({"dataset_args": {"terms": 3}}, "terms"),
        ({"dataset_args": {"seed": 0}}, "sets seed"),
        ({"actions": "yes"}, "as a list of str"),
    ],
)
def test_what_cannot_be_made_is_refused(settings, cause):
    with pytest.raises(GeneratorSettingError, match=cause):
        make(ENV_ID, settings).reset(seed=0)
