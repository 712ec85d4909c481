"""Recorded trajectories with the texts of their tokens and the values that the update computed for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.errors import UserInputError
from trial_ray.learner.recording import read_training
from trial_ray.models.model_shape import spell_unknown
from trial_ray.prompts.writer import ResponseTexts
from trial_ray.rollout.recording import read_iteration
from trial_ray.runs.folder import RunFolder
from trial_ray.trajectory import Trajectory, Turn

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_PIECES = 4
"""Maximum number of tokens that one character is divided into: UTF-8 has at most four bytes per character."""


class TokenTexts:
    """Decodes tokens one by one; each token id is decoded once and cached.

    A tokenizer may drop the space before the first decoded word, so each token is decoded after a fixed token, whose
    text is removed. Tokens that contain only a part of a character are decoded together: the first token gets the text, the
    others an empty string.

    Args:
        tokenizer: a ``transformers`` tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._responses = ResponseTexts(tokenizer)
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(self._tokenizer.decode(self._anchor))
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return one text per token.

        Args:
            ids: token ids ``[T]``; ids outside of the vocabulary are written as ``⟨id 99999⟩``.
        """
        for token_id in set(ids) - self._known.keys():
            # A model may have more token ids than its tokenizer.
            is_known = 0 <= token_id < len(self._tokenizer)
            self._known[token_id] = self._decode([token_id]) if is_known else spell_unknown(token_id)
        texts = [self._known[token_id] for token_id in ids]
        for index, text in enumerate(texts):
            if _INCOMPLETE not in text:
                continue
            for stop in range(index + 2, min(index + _MAX_PIECES, len(texts)) + 1):
                if _INCOMPLETE not in (whole := self._decode(ids[index:stop])):
                    texts[index:stop] = [whole, *[""] * (stop - index - 1)]
                    break
        return texts

    def text(self, ids: Sequence[int]) -> str:
        """Return the joined text of the tokens."""
        return "".join(self.texts(ids))

    def opening(self, turn: Turn) -> str:
        """Return the beginning of the response that the chat template puts at the end of the prompt, such as ``<think>``."""
        return self._responses.opening(turn.prompt_ids, turn.insert_at)

    def _decode(self, ids: Sequence[int]) -> str:
        whole = self._tokenizer.decode(
            [*self._anchor, *ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(whole)[self._skipped :]


@dataclass(frozen=True)
class RecordedTurn:
    """A turn with the values that training recorded for it, which are ``None`` if it was not trained on.

    Attributes:
        turn: the sampled turn.
        action_class: class of the action (:data:`trial_ray.adapters.adapter.ACTION_CLASSES`); empty if the environment's
            adapter defines no classes.
        advantage: advantage of the turn.
        turn_score: s_k (TRIAL paper, Eq. 5), the mean absolute hindsight log-ratio of the turn's tokens, each bounded by
            ``gap_clip``, in nats; ``None`` if the method does not score turns.
        turn_weight: w_k (TRIAL paper, Eq. 6), with a token-weighted mean of one over the trajectory; ``None`` if the method
            does not weight turns.
        gap: hindsight log-ratio of each response token: its log-probability with the teacher context minus without, in nats,
            ``[y]``; ``None`` without a teacher context.
        learner_logprobs: log-probability of each response token under the learner before the update, ``[y]``.
        evidence_ids: tokens of the teacher context that are inserted into the prompt; ``None`` without a teacher context.
        evidence_at: index in the prompt before which ``evidence_ids`` are inserted; ``None`` without a teacher context.
    """

    turn: Turn
    action_class: str = ""
    advantage: float | None = None
    turn_score: float | None = None
    turn_weight: float | None = None
    gap: list[float] | None = None
    learner_logprobs: list[float] | None = None
    evidence_ids: list[int] | None = None
    evidence_at: int | None = None

    @property
    def message_text(self) -> str:
        """The chat messages that were sent in this turn, each after its role; empty if the prompt was recorded as token ids."""
        messages = json.loads(self.turn.messages or "[]")
        return "\n\n".join(f"{message['role']}:\n{message['content']}" for message in messages)

    def split_prompt(self) -> tuple[list[int], list[int]]:
        """Split the prompt's ids at the position of the teacher context or, without one, at the end of the user's message."""
        at = self.turn.insert_at if self.evidence_at is None else self.evidence_at
        ids = self.turn.prompt_ids.tolist()
        return ids[:at], ids[at:]


_KEY = ("group_id", "rollout_index", "turn_index")
_TRAINED = [field.name for field in fields(RecordedTurn)[2:]]


@dataclass(frozen=True)
class RecordedTrajectory:
    """A trajectory that a run recorded, with the values that training recorded for its turns.

    Attributes:
        iteration: iteration in which the trajectory was recorded.
        number: number of the trajectory in its iteration, from 1, ordered by group and rollout.
        rollout_index: index of the trajectory in its group, the rollouts of one task.
        trajectory: the sampled trajectory.
        turns: turns of the trajectory, with the values that training recorded for them.
    """

    iteration: int
    number: int
    rollout_index: int
    trajectory: Trajectory
    turns: Sequence[RecordedTurn]

    @property
    def has_ids(self) -> bool:
        """True if the responses were recorded as token ids."""
        return any(len(turn.turn.response_ids) for turn in self.turns)

    @property
    def advantage(self) -> float | None:
        """Mean advantage of the turns that were trained on; ``None`` if there are none."""
        advantages = [turn.advantage for turn in self.turns if turn.advantage is not None]
        return float(np.mean(advantages)) if advantages else None

    @property
    def has_turn_weights(self) -> bool:
        """``True`` if training recorded a score and a weight for every turn."""
        known = [turn.turn_score is not None and turn.turn_weight is not None for turn in self.turns]
        return bool(known) and all(known)

    @property
    def disagreement(self) -> float | None:
        """How far the dense loss opposes the outcome loss, in nats per token; ``None`` if no hindsight log-ratio was recorded.

        With the weight w of a token's turn (1 if the method has no turn weights) and the token's hindsight log-ratio Δ,

            D = (1 / N) Σ w max(0, -σ Δ)

        over the N tokens that have a log-ratio. σ is the sign of the turn's advantage; if that is 0 or unknown, σ is +1 for a
        success and -1 otherwise. The dense loss makes tokens with a positive log-ratio more probable, and the outcome loss
        tokens with a positive advantage. Therefore D is 0 if both losses move every token in the same direction.
        """
        total, tokens = 0.0, 0
        for turn in self.turns:
            sign = np.sign(turn.advantage or 0.0) or (1.0 if self.trajectory.success else -1.0)
            weight = 1.0 if turn.turn_weight is None else turn.turn_weight
            gap = np.asarray(turn.gap or (), np.float64)
            total += weight * float(np.maximum(0.0, -sign * gap).sum())
            tokens += len(gap)
        return total / tokens if tokens else None


def read_recorded(
    folder: RunFolder, iteration: int, max_staleness: int, adapters: Mapping[str, EnvironmentAdapter]
) -> list[RecordedTrajectory]:
    """Read the recorded trajectories of one iteration, with the values that training recorded for their turns.

    Args:
        folder: folder of the run.
        iteration: iteration of the recording.
        max_staleness: maximum number of updates between the recording of a rollout and training on it.
        adapters: environment adapters by the environment's name in the run; they determine the classes of actions.

    Raises:
        UserInputError: a file has another version of the schema, lacks columns or is cut off, or the training record belongs to
            other responses.
    """
    groups = read_iteration(folder.trajectories, iteration)
    wanted = pa.array([group.group_id for group in groups], pa.string())
    trained: dict[Any, dict[str, Any]] = {}
    for number in folder.trained_iterations():
        if iteration <= number <= iteration + max_staleness:
            table = read_training(folder.training, number)
            for row in table.filter(pc.is_in(table["group_id"], wanted)).to_pylist():
                trained[tuple(row[name] for name in _KEY)] = {name: row[name] for name in _TRAINED}
    recorded: list[RecordedTrajectory] = []
    for group in groups:
        for rollout, trajectory in enumerate(group.trajectories):
            adapter = adapters.get(trajectory.environment, EnvironmentAdapter(trajectory.environment or "unknown"))
            actions = [turn.action for turn in trajectory.turns]
            classes = adapter.turn_classes(actions, trajectory.ended == "terminated")
            turns = [
                RecordedTurn(turn, name, **trained.get((group.group_id, rollout, index), {}))
                for index, (turn, name) in enumerate(zip(trajectory.turns, classes, strict=True))
            ]
            _require_same_responses(turns, trajectory.task_id, folder)
            recorded.append(RecordedTrajectory(iteration, len(recorded) + 1, rollout, trajectory, turns))
    return recorded


def _require_same_responses(turns: Sequence[RecordedTurn], task_id: str, folder: RunFolder) -> None:
    for turn in turns:
        for values in (turn.gap, turn.learner_logprobs):
            if values is not None and len(values) != len(turn.turn.response_ids):
                raise UserInputError(
                    f"{folder.training} has {len(values)} values for a response of {len(turn.turn.response_ids)} tokens of "
                    f"task {task_id}: it is from another run than {folder.trajectories}."
                )
