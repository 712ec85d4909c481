"""Trajectories for the terminal. No recorded text is taken as markup or reaches the terminal as a control sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trial_ray.reports.recorded import RecordedTrajectory, TokenTexts, TrainedTurn, visible
from trial_ray.reports.viewer import disagreement
from trial_ray.rollout.trajectory import Turn

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
    yield Rule(Text(f"turn {index + 1} · {name}"), align="left")
    if trained is not None and trained.turn_weight is not None:
        bar = "" if math.isnan(trained.turn_weight) else "█" * round(_BAR * min(trained.turn_weight, 4.0) / 2)
        yield Text(f"multiplier {trained.turn_weight:.2f} {bar}  score {_number(trained.turn_score, '.4f')} nats")
    if tokens is None:
        yield _part("observation", turn.observation)
    else:
        label = f"prompt, {len(turn.prompt_ids)} tokens"
        if trained is None or trained.evidence_ids is None:
            yield _part(label, "".join(tokens.texts(turn.prompt_ids.tolist())))
        else:
            before, after = ("".join(tokens.texts(ids)) for ids in trained.split_prompt(turn))
            evidence = "".join(tokens.texts(trained.evidence_ids))
            yield _part(f"{label}; ⟦⟧ is what the hindsight view adds", f"{before}⟦{evidence}⟧{after}")
        yield _part(f"response, {len(turn.response_ids)} tokens", "".join(tokens.texts(turn.response_ids.tolist())))
    yield _part(f"action{''.join(f' ({flag})' for flag in flags if flag)}", turn.action)
    yield _part(f"outcome, reward {turn.reward:g}", turn.outcome)


def _part(label: str, text: str) -> Text:
    return Text.assemble((f"{label}\n", "dim"), _indented(visible(text)))


def _indented(text: str) -> str:
    """Behind two blanks, so that no recorded line looks like one of this command's own."""
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _cell(text: str) -> Text:
    return Text(visible(text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]} …").replace("\n", " "))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
