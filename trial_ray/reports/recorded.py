"""Recorded trajectories for viewer and terminal: turns, texts of tokens, and what the update did to them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.errors import UserInputError
from trial_ray.files import visible
from trial_ray.learner.recording import read_training
from trial_ray.models.vocabulary import spell_unknown
from trial_ray.rollout.partitions import partition, partitions
from trial_ray.rollout.recording import read_trajectories, read_turns
from trial_ray.rollout.response_texts import ResponseTexts
from trial_ray.rollout.trajectory import Trajectory, Turn

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_PIECES = 4
"""Bytes of the longest character in UTF-8, hence most tokens that may share one."""


class TokenTexts:
    """Texts of tokens by id, each decoded once.

    A tokenizer drops the blank before the first word of what it decodes; every token is therefore decoded behind another one.
    Tokens that hold a part of a character only are decoded together: the first of them has the text, the others have none.

    Args:
        tokenizer: a ``transformers`` tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._responses = ResponseTexts(tokenizer)
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(self._decode([]))
        self._size = len(tokenizer)
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """One text a token.

        Args:
            ids: token ids ``[T]``; those outside of the vocabulary are spelled as ``⟨id 99999⟩``.
        """
        known = self._known
        for new in set(ids) - known.keys():
            known[new] = self._text_of(new)
        found = [known[each] for each in ids]
        if any(_INCOMPLETE in text for text in found):
            self._join(ids, found)
        return found

    def opened(self, turn: Turn) -> str:
        """The text at the end of a prompt that belongs to the response."""
        return self._responses.opened(turn.prompt_ids, turn.insert_at)

    def _join(self, ids: Sequence[int], found: list[str]) -> None:
        """Give the text of characters that span tokens to the first of their tokens."""
        index = 0
        while index < len(found):
            if _INCOMPLETE in found[index]:
                for stop in range(index + 2, min(index + _MOST_PIECES, len(found)) + 1):
                    whole = self._decode(ids[index:stop])[self._skipped :]
                    if _INCOMPLETE not in whole:
                        found[index:stop] = [whole, *[""] * (stop - index - 1)]
                        break
            index += 1

    def _text_of(self, token: int) -> str:
        # A model may have more ids than its tokenizer.
        return self._decode([token])[self._skipped :] if 0 <= token < self._size else spell_unknown(token)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode([*self._anchor, *ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )


Key = tuple[str, int | None, int]
"""``group_id``, ``rollout_index``, ``turn_index``."""


@dataclass(frozen=True, slots=True)
class TrainedTurn:
    """One trained turn row.

    Attributes:
        advantage: of the row.
        turn_score: s_k (Eq. 5), in nats; ``None`` where the method has none.
        turn_weight: w_k (Eq. 6), the multiplier of the turn; ``None`` likewise.
        gap: signed hindsight gap of each response token in nats, ``[y]``; ``None`` without a hindsight view.
        learner_logprobs: of each response token under the learner before the update, ``[y]``.
        evidence_ids: what the hindsight view inserts into the prompt; ``None`` without one.
        evidence_at: index in the prompt before which it does; ``None`` without one, and where an earlier release recorded it.
    """

    advantage: float | None
    turn_score: float | None
    turn_weight: float | None
    gap: list[float] | None
    learner_logprobs: list[float] | None
    evidence_ids: list[int] | None
    evidence_at: int | None = None

    def split_prompt(self, turn: Turn) -> tuple[list[int], list[int]]:
        """Ids of the prompt before and after the place of the evidence; without any, of the end of the user's message."""
        at = turn.insert_at if self.evidence_at is None else self.evidence_at
        ids = turn.prompt_ids.tolist()
        return ids[:at], ids[at:]


@dataclass(frozen=True, slots=True)
class RecordedTrajectory:
    """One trajectory.

    Attributes:
        iteration: in which it was recorded.
        number: among those of its iteration, from 1, in the order group, rollout.
        group_id: the group of rollouts of its task; empty where it failed before its first turn.
        rollout_index: its index in the group; ``None`` likewise.
        trajectory: what was sampled.
        trained: by turn, what training recorded of it; ``None`` where it recorded nothing.
        classes: by turn, one of ``environments.adapter.ACTION_CLASSES``, or empty strings.
    """

    iteration: int
    number: int
    group_id: str
    rollout_index: int | None
    trajectory: Trajectory
    trained: Sequence[TrainedTurn | None]
    classes: Sequence[str]

    @property
    def advantage(self) -> float | None:
        """Mean over its trained turns; ``None`` where it was not trained on."""
        found = [turn.advantage for turn in self.trained if turn is not None and turn.advantage is not None]
        return float(np.mean(found)) if found else None


def read_recorded(
    folder: Path, iteration: int, max_staleness: int, adapters: Mapping[str, EnvironmentAdapter]
) -> list[RecordedTrajectory]:
    """The recorded trajectories of one iteration, with what training recorded of their turns.

    Args:
        folder: of the run.
        iteration: of the recording.
        max_staleness: updates by which training on a rollout may come after its recording.
        adapters: by the name of the run's environment, for the classes of actions.

    Raises:
        UserInputError: a file is of another version of the schema, lacks columns or is cut off, or what training recorded is of
            other responses.
    """
    turns = read_turns(folder / "trajectories", iteration)
    # Both come in the same order; a rollout that failed before its first turn has no rows to take its group from.
    groups, rollouts = turns["group_id"].to_pylist(), turns["rollout_index"].to_pylist()
    keys = iter(dict.fromkeys(zip(groups, rollouts, strict=True)))
    trained = _read_trained(folder / "training", range(iteration, iteration + max_staleness + 1), sorted(set(groups)))
    found = []
    for number, trajectory in enumerate(read_trajectories(folder / "trajectories", iteration), start=1):
        group, rollout = next(keys) if trajectory.turns else ("", None)
        rows = [trained.get((group, rollout, turn)) for turn in range(len(trajectory.turns))]
        for turn, row in zip(trajectory.turns, rows, strict=True):
            _check(turn, row, trajectory.task_id, folder)
        adapter = adapters.get(trajectory.environment, EnvironmentAdapter(trajectory.environment or "unknown"))
        actions = [turn.action for turn in trajectory.turns]
        classes = adapter.turn_classes(actions, trajectory.ended == "terminated")
        found.append(RecordedTrajectory(iteration, number, group, rollout, trajectory, rows, classes))
    return found


def _read_trained(training: Path, iterations: range, groups: Sequence[str]) -> dict[Key, TrainedTurn]:
    """The turn rows of some groups that some iterations trained on; none where nothing was recorded."""
    wanted, found = pa.array(groups, pa.string()), {}
    for number in partitions(training):
        # Of an update with too many tokens, only what a replay needs was recorded.
        if number not in iterations or not any(partition(training, number).glob("*.parquet")):
            continue
        table = read_training(training, number)
        for row in table.filter(pc.is_in(table["group_id"], wanted)).to_pylist():
            key = row["group_id"], row["rollout_index"], row["turn_index"]
            found[key] = TrainedTurn(**{field.name: row[field.name] for field in fields(TrainedTurn)})
    return found


def _check(turn: Turn, row: TrainedTurn | None, task_id: str, folder: Path) -> None:
    for values in () if row is None else (row.gap, row.learner_logprobs):
        if values is not None and len(values) != len(turn.response_ids):
            raise UserInputError(
                f"{folder / 'training'} has {len(values)} values for a response of {len(turn.response_ids)} tokens of task "
                f"{task_id}: it is not of the same run as {folder / 'trajectories'}."
            )


def disagreement(trained: Sequence[TrainedTurn | None], success: bool) -> float | None:
    """Nats a token by which the weighted gaps of a trajectory push against its outcome.

    With the multiplier w of a token's turn (1 where the method has none) and its signed gap Δ,

        D = (1 / N) Σ w max(0, -σ Δ)

    over the N tokens that have a gap. σ is the sign of the turn's advantage; where that is 0 or unknown, +1 for a success and -1
    otherwise. The dense loss raises tokens with a positive gap and the outcome loss those of a positive advantage, so
    that D is 0 where both move every token the same way.

    Args:
        trained: what training recorded of each turn.
        success: whether the task was solved.

    Returns:
        D, or ``None`` where no gap was recorded.
    """
    total, tokens = 0.0, 0
    for turn in trained:
        if turn is None or not turn.gap:
            continue
        sign = np.sign(turn.advantage or 0.0) or (1.0 if success else -1.0)
        weight = 1.0 if turn.turn_weight is None else turn.turn_weight
        gap = np.asarray(turn.gap, np.float64)
        total += weight * float(np.maximum(0.0, -sign * gap).sum())
        tokens += len(gap)
    return total / tokens if tokens else None


# -- for the terminal, which no recorded text reaches as markup or as a control sequence ----------------------------------------

_LONGEST_CELL = 100
_BAR = 20
"""Characters of the bar of a multiplier of 2."""


def list_trajectories(recorded: Sequence[RecordedTrajectory], title: str) -> Table:
    """One row a trajectory."""
    won = sum(each.trajectory.success for each in recorded)
    table = Table(title=f"{title}: {len(recorded)} trajectories, {won} successful")
    table.add_column("#", justify="right")
    table.add_column("task", overflow="fold")
    for header in ("family", "turns", "return", "success", "ended", "advantage", "disagreement"):
        table.add_column(header, justify="left" if header in ("family", "success", "ended") else "right")
    for each in recorded:
        trajectory = each.trajectory
        table.add_row(
            str(each.number),
            _cell(trajectory.task_id),
            _cell(trajectory.family),
            str(len(trajectory.turns)),
            f"{trajectory.episode_return:g}",
            "yes" if trajectory.success else "",
            _cell(trajectory.error or trajectory.ended),
            _number(each.advantage, ".2f"),
            _number(disagreement(each.trained, trajectory.success), ".4f"),
        )
    return table


def print_trajectory(recorded: RecordedTrajectory, tokens: TokenTexts | None) -> Iterator[Text | Rule]:
    """One trajectory, whole: what was read, answered and recorded in every turn.

    Args:
        recorded: the trajectory.
        tokens: texts of the run's tokens; ``None``: prompts and responses are left out.
    """
    trajectory = recorded.trajectory
    yield Rule(Text(visible(trajectory.task_id).replace("\n", " ")))
    yield Text(
        f"{visible(trajectory.family)} · iteration {recorded.iteration} #{recorded.number} · "
        f"{'succeeded' if trajectory.success else 'did not succeed'} ({trajectory.ended}) · return {trajectory.episode_return:g} · "
        f"advantage {_number(recorded.advantage, '.2f')}"
    )
    if trajectory.error:
        yield _part("error", trajectory.error)
    if tokens is None:
        yield Text("The run has no checkpoint whose tokenizer could decode prompts and responses.")
    for index, turn in enumerate(trajectory.turns):
        yield from _turn(index, turn, recorded.trained[index], recorded.classes[index], tokens)


def _turn(
    index: int, turn: Turn, trained: TrainedTurn | None, name: str, tokens: TokenTexts | None
) -> Iterator[Text | Rule]:
    flags = [
        "" if turn.valid else "invalid form",
        "not understood" if turn.invalid_action else "",
        "" if turn.finish_reason == "stop" else f"ended by {turn.finish_reason}",
        "" if turn.prompt_cut == "none" else f"prompt without {turn.prompt_cut}",
    ]
    yield Rule(Text(f"turn {index + 1}{' · ' if name else ''}{name}"), align="left")
    if trained is not None and trained.turn_weight is not None:
        bar = "" if math.isnan(trained.turn_weight) else "█" * round(_BAR * min(trained.turn_weight, 4.0) / 2)
        yield Text(f"multiplier {trained.turn_weight:.2f} {bar}  score {_number(trained.turn_score, '.4f')} nats")
    if tokens is None:
        yield _part("observation", turn.observation)
    else:
        label, opened = f"prompt, {len(turn.prompt_ids)} tokens", tokens.opened(turn)
        if trained is None or trained.evidence_ids is None:
            prompt = "".join(tokens.texts(turn.prompt_ids.tolist()))
        else:
            before, after = ("".join(tokens.texts(ids)) for ids in trained.split_prompt(turn))
            evidence = "".join(tokens.texts(trained.evidence_ids))
            label, prompt = f"{label}; ⟦⟧ is what the hindsight view adds", f"{before}⟦{evidence}⟧{after}"
        yield _part(label, prompt.removesuffix(opened))
        response = opened + "".join(tokens.texts(turn.response_ids.tolist()))
        yield _part(
            f"response, {len(turn.response_ids)} tokens{' behind text of the prompt' if opened else ''}", response
        )
    yield _part(f"action{''.join(f' ({flag})' for flag in flags if flag)}", turn.action)
    yield _part(f"outcome, reward {turn.reward:g}", turn.outcome)


def _part(label: str, text: str) -> Text:
    # Behind two blanks, so that no recorded line looks like one of this command's own.
    return Text.assemble((f"{label}\n", "dim"), "\n".join(f"  {line}" for line in visible(text).split("\n")))


def _cell(text: str) -> Text:
    return Text(visible(text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]} …").replace("\n", " "))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
