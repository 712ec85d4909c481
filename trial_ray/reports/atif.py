"""Recorded trajectories as documents of the Agent Trajectory Interchange Format (ATIF), one JSON file a trajectory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trial_ray.files import escaped, finite
from trial_ray.reports.recorded import RecordedTrajectory, TrainedTurn
from trial_ray.reports.records import RunRecord
from trial_ray.rollout.trajectory import Turn
from trial_ray.version import __version__

ATIF_VERSION = "ATIF-v1.7"
NOTES = (
    "Step 1 is what the environment showed first. metrics.prompt_token_ids of a step is the whole prompt as the engine got it, "
    "since each prompt stands alone; completion_token_ids and logprobs are the engine's. extra.action was sent to the environment."
)


def write_atif(run: RunRecord, recorded: Iterable[Sequence[RecordedTrajectory]], folder: Path) -> int:
    """Write ``iteration=NUMBER/GROUP-ROLLOUT.json`` for every trajectory with at least one turn, and return their number.

    Args:
        run: names method and model, and decodes responses.
        recorded: trajectories by iteration.
        folder: to write into; made here.
    """
    count = 0
    folder.mkdir(parents=True)
    for trajectories in recorded:
        for each in trajectories:
            if each.trajectory.turns:
                target = folder / f"iteration={each.iteration:05d}" / f"{each.group_id}-{each.rollout_index}.json"
                target.parent.mkdir(exist_ok=True)
                document = finite(atif_document(run, each))
                target.write_text(json.dumps(document, ensure_ascii=False, allow_nan=False), encoding="utf-8")
                count += 1
    return count


def atif_document(run: RunRecord, recorded: RecordedTrajectory) -> dict[str, Any]:
    """One trajectory with at least one turn as an ATIF document, of plain types.

    Texts are as they are stored: a lone surrogate is escaped (:func:`trial_ray.files.escaped`).
    """
    trajectory = recorded.trajectory
    turns = trajectory.turns
    about = ("environment", "task_id", "family", "seed", "success", "score", "ended", "error", "failed_by", "solution")
    first = {"step_id": 1, "source": "user", "message": escaped(turns[0].observation)}
    return {
        "schema_version": ATIF_VERSION,
        "session_id": f"{recorded.group_id}-{recorded.rollout_index}",
        "trajectory_id": f"{recorded.group_id}-{recorded.rollout_index}",
        "agent": {
            "name": "trial-ray",
            "version": __version__,
            **({"model_name": run.backbone} if run.backbone else {}),
            "extra": {"method": run.method, "run": escaped(run.name)},
        },
        "steps": [
            first,
            *(
                _step(run, number, turn, trained)
                for number, (turn, trained) in enumerate(zip(turns, recorded.trained, strict=True), start=2)
            ),
        ],
        "notes": NOTES,
        "final_metrics": {
            "total_prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
            "total_completion_tokens": sum(len(turn.response_ids) for turn in turns),
            "total_steps": len(turns) + 1,
            "extra": {"return": trajectory.episode_return},
        },
        "extra": {
            "iteration": recorded.iteration,
            "group_id": recorded.group_id,
            "rollout_index": recorded.rollout_index,
            **{name: _plain(getattr(trajectory, name)) for name in about},
        },
    }


def _step(run: RunRecord, number: int, turn: Turn, trained: TrainedTurn | None) -> dict[str, Any]:
    names = ("action", "valid", "invalid_action", "reward", "weight_version", "finish_reason", "prompt_cut")
    extra = {name: _plain(getattr(turn, name)) for name in names}
    if trained is not None:
        extra |= {name: getattr(trained, name) for name in ("advantage", "turn_score", "turn_weight")}
    response = turn.action if run.tokens is None else run.tokens.decoded(turn.response_ids.tolist())
    return {
        "step_id": number,
        "source": "agent",
        "message": escaped(response),
        # The action is text for the environment and no call of a function, so its result names none.
        "observation": {"results": [{"content": escaped(turn.outcome)}]},
        "metrics": {
            "prompt_tokens": len(turn.prompt_ids),
            "completion_tokens": len(turn.response_ids),
            "prompt_token_ids": turn.prompt_ids.tolist(),
            "completion_token_ids": turn.response_ids.tolist(),
            "logprobs": turn.logprobs.tolist(),
        },
        "extra": extra,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [escaped(text) for text in value]
    return escaped(value) if isinstance(value, str) else value
