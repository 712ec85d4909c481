"""The page about environments and programs of one's own: its blocks train with a remote env runner."""

import pytest
from snippets import snippets
from tiny_run import with_small_actors

from trial_ray.adapters.registry import load_adapters
from trial_ray.runs.experiment import experiment_file, load_experiment

BLOCKS = "\n\n".join(snippets("environments.md", "own-environment"))


@pytest.fixture
def page(tmp_path):
    """The page's file, in a folder from which no actor could import it."""
    file = tmp_path / "guessing.py"
    file.write_text(BLOCKS)
    return file


def test_blocks_are_the_tuned_example(page):
    _, _, example = experiment_file("own_environment").read_text().split('"""', 2)
    shown, expected = (filter(str.strip, text.splitlines()) for text in (BLOCKS, example))
    assert [*shown] == [*expected]
    (adapter,) = load_adapters([page])
    assert adapter.env_id == "mine/Guessing-v0"


@pytest.mark.actors
def test_file_trains_with_a_remote_env_runner(page, tmp_path, monkeypatch, algorithm_of):
    monkeypatch.setenv("TRIAL_RAY_CACHE", f"{tmp_path}/cache")
    config = load_experiment(page).config
    small = {"games": 4, "max_steps": 2, "check_games": 2, "evaluation_games": 2, "size": "nano"}
    config.rl_module(warm_start={**config.warm_start, **small}).evaluation(evaluation_split=None)
    page.unlink()
    assert_trains(config, algorithm_of)


@pytest.mark.actors
def test_program_trains_in_its_own_process(tmp_path, model_path, algorithm_of):
    file = tmp_path / "program.py"
    file.write_text(*snippets("environments.md", "agent-program"))
    config = load_experiment(file).config.rl_module(model_path=model_path)
    config.env_runners(max_prompt_tokens=400, max_response_tokens=8).engines(engine_kwargs={"max_model_len": 508})
    file.unlink()
    assert_trains(config, algorithm_of)


def assert_trains(config, algorithm_of):
    config.training(group_size=2, tasks_per_iteration=2, minibatch_rows=16, microbatch_rows=8)
    config.training(hindsight_start_iteration=1)
    result = algorithm_of(with_small_actors(config)).train()
    assert result["rows"]["sampled"] == result["rows"]["given_to_learners"] > 0
    assert result["env_runners"]["num_failed_episodes"] == 0
