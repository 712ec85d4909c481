"""Turns, trajectories, the group of rollouts of one task, and the result of an episode."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trial_envs.program import ChatCall
from trial_ray.config.training import Reward, reward_name
from trial_ray.errors import ConfigError
from trial_ray.objectives import equal_up_to_rounding

PromptCut = Literal["none", "history", "observation"]
"""Parts that a prompt lost to its length limit: none, past turns, or past turns and the middle of the observation."""

Ending = Literal["terminated", "turn_limit", "prompt_limit", "failed"]
FailedBy = Literal["environment", "engine"]


@dataclass(frozen=True, slots=True)
class TeacherContext:
    """The text that is added to a turn's prompt when the teacher scores the turn's response.

    Attributes:
        ids: int32 ``[z]``, token ids of the text.
        insert_at: index in the prompt; the ids are inserted before this position.
    """

    ids: NDArray[np.int32]
    insert_at: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored_context, (self.ids.astype(np.int32, copy=False).tobytes(), self.insert_at)


def _restored_context(ids: bytes, insert_at: int) -> TeacherContext:
    return TeacherContext(np.frombuffer(ids, np.int32), insert_at)


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision of the policy: token ids exactly as sent to and returned by the engine, and texts for teachers and records.

    A player (policy, expert or chat API) creates the turn, and the episode adds observation, outcome, reward and
    ``invalid_action``. An expert that is evaluated sets only the action and, if it writes one, ``response``. A player for a
    chat API, which has no token ids, sets ``messages`` and ``response``.

    Attributes:
        prompt_ids: int32 ``[P]``, the prompt as sent to the engine, without teacher context.
        response_ids: int32 ``[y]``, the response as sampled, its stop token included.
        logprobs: float32 ``[y]``, behaviour log-probabilities in nats, as the engine reported them.
        weight_version: version of the weights that sampled the response.
        insert_at: index in ``prompt_ids`` of the end of the user's message; teacher context that does not precede the prompt is
            inserted there.
        observation: the environment's observation before the decision.
        action: the action sent to the environment; several actions are on separate lines.
        valid: whether the response had the required format (not whether the action was admissible).
        outcome: the environment's answer to the action. For a response without an action, the player sets this
            text, and the environment takes no step.
        reward: the environment's reward for this step.
        finish_reason: ``"stop"`` or ``"length"``.
        prompt_cut: parts dropped from the prompt because of its length.
        invalid_action: whether the environment reported that it did not understand the action.
        reasoning_tokens: number of reasoning tokens in the response; logged but not recorded.
        teacher_context: context of the teacher, which the env runner adds when the group is complete; ``None`` if the config has
            none. Not recorded with the trajectory.
        admissible_actions: the actions that the environment offered before the decision; empty if it offered none.
        call: the agent program's chat request that the turn answers; ``None`` in environments without a program.
        messages: chat messages that were first sent in this turn, as JSON; empty if the turn has ids.
        response: the response of a chat API, with reasoning, or of an expert; empty if the turn has ids.
        actions: the actions of a response that contains several, in order; each is a step of the environment. Empty for other
            responses.
        answers: the environment's answers to ``actions``, as in ``outcome``; actions after the end of the episode have none.
        temperature: temperature at which the response was sampled; 0 means greedy decoding.
    """

    prompt_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    response_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    weight_version: int = 0
    insert_at: int = 0
    observation: str = ""
    action: str = ""
    valid: bool = True
    outcome: str = ""
    reward: float = 0.0
    finish_reason: str = "stop"
    prompt_cut: PromptCut = "none"
    invalid_action: bool = False
    reasoning_tokens: int = 0
    teacher_context: TeacherContext | None = None
    admissible_actions: tuple[str, ...] = ()
    call: ChatCall | None = None
    messages: str = ""
    response: str = ""
    actions: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    temperature: float = 1.0

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle bytes: cloudpickle would run Python code for every array and slotted dataclass, which would be slow.
        arrays = [getattr(self, name).astype(kind, copy=False).tobytes() for name, kind in _ARRAYS.items()]
        return _restored, (arrays, _rest(self))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt, without teacher context, and of the response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def all_actions(self) -> tuple[str, ...]:
        """Actions of the response that the environment answered, in order; a tool call without an action is an empty string."""
        return (self.actions or (self.action,))[: self.num_steps]

    @property
    def num_steps(self) -> int:
        """Number of actions that the environment answered; a response without an action counts as one."""
        return len(self.answers) or 1


_ARRAYS = {"prompt_ids": np.int32, "response_ids": np.int32, "logprobs": np.float32}
_rest = attrgetter(*(attribute.name for attribute in fields(Turn) if attribute.name not in _ARRAYS))


def _restored(arrays: Sequence[bytes], rest: Sequence[Any]) -> Turn:
    prompt_ids, response_ids, logprobs = map(np.frombuffer, arrays, _ARRAYS.values())
    return Turn(prompt_ids, response_ids, logprobs, *rest)


@dataclass(slots=True)
class Trajectory:
    """One rollout of one task.

    Attributes:
        ended: reason for the end: the environment terminated the rollout, a limit on turns or prompt tokens truncated it, or an
            engine or the environment failed. Failed rollouts never enter group statistics.
        error: message of the failure; ``None`` if nothing failed.
        failed_by: whether the environment or the engine failed; ``None`` if nothing failed.
        solution: the environment's own solution (its ``walkthrough``), empty if unavailable; only teacher contexts show it.
        environment: name of the environment in the run (see ``EnvironmentEntry.name``).
        rewards: sums of the environment's named rewards (``info["rewards"]``), and the parts that a reward function returns;
            logged but not recorded.
        function_reward: value of the run's reward function; ``None`` if none was called.
        instruction: the task in words, as shown in prompts.
        calls: numbers of chat requests of an agent program that were received, answered, cancelled and refused; logged but not
            recorded.
    """

    task_id: str
    family: str
    seed: int
    turns: list[Turn] = field(default_factory=list)
    success: bool = False
    score: float = 0.0
    ended: Ending = "terminated"
    error: str | None = None
    failed_by: FailedBy | None = None
    solution: tuple[str, ...] = ()
    environment: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    function_reward: float | None = None
    instruction: str = ""
    calls: Mapping[str, int] = field(default_factory=dict)

    def successor(self, index: int) -> int | None:
        """Return the index of the turn that follows turn ``index`` in its conversation; ``None`` for the last turn."""
        turns = self.turns
        if turns[index].call is None:
            return index + 1 if index + 1 < len(turns) else None
        later = range(index + 1, len(turns))
        return next((other for other in later if (call := turns[other].call) and call.follows(index)), None)

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of the environment's rewards; exactly 0 if they cancel each other up to rounding."""
        rewards = [float(turn.reward) for turn in self.turns]
        total, gained = sum(rewards), sum(reward for reward in rewards if reward > 0)
        return 0.0 if equal_up_to_rounding(gained, gained - total) else total

    def outcome_reward(self, reward: Reward) -> float:
        """Return the reward that ``reward`` chooses: success (0 or 1), score, return, or the reward function's value.

        The result is R_i in the TRIAL paper, Eq. 1, before the factor ``reward_scale``.

        Raises:
            ConfigError: ``reward`` is a function that was not called with this rollout.
        """
        success = float(self.success)
        rewards = {"success": success, "per_turn": success, "score": self.score, "return": self.episode_return}
        value = rewards.get(reward, self.function_reward) if isinstance(reward, str) else self.function_reward
        if value is None:
            raise ConfigError(
                f"reward is {reward_name(reward)}, which was not called with a rollout of task {self.task_id!r}. Set "
                ".training(reward=FUNCTION) before rollouts are played; a recorded config has only its name."
            )
        return value

    @property
    def failed(self) -> bool:
        """True if an engine or the environment failed during the rollout."""
        return self.ended == "failed"

    @property
    def is_completed(self) -> bool:
        """True if the rollout can be trained on: it did not fail, and has at least one turn."""
        return not self.failed and bool(self.turns)


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The result of one rollout.

    Attributes:
        task_id: the environment's id of the task instance.
        family: the kind of task, for example ``pick_and_place``.
        success: whether the task was solved.
        score: the environment's score in [0, 1].
        turns: number of turns.
        ended: as in :class:`Trajectory`.
    """

    task_id: str
    family: str
    success: bool
    score: float
    turns: int
    ended: Ending

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory) -> EpisodeResult:
        """Create the result of a rollout."""
        return cls(
            task_id=trajectory.task_id,
            family=trajectory.family,
            success=bool(trajectory.success),
            score=float(trajectory.score),
            turns=len(trajectory.turns),
            ended=trajectory.ended,
        )

    @property
    def failed(self) -> bool:
        """True if an engine or the environment failed, so that the result says nothing about the policy."""
        return self.ended == "failed"


@dataclass(slots=True)
class TrajectoryGroup:
    """The G rollouts of one task instance (same game or goal, same initial state).

    ``group_id`` is unique in a run and identifies the group in recorded trajectories.
    """

    task_id: str
    trajectories: list[Trajectory]
    group_id: str = field(default_factory=lambda: uuid.uuid4().hex[:16], compare=False)

    def __len__(self) -> int:
        """Return the number of turns in the group; RLlib counts sampled steps by ``len``."""
        return sum(len(trajectory.turns) for trajectory in self.trajectories)

    def peer_actions(self, trajectory: Trajectory) -> tuple[str, ...]:
        """Return the actions of the group's first successful rollout if ``trajectory`` did not succeed; else an empty tuple."""
        if trajectory.success:
            return ()
        peers = (rollout for rollout in self.completed if rollout.success)
        return next((tuple(action for turn in peer.turns for action in turn.all_actions) for peer in peers), ())

    @property
    def starts_differ(self) -> bool:
        """True if completed rollouts begin with different observations or prompts."""
        first = [trajectory.turns[0] for trajectory in self.completed]
        return len({(turn.observation, turn.prompt_ids.tobytes()) for turn in first}) > 1

    @property
    def completed(self) -> list[Trajectory]:
        """Completed rollouts, which can be trained on."""
        return [trajectory for trajectory in self.trajectories if trajectory.is_completed]
