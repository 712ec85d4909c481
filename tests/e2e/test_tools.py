"""Policies that call ALFWorld's tools in Qwen3's format learn, here with real actors and in TRL's ``GRPOTrainer``."""

import dataclasses
import json

import pytest
from fitted_model import fit_model, fit_tokenizer
from tiny_run import games_config

from trial_envs.alfworld.tool_env import ALFWorldToolEnv
from trial_envs.tool_env import ToolEnv
from trial_envs.wrappers import Recording, read_episodes
from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.metrics import LEARNER
from trial_ray.prompts.tool_calls import ToolSet
from trial_ray.rollout.recording import read_turns
from trial_ray.runs.metrics_file import flatten

pytestmark = pytest.mark.e2e

TOOLS = ToolSet(ALFWorldToolEnv)
GROUP = 4


def message(*calls):
    """An assistant message with tool calls."""
    shown = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    lines = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in shown)
    return f"<|im_start|>assistant\n{lines}<|im_end|>"


def test_an_iteration_with_tools(algorithm_of, tmp_path):
    model, played = f"{tmp_path}/model", ("look", "inventory", "go to desk 1")
    texts = [*(message(("act", {"action": action})) for action in played), message(("fly", {}))]
    tokenizer = fit_tokenizer("qwen3", [*map(json.dumps, ToolSet(ToolEnv).schemas * 5), *texts * 5])
    for part in (fit_model(tokenizer, texts, steps=150, window=24), tokenizer):
        part.save_pretrained(model)
    config = (
        games_config(model, max_turns=2, num_tasks=1, lr=1e-3, group_size=3, hindsight_start_iteration=1)
        .environment(adapter=dataclasses.replace(ADAPTER, tools=ToolEnv))
        .env_runners(prompt_style="tools", max_prompt_tokens=1500, max_response_tokens=64, seeded_sampling=True)
        .recording(trajectories_folder=f"{tmp_path}/trajectories")
    )
    metrics = flatten(algorithm_of(config).train())
    turns = read_turns(tmp_path / "trajectories")
    actions = turns["action"].to_pylist()
    assert set(actions) <= {*played, ""}
    assert {"look", "inventory"} & set(actions)
    asked = ["Call one or more tools in every turn" not in outcome for outcome in turns["outcome"].to_pylist()]
    assert [action != "" for action in actions] == turns["valid"].to_pylist() == asked
    assert metrics[f"{LEARNER}engine/logprob_diff"] < 1e-5
    assert metrics[f"{LEARNER}trial/turn_score_mean"] > 0


@pytest.mark.long
def test_rewards_and_tool_calls_in_trl_are_those_of_the_environments(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    made, rewards, answers = [], [], []

    def make():
        env = ALFWorldToolEnv(split="generated", difficulty="tiny", max_turns=20)
        env._env = Recording(env._env, tmp_path / f"{len(made)}.jsonl")
        made.append(env)
        return env

    def notes(environments, completions, **columns):
        """Note what TRL has of every rollout: the reward, and the tools' answers."""
        for env, messages in zip(environments, completions, strict=True):
            rewards.append(env.get_reward())
            answers.extend(part["content"] for part in messages if part["role"] == "tool")
        return [0.0] * len(environments)

    probe = ALFWorldToolEnv(split="generated", difficulty="tiny")
    first = probe.reset(task=0)
    walkthrough = probe._env.unwrapped.walkthrough
    tokenizer = fit_tokenizer("qwen3", [*map(json.dumps, TOOLS.schemas * 5), first, *map(probe._take, walkthrough)])
    calls = [*map(TOOLS.call_of, walkthrough)]
    model = fit_model(tokenizer, [message(*calls), message(calls[0])], window=24)
    arguments = GRPOConfig(
        output_dir=f"{tmp_path}/run",
        max_steps=2,
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        max_completion_length=2048,
        max_tool_calling_iterations=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model,
        notes,
        arguments,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Do the task. "}], "task": 0}] * 2),
        processing_class=tokenizer,
        environment_factory=make,
    )
    trainer.train()
    for env in made:
        env._env.close()
    episodes = [episode for file in sorted(tmp_path.glob("*.jsonl")) for episode in read_episodes(file)]
    updates = [entry for entry in trainer.state.log_history if "tools/call_frequency" in entry]

    assert len(made) == GROUP
    assert len(rewards) == 2 * GROUP
    # Every episode with an action is recorded; a rollout whose message had no tool call played none and earned 0.
    earned = sorted(episode.total_reward for episode in episodes if episode.total_reward)
    assert earned == sorted(filter(None, rewards))
    assert {0.0, 1.0} <= set(rewards)
    # Steps of the environments are TRL's calls of tools but those after an episode's end.
    assert sum(update["tools/call_frequency"] for update in updates) * GROUP == pytest.approx(len(answers))
    late = answers.count(probe._take("look"))
    assert sum(len(episode.steps) - 1 for episode in episodes) == len(answers) - late > 0
    assert [update["tools/failure_frequency"] for update in updates] == [0.0, 0.0]
    assert any(update["grad_norm"] > 0 for update in updates)
