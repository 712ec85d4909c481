"""Episodes to imitate have the prompts of a rollout, from recordings and from files of messages; others are counted."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from chat_tokenizers import published_tokenizer
from prompt_games import shown, writer_of
from recorded_games import config_of, played, recorded

from trial_envs.tool_env import ToolEnv
from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.errors import ConfigError, UserInputError
from trial_ray.sft.messages import write_messages
from trial_ray.sft.sources import Dropped, load_episodes, select
from trial_ray.trajectory import Trajectory, Turn

STYLES = ("tagged", "plain", "conversation", "tools")
TEMPLATES = ("qwen2_5", "qwen3", "smollm2", "qwen3_5_think")
IMPOSSIBLE = {("tools", "smollm2"), ("plain", "qwen3_5_think")}
"""A chat template without tools, and one that opens reasoning, behind which a response cannot be an action alone."""


def load(path, config, tokenizer):
    return load_episodes(path, config, tokenizer, Dropped(strict=True))


@pytest.mark.parametrize(("style", "template"), sorted({*product(STYLES, TEMPLATES)} - IMPOSSIBLE))
def test_prompts_are_those_of_a_rollout(style, template, tmp_path):
    tokenizer = published_tokenizer(template)
    episodes = played(style, tokenizer)
    source = recorded(tmp_path / "recorded", style, episodes)
    assert write_messages(source, tmp_path / "messages.jsonl") >= len(episodes)

    def ids(episodes):
        return {(turn.prompt_ids.tobytes(), turn.response_ids.tobytes()) for each in episodes for turn in each.turns}

    for path in (source, tmp_path / "messages.jsonl"):
        assert ids(load(path, config_of(style), tokenizer)) == ids(episodes)


def test_episodes_of_another_style_are_written_anew(tmp_path):
    """Reasoning is kept where the form allows it; a plain response is the action."""
    tokenizer = published_tokenizer("qwen3")
    source = recorded(tmp_path, "conversation", played("conversation", tokenizer))
    for style in ("tagged", "plain"):
        episodes = load(source, config_of(style), tokenizer)
        texts = [tokenizer.decode(turn.response_ids) for each in episodes for turn in each.turns]
        assert all(("Step " in text) == (style == "tagged") for text in texts)
        writer = writer_of(tokenizer, style)
        prompt = writer.write(shown(""), [])
        for turn in episodes[0].turns:
            assert writer.read(prompt, turn.response_ids).action == turn.action


def test_prompts_have_the_tools_of_the_experiment(tmp_path):
    """Recorded ids are kept only if the experiment has the recorded tools; otherwise its tools are called."""
    tokenizer = published_tokenizer("qwen3")
    source = recorded(tmp_path, "tools", played("tools", tokenizer), keep_ids=True)
    config = config_of("tools").environment(adapter=replace(ADAPTER, tools=ToolEnv))
    same, other = (load(source, used, tokenizer) for used in (config_of("tools"), config))
    writer = writer_of(tokenizer, "tools")
    for kept, rewritten in zip(same, other, strict=True):
        for turn, new in zip(kept.turns, rewritten.turns, strict=True):
            actions = turn.all_actions
            assert "go_to" in tokenizer.decode(turn.prompt_ids)
            assert "go_to" not in tokenizer.decode(new.prompt_ids)
            assert writer.tools.call_of(actions[0]) == ("act", {"action": actions[0]})
            assert tokenizer.decode(new.response_ids).count('"act"') == len(actions)


def row(answer, question="x", **further):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **further}]


BAD = {
    "messages whose content is not text": row("y", 3),
    "rows whose messages of user (or tool) and assistant do not alternate": row("y")[:1],
    "rows with tool calls; set prompt_style='tools' to imitate them": row(
        "", tool_calls=[{"function": {"name": "fly", "arguments": {}}}]
    ),
}


def test_rows_that_cannot_be_imitated_are_counted_by_reason(tmp_path):
    tokenizer = published_tokenizer("qwen3")
    file = tmp_path / "messages.jsonl"
    good, long = (row(f"<think>{thought}</think><action>look</action>") for thought in ("a", "a " * 600))
    rows = [*BAD.values(), good, long, row("look"), good]
    file.write_text("\n".join([*(json.dumps({"messages": each}) for each in rows), "{not json"]))
    dropped = Dropped()
    config = config_of("conversation")
    assert len(select(load_episodes(file, config, tokenizer, dropped), dropped)) == 1
    assert dropped.episodes == {
        **dict.fromkeys(BAD, 1),
        "rows without a list of messages": 1,
        "episodes without a turn to imitate": 2,
        "exact repetitions of another episode": 1,
    }
    assert dropped.turns == {
        "responses longer than max_response_tokens=500": 1,
        "responses without the required format": 1,
    }
    with pytest.raises(UserInputError, match="row 1: messages whose content is not text"):
        load(file, config, tokenizer)


def test_best_episodes_of_a_task_are_selected():
    gains = [("a", 0.2), ("a", 0.9), ("b", 0.5), ("a", 0.7)]
    episodes = [
        Trajectory(task, "", 0, [Turn(response_ids=np.array([number]), reward=gained)])
        for number, (task, gained) in enumerate(gains)
    ]
    dropped = Dropped()
    chosen = select(episodes, dropped, min_return=0.3, per_task=1)
    assert [*map(id, chosen)] == [*map(id, episodes[1:3])]
    assert dropped.episodes == {"a return below 0.3": 1, "more than 1 episodes of their task": 1}
    with pytest.raises(ConfigError):
        select(episodes, Dropped(), min_return=2.0)


@pytest.mark.parametrize("style", ["conversation", "tools"])
def test_hugging_face_datasets_reads_and_writes_the_messages(style, tmp_path):
    from datasets import load_dataset

    tokenizer = published_tokenizer("qwen3")
    episodes = played(style, tokenizer)
    lines = tmp_path / "messages.jsonl"
    table = tmp_path / "messages.parquet"
    write_messages(recorded(tmp_path / "recorded", style, episodes), lines)
    rows = load_dataset("json", data_files=str(lines), split="train", cache_dir=f"{tmp_path}/cache")
    assert rows["success"] == [True] * len(rows)
    rows.to_parquet(table)

    def ids(episodes):
        return sorted([turn.response_ids.tolist() for turn in each.turns] for each in episodes)

    assert ids(load(table, config_of(style), tokenizer)) == ids(episodes)
