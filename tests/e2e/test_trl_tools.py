"""TRL's ``GRPOTrainer`` trains in our environments, and its rewards and tool calls are those that the environments recorded."""

from __future__ import annotations

import inspect
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from fitted_model import fit_model, fit_tokenizer
from transformers.utils import get_json_schema

from trial_envs.alfworld.tool_env import ALFWorldToolEnv
from trial_envs.tool_env import ToolEpisode
from trial_envs.wrappers import Recording, read_episodes

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

OVER = "The episode is over."
GROUP = 4


def as_call(command: str) -> dict[str, object]:
    """The tool call of a command of the walkthroughs."""
    for pattern, name, names in (
        (r"go to (.+)", "go_to", ["receptacle"]),
        (r"take (.+) from (.+)", "take", ["object", "receptacle"]),
        (r"move (.+) to (.+)", "move", ["object", "receptacle"]),
    ):
        if found := re.fullmatch(pattern, command):
            return {"name": name, "arguments": dict(zip(names, found.groups(), strict=True))}
    raise AssertionError(command)


def message(commands: list[str]) -> str:
    """An assistant message that makes the tool calls of all the commands."""
    calls = "\n".join(f"<tool_call>\n{json.dumps(as_call(command))}\n</tool_call>" for command in commands)
    return f"<|im_start|>assistant\n{calls}<|im_end|>"


def shown_texts(env: ToolEpisode, walkthrough: list[str]) -> list[str]:
    """The tools' schemas and an episode, which is most of what the model reads."""
    named = inspect.getmembers(type(env), predicate=inspect.isfunction)
    tools = [getattr(env, name) for name, _ in named if name[0] != "_" and name not in ("reset", "get_reward")]
    schemas = [json.dumps(get_json_schema(tool)) for tool in tools]
    return [*schemas * 5, env.reset(task=0), *(env._take(command) for command in walkthrough)]


def recorded(make: type[ToolEpisode], settings: dict, folder: Path, made: list[ToolEpisode]) -> ToolEpisode:
    """An environment whose episodes are written to a file of its own."""
    env = make(**settings)
    env._env = Recording(env._env, folder / f"{len(made)}.jsonl")
    made.append(env)
    return env


class Notes:
    """A reward function of zeros that notes what TRL has of every rollout: the reward, and the tools' answers."""

    __name__ = "notes"

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.answers: list[str] = []

    def __call__(self, environments, completions, **columns):
        for env, messages in zip(environments, completions, strict=True):
            self.rewards.append(env.get_reward())
            self.answers += [part["content"] for part in messages if part["role"] == "tool"]
        return [0.0] * len(environments)


def test_two_optimizer_steps_with_named_tools(tmp_path, monkeypatch):
    make, settings = ALFWorldToolEnv, {"split": "generated", "difficulty": "tiny", "max_turns": 20}
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    probe = make(**settings)
    probe.reset(task=0)
    walkthrough = list(probe._env.unwrapped.walkthrough)
    tokenizer = fit_tokenizer("qwen3", shown_texts(probe, walkthrough))
    model = fit_model(tokenizer, [message(walkthrough), message(walkthrough[:1])], window=24)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    made: list[ToolEpisode] = []
    notes = Notes()
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=notes,
        args=GRPOConfig(
            output_dir=str(tmp_path / "run"),
            max_steps=2,
            per_device_train_batch_size=GROUP,
            num_generations=GROUP,
            max_completion_length=2048,
            max_tool_calling_iterations=1,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            report_to="none",
            seed=0,
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": "Do the task. "}]] * 2, "task": [0, 0]}
        ),
        environment_factory=partial(recorded, make, settings, tmp_path, made),
    )
    trainer.train()
    for env in made:
        env._env.close()
    episodes = [episode for file in sorted(tmp_path.glob("*.jsonl")) for episode in read_episodes(file)]
    updates = [entry for entry in trainer.state.log_history if f"rewards/{make.__name__}/mean" in entry]

    assert len(updates) == 2
    assert (len(made), len(notes.rewards)) == (GROUP, 2 * GROUP)
    # Every episode with an action is recorded; a rollout whose message had no tool call played none and earned 0.
    assert sorted(episode.total_reward for episode in episodes if episode.total_reward) == sorted(
        filter(None, notes.rewards)
    )
    assert {0.0, 1.0} <= set(notes.rewards)
    # Steps of the environments are TRL's calls of tools but those after an episode's end.
    assert sum(update["tools/call_frequency"] for update in updates) * GROUP == pytest.approx(len(notes.answers))
    late = notes.answers.count(OVER)
    assert sum(len(episode.steps) - 1 for episode in episodes) == len(notes.answers) - late > 0
    assert [update["tools/failure_frequency"] for update in updates] == [0.0, 0.0]
    assert any(update["grad_norm"] > 0 for update in updates)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
