"""Recorded trajectories as a folder that Hugging Face ``datasets`` loads: Parquet files and a dataset card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trial_ray.files import escaped
from trial_ray.reports.recorded import RecordedTrajectory, TokenTexts, TrainedTurn
from trial_ray.reports.records import RunRecord
from trial_ray.rollout.partitions import FLOATS, IDS
from trial_ray.rollout.trajectory import Turn

_TURN = (
    ("observation", pa.string(), "what the environment showed before the decision"),
    ("prompt", pa.string(), "the prompt as text, special tokens included; null without the run's tokenizer"),
    ("response", pa.string(), "the response as text, without special tokens; null likewise"),
    ("action", pa.string(), "the action sent to the environment"),
    ("outcome", pa.string(), "what the environment answered"),
    ("reward", pa.float64(), "the environment's reward for this step"),
    ("valid", pa.bool_(), "whether the response had the required form"),
    ("invalid_action", pa.bool_(), "whether the environment did not understand the action, where it says so"),
    ("finish_reason", pa.string(), "`stop` or `length`"),
    ("prompt_cut", pa.string(), "what the prompt left out: `none`, `history` or `observation`"),
    ("weight_version", pa.int64(), "version of the weights that sampled the response"),
    ("prompt_ids", IDS, "token ids of the prompt"),
    ("response_ids", IDS, "token ids of the response, stop token included"),
    ("logprobs", FLOATS, "log-probability of each response token in nats"),
    ("advantage", pa.float64(), "of the turn; null where it was not trained"),
    ("turn_score", pa.float64(), "s_k of Eq. 5; null where the method has none"),
    ("turn_weight", pa.float64(), "w_k of Eq. 6; null where the method has none"),
)
_TRAJECTORY = (
    ("iteration", pa.int32(), "training iteration"),
    ("group_id", pa.string(), "the group of rollouts of one task; empty where the rollout took no turn"),
    ("rollout_index", pa.int32(), "index of the rollout in its group; null likewise"),
    ("environment", pa.string(), "name of the run's environment"),
    ("task_id", pa.string(), "the environment's id of the task"),
    ("family", pa.string(), "the environment's family of the task"),
    ("seed", pa.int64(), "seed with which the rollout was reset"),
    ("success", pa.bool_(), "whether the environment was won"),
    ("score", pa.float64(), "the environment's score, 0 to 1"),
    ("episode_return", pa.float64(), "sum of rewards"),
    ("ended", pa.string(), "`terminated`, `turn_limit`, `prompt_limit` or `failed`"),
    ("error", pa.string(), "for `failed` and `prompt_limit`: which error"),
    ("solution", pa.list_(pa.string()), "the environment's own solution; empty where it knows none"),
)
TURN = pa.struct([(name, kind) for name, kind, _ in _TURN])
SCHEMA = pa.schema([*((name, kind) for name, kind, _ in _TRAJECTORY), ("turns", pa.list_(TURN))])
"""Columns of the Parquet files: a row a trajectory."""


def write_dataset(run: RunRecord, recorded: Iterable[Sequence[RecordedTrajectory]], folder: Path) -> int:
    """Write ``data/train-NUMBER.parquet`` for every iteration and ``README.md``, and return the number of trajectories.

    Args:
        run: names method and model, and decodes prompts and responses.
        recorded: trajectories by iteration.
        folder: to write into; made here.
    """
    count = 0
    (folder / "data").mkdir(parents=True)
    for trajectories in recorded:
        rows = [_row(each, run.tokens) for each in trajectories]
        if rows:
            target = folder / "data" / f"train-{trajectories[0].iteration:05d}.parquet"
            pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), target, compression="zstd")
            count += len(rows)
    (folder / "README.md").write_text(_card(run, count), encoding="utf-8")
    return count


def _row(recorded: RecordedTrajectory, tokens: TokenTexts | None) -> dict[str, Any]:
    trajectory = recorded.trajectory
    own = {"iteration": recorded.iteration, "group_id": recorded.group_id, "rollout_index": recorded.rollout_index}
    own |= {name: _stored(getattr(trajectory, name)) for name, _, _ in _TRAJECTORY[3:]}
    pairs = zip(trajectory.turns, recorded.trained, strict=True)
    return own | {"turns": [_turn(turn, trained, tokens) for turn, trained in pairs]}


def _turn(turn: Turn, trained: TrainedTurn | None, tokens: TokenTexts | None) -> dict[str, Any]:
    texts: dict[str, str | None] = {"prompt": None, "response": None}
    if tokens is not None:
        prompt, response = turn.prompt_ids.tolist(), turn.response_ids.tolist()
        texts = {"prompt": escaped("".join(tokens.texts(prompt))), "response": escaped(tokens.decoded(response))}
    update = ("advantage", "turn_score", "turn_weight")
    return {
        **{name: _stored(getattr(turn, name)) for name, _, _ in _TURN if name not in (*texts, *update)},
        **texts,
        **{name: None if trained is None else getattr(trained, name) for name in update},
    }


def _stored(value: Any) -> Any:
    if isinstance(value, tuple):
        return [escaped(text) for text in value]
    return escaped(value) if isinstance(value, str) else value


def _card(run: RunRecord, count: int) -> str:
    """The card, whose front matter names files and features as the Hub's own cards do."""
    lines = ["---", "tags:", "- reinforcement-learning", "- agent", "- trial-ray", "configs:", "- config_name: default"]
    lines += ["  data_files:", "  - split: train", "    path: data/train-*.parquet"]
    lines += ["dataset_info:", "  features:", *_features(SCHEMA, "  "), "---", ""]
    policy = f" of `{escaped(run.backbone)}`" if run.backbone else ""
    lines += [f"# Trajectories of {escaped(run.name)}", ""]
    lines += [f"{count:,} rollouts{policy} in training with {run.method or 'trial-ray'}, one row each.", ""]
    lines += ['    datasets.load_dataset("FOLDER", split="train")', ""]
    lines += ["| column | meaning |", "| --- | --- |"]
    lines += [f"| `{name}` | {text} |" for name, _, text in _TRAJECTORY]
    lines += [f"| `turns.{name}` | {text} |" for name, _, text in _TURN]
    return "\n".join([*lines, ""])


def _features(fields: Iterable[pa.Field], indent: str) -> Iterator[str]:
    names = {pa.float64(): "float64", pa.float32(): "float32"}  # "double" and "float" in Arrow
    for field in fields:
        kind = field.type
        yield f"{indent}- name: {field.name}"
        if not pa.types.is_list(kind):
            yield f"{indent}  dtype: {names.get(kind, str(kind))}"
        elif pa.types.is_struct(kind.value_type):
            yield f"{indent}  list:"
            yield from _features(kind.value_type, f"{indent}  ")
        else:
            yield f"{indent}  list: {names.get(kind.value_type, str(kind.value_type))}"
