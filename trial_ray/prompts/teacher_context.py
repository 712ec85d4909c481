"""Teacher contexts: text that the teacher sees in addition to a turn's prompt when it scores the response.

TRIAL's teacher context is the outcome of the turn (TRIAL paper, Eq. 2 and 3). Other methods use feedback, advice, a solution
or the actions of a successful rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.config.run import RunSettings
from trial_ray.errors import ConfigError
from trial_ray.prompts.chat_template import encode_untrusted
from trial_ray.trajectory import TeacherContext, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Frame:
    """Fixed text around the content of a teacher context, and the position of the teacher context in the prompt.

    Attributes:
        lead: text before the content, which introduces it.
        close: text after the content.
        in_front: whether the teacher context is before the whole prompt; otherwise it is at the end of the user's message.
    """

    lead: str
    close: str = ""
    in_front: bool = False


OUTCOME = Frame("\n\nOutcome after the reply:\n")


@dataclass(frozen=True)
class TeacherText:
    """The text of a turn's teacher context, before it is encoded.

    Attributes:
        text: the content, with the environment's text unchanged.
        frame: text around the content.
    """

    text: str
    frame: Frame = OUTCOME


def outcome_text(outcome: str, *, terminal: bool, success: bool) -> TeacherText:
    """Return OutcomeView (TRIAL paper, Eq. 2): the environment's answer to a turn and, at the end, whether the task succeeded.

    In ALFWorld, the answer is the text that follows the action; in WebShop, the page that the action opened. The last turn of a
    truncated trajectory is not terminal, so its text is only the environment's answer.

    Args:
        outcome: the environment's answer to the action.
        terminal: whether the environment ended the episode with this turn (not a limit on turns or tokens).
        success: whether the task was solved; used only for a terminal turn.
    """
    text = outcome.strip()
    if terminal:
        verdict = f"The episode ended: the task {'succeeded' if success else 'failed'}."
        text = f"{text}\n{verdict}" if text else verdict
    return TeacherText(text)


CUT_MARK = " [cut] "


def encode_teacher_text(text: TeacherText, tokenizer: Any, max_tokens: int = 512) -> NDArray[np.int32]:
    """Return the token ids of a teacher context with its frame, tokenised separately from the prompt.

    Separate tokenisation keeps the ids of the ordinary prompt as they were sent, even if tokenising the joined text would
    merge tokens across the boundary. A text over the limit loses part of its middle, which a mark replaces. Its end is kept
    because it states whether the task succeeded. If the text contains the text of a special token, it is encoded as ordinary
    text.

    Args:
        text: text of the turn's teacher context.
        tokenizer: the policy's ``transformers`` tokenizer.
        max_tokens: maximum number of ids in the result, including the frame's texts and the mark.

    Returns:
        int32 ``[z]``, ``z <= max_tokens``.

    Raises:
        ConfigError: see :func:`require_room`.
    """
    close = encode_untrusted(tokenizer, text.frame.close)
    ids, limit = encode_untrusted(tokenizer, text.frame.lead + text.text), max_tokens - len(close)
    if len(ids) > limit:
        mark = encode_untrusted(tokenizer, CUT_MARK)
        end_length = require_room(text.frame, tokenizer, max_tokens) // 4
        ids = ids[: limit - len(mark) - end_length] + mark + ids[len(ids) - end_length :]
    return np.asarray(ids + close, dtype=np.int32)


def require_room(frame: Frame, tokenizer: Any, max_outcome_tokens: int) -> int:
    """Return the number of tokens, at least one, that a frame and the truncation mark leave for a truncated text.

    Args:
        frame: frame of the text.
        tokenizer: the policy's tokenizer.
        max_outcome_tokens: as ``max_tokens`` in :func:`encode_teacher_text`.

    Raises:
        ConfigError: the limit leaves no room for any of the text.
    """
    fixed = sum(len(encode_untrusted(tokenizer, text)) for text in (frame.lead, CUT_MARK, frame.close))
    if max_outcome_tokens <= fixed:
        raise ConfigError(
            f"max_outcome_tokens is {max_outcome_tokens}, expected more than {fixed}: the fixed text around the teacher context, "
            f"from {frame.lead.strip()!r} on, and the truncation mark already have that many. Raise it."
        )
    return max_outcome_tokens - fixed


def augment(prompt_ids: ArrayLike, insert_at: int, context_ids: ArrayLike) -> NDArray[np.int32]:
    """Return P_k⁺ (TRIAL paper, Eq. 3): the ordinary prompt with the teacher context inserted.

    Args:
        prompt_ids: integer ``[P]``, the ordinary prompt P_k.
        insert_at: index in ``prompt_ids``, in ``[0, P]``; the teacher context is inserted before this position.
        context_ids: integer ``[z]``, the teacher context.

    Returns:
        int32 ``[P + z]``.

    Raises:
        ValueError: ``insert_at`` is outside the prompt.
    """
    prompt, context = np.asarray(prompt_ids, np.int32), np.asarray(context_ids, np.int32)
    if not 0 <= insert_at <= len(prompt):
        raise ValueError(f"insert_at must be in [0, {len(prompt)}] for a prompt of that length, got {insert_at}.")
    return np.concatenate([prompt[:insert_at], context, prompt[insert_at:]])


FRAMES: dict[str, Frame] = {
    "outcome": OUTCOME,
    "feedback": Frame(
        "\n\nThe environment's immediate answer to this step:\n", "\n\nNow solve the task as it should be solved.\n"
    ),
    "skill": Frame("[Privileged advice on tasks of this kind]\n", "\n\n", in_front=True),
    "solution": Frame(
        "\n\nA solution of this task for reference, as actions from its beginning:\n",
        "\n\nSee why each of its steps is taken, then reach the same end by a reasoning of your own.\n",
    ),
    "peer": Frame("\n\nThe actions of another attempt at this task, which succeeded:\n", "\n"),
}
""":class:`Frame` of each teacher context, by the names in ``trial_ray.config.training.TEACHER_CONTEXTS``."""


def teacher_text(
    name: str, trajectory: Trajectory, index: int, adapter: EnvironmentAdapter, peer: Sequence[str] = ()
) -> TeacherText:
    """Return the text of one turn's teacher context.

    Args:
        name: name of the teacher context.
        trajectory: trajectory with the turn.
        index: index of the turn.
        adapter: adapter of the environment, with its advice on families of tasks.
        peer: actions of a successful rollout of the task, if ``trajectory`` failed; else empty.

    Raises:
        KeyError: no teacher context has that name.
        ConfigError: the environment has no solution, or its adapter has no advice.
    """
    frame, outcome = FRAMES[name], trajectory.turns[index].outcome
    if name == "outcome":
        # If a limit ended the episode, its last turn is not terminal.
        terminal = trajectory.ended == "terminated" and trajectory.successor(index) is None
        return outcome_text(outcome, terminal=terminal, success=trajectory.success)
    if name in ("feedback", "peer"):
        shown = outcome.strip() if name == "feedback" else ", ".join(peer)
        return TeacherText(shown, frame if shown else Frame(""))
    if name == "skill":
        skills = adapter.skills or {}
        needed, text = "advice of the adapter", skills.get(trajectory.family) or skills.get("")
    else:
        needed, text = "the environment's own solution (its `walkthrough`)", ", ".join(trajectory.solution)
    if not text:
        raise ConfigError(
            f"The {name!r} teacher context needs {needed}; {adapter.env_id} has none. Choose another teacher_context."
        )
    return TeacherText(text, frame)


def add_teacher_contexts(group: TrajectoryGroup, config: RunSettings, tokenizer: Any) -> None:
    """Encode the config's teacher context, if it has one, for every turn of the group's completed rollouts.

    Args:
        group: group whose rollouts have all ended; ``teacher_context`` is set in its turns.
        config: config with the teacher context and its limit.
        tokenizer: the policy's tokenizer.

    Raises:
        ConfigError: as in :func:`teacher_text` and :func:`encode_teacher_text`.
    """
    if (name := config.teacher_context) is None:
        return
    for trajectory in group.completed:
        adapter, peer = config.adapter_of(trajectory.environment), group.peer_actions(trajectory)
        turns = []
        for index, turn in enumerate(trajectory.turns):
            text = teacher_text(name, trajectory, index, adapter, peer)
            ids = encode_teacher_text(text, tokenizer, config.max_outcome_tokens)
            context = TeacherContext(ids, 0 if text.frame.in_front else turn.insert_at)
            turns.append(replace(turn, teacher_context=context))
        trajectory.turns = turns
