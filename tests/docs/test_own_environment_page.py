"""The page about environments and programs of one's own: its blocks train with a remote env runner."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from snippets import snippets
from tiny_run import with_small_actors

from trial_ray.adapters.registry import load_adapters
from trial_ray.models.loading import load_tokenizer
from trial_ray.rollout.recording import read_trajectories, read_turns
from trial_ray.runs.experiment import load_experiment

BLOCKS = snippets("environments.md", "own-environment")
EXAMPLE = Path(__file__).parents[2] / "tuned_examples" / "own_environment.py"


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The page's file, in a folder from which no actor could import it."""
    file = tmp_path / "guessing.py"
    file.write_text("\n\n".join(BLOCKS), encoding="utf-8")
    return file


def test_blocks_are_the_tuned_example(page):
    _, _, example = EXAMPLE.read_text(encoding="utf-8").split('"""', 2)
    assert lines("\n".join(BLOCKS)) == lines(example)
    (adapter,) = load_adapters([page])
    assert adapter.env_id == "mine/Guessing-v0"


@pytest.mark.actors
def test_file_trains_with_a_remote_env_runner(page, tmp_path, monkeypatch, algorithm_of):
    monkeypatch.setenv("TRIAL_RAY_CACHE", str(tmp_path / "cache"))
    config = load_experiment(page).config
    small = {"games": 4, "max_steps": 2, "check_games": 2, "evaluation_games": 2, "size": "nano"}
    config.rl_module(warm_start={**config.warm_start, **small})
    config.training(
        group_size=2, tasks_per_iteration=4, minibatch_rows=16, microbatch_rows=8, hindsight_start_iteration=1
    )
    with_small_actors(config)
    config.evaluation(evaluation_split=None)
    config.recording(trajectories_folder=str(tmp_path / "trajectories"))
    page.unlink()
    algo = algorithm_of(config)
    rows = algo.train()["rows"]
    tokenizer = load_tokenizer(algo.config.model_path)
    assert rows["sampled"] == rows["given_to_learners"] > 0
    prompts = [tokenizer.decode(ids) for ids in read_turns(tmp_path / "trajectories")["prompt_ids"].to_pylist()]
    assert len(prompts) == rows["sampled"]
    assert all("Find the number." in prompt and "Your guess" in prompt for prompt in prompts)


@pytest.mark.actors
def test_program_trains_in_its_own_process(tmp_path, model_path, algorithm_of):
    """A call is a turn; its prompt is the last one with its response, and all are trained."""
    file = tmp_path / "program.py"
    file.write_text(*snippets("environments.md", "agent-program"), encoding="utf-8")
    config = load_experiment(file).config.rl_module(model_path=model_path)
    assert config.reward == "return"
    config.training(
        group_size=2, tasks_per_iteration=2, minibatch_rows=16, microbatch_rows=8, hindsight_start_iteration=1
    )
    with_small_actors(config).env_runners(max_prompt_tokens=400, max_response_tokens=8)
    config.engines(engine_kwargs={"max_model_len": 508}).recording(trajectories_folder=str(tmp_path / "trajectories"))
    file.unlink()
    result = algorithm_of(config).train()
    assert result["rows"]["sampled"] == result["rows"]["given_to_learners"] > 0
    assert result["env_runners"]["num_failed_episodes"] == 0
    played = [trajectory.turns for trajectory in read_trajectories(tmp_path / "trajectories")]
    assert len(played) == 4
    for turns in played:
        assert "Which number is it?" in load_tokenizer(model_path).decode(turns[0].prompt_ids)
        for last, turn in pairwise(turns):
            said = [*last.prompt_ids, *last.response_ids]
            assert [*turn.prompt_ids[: len(said)]] == said
        assert [turn.outcome for turn in turns[:-1]] == [turn.observation for turn in turns[1:]]
