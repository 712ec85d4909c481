"""Demonstrations: an expert with the same information as the policy plays training tasks, and its decisions are recorded.

The expert receives the task, the observations so far and the admissible actions: only information that a prompt can contain. A
solution would reveal hidden objects, which a policy cannot learn to predict. An expert may read the solution
(``SolutionReader``) only for tasks that state everything on which their solution depends, such as questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trial_ray.adapters.adapter import Demonstrator, Speaker, begin, plan
from trial_ray.adapters.guarded import GuardedEnv, StepResult
from trial_ray.errors import EnvironmentFaultError, PromptTooLongError
from trial_ray.prompts.teacher_context import augment, encode_teacher_text, outcome_text
from trial_ray.prompts.tool_conversation import ToolConversationBuilder
from trial_ray.prompts.writer import Prompt
from trial_ray.rollout.episode import History, play_episode
from trial_ray.trajectory import TeacherContext, Trajectory, Turn
from trial_ray.warmstart.cloning import Example
from trial_ray.warmstart.policy import Policy, make_demonstrator
from trial_ray.warmstart.settings import DEMONSTRATED, WarmStartSettings, task_set

MALFORMED_SHARE = 0.3
"""Probability of trying to make an action drawn by ``action_noise`` malformed, so that the environment does not understand it."""


@dataclass(frozen=True)
class Demonstration:
    """One decision of the expert.

    Attributes:
        task_id: the task.
        ordinary: the prompt without the outcome, and the response with the demonstrated action.
        hindsight: the prompt with the outcome of the executed action, and the response with the action in hindsight: the
            planned action, or the executed action if the expert could have planned it as well.
        planned: True if the action in hindsight was executed; False if a suboptimal or noisy action was executed instead.
    """

    task_id: str
    ordinary: Example
    hindsight: Example
    planned: bool


def collect(policy: Policy, on_game: Callable[[int], None] = lambda number: None) -> list[Demonstration]:
    """Play the demonstration tasks of ``policy.settings`` with the expert; return one demonstration per turn.

    Args:
        policy: policy that will imitate the expert.
        on_game: called after each task, with the number of tasks played so far.

    Raises:
        ConfigError: the adapter has no expert and the environment lists no actions.
        EnvironmentFaultError: the environment fails.
        PromptTooLongError: a prompt exceeds the prompt limit.
    """
    settings = policy.settings
    entry, tasks = task_set(settings, policy.entry, DEMONSTRATED)
    demonstrator = make_demonstrator(entry)
    demonstrations: list[Demonstration] = []
    with closing(GuardedEnv(entry)) as env:
        for game, task_id in enumerate(tasks):
            for episode in range(settings.episodes_per_game):
                random = np.random.default_rng([settings.seed, game, episode])
                player = DemonstratorPlayer(policy, demonstrator, random, env.walkthrough)
                trajectory = asyncio.run(play_episode(env, task_id, player))
                if trajectory.failed:
                    raise EnvironmentFaultError(trajectory.error)
                if trajectory.ended == "prompt_limit":
                    raise PromptTooLongError(trajectory.error)
                demonstrations += player.demonstrations(trajectory)
            on_game(game + 1)
    return demonstrations


@dataclass(frozen=True)
class DemonstratorPlayer:
    """Plays an episode with the expert.

    The policy imitates the chosen action: the expert's planned action or, with ``suboptimal_probability``, another one. With
    the probability ``action_noise``, a different action than the chosen one is executed.

    Attributes:
        policy: policy that will imitate the expert.
        demonstrator: the expert.
        random: generator for the noise and for the expert's seed.
        solution: returns the environment's solution, for an expert that reads it.
        planned: for each turn, values for its :class:`Demonstration`: whether the action in hindsight was executed, the
            response with the action to imitate, and the response with the action in hindsight.
    """

    policy: Policy
    demonstrator: Demonstrator
    random: np.random.Generator
    solution: Callable[[], Sequence[str]]
    planned: list[tuple[bool, np.ndarray, np.ndarray]] = field(default_factory=list)

    async def act(self, result: StepResult, history: History, step: int) -> Turn:
        """Write the prompt, choose the expert's action and apply noise; see :class:`~trial_ray.rollout.episode.Player`."""
        if step == 1:
            seed = int(self.random.integers(2**31))
            begin(self.demonstrator, result.task, result.observation, seed, self.solution)
        actions, settings, builder = tuple(result.admissible_actions), self.policy.settings, self.policy.builder
        prompt = builder.write(result, history)
        planned, options = plan(self.demonstrator, result.observation, actions)
        chosen = planned
        if self.random.random() < settings.suboptimal_probability:
            chosen = self._other(actions, planned) or planned
        carried_out = chosen
        if self.random.random() < settings.action_noise and (other := self._other(actions, chosen)):
            carried_out = self._malformed(other, (chosen, *actions)) or other
        self.demonstrator.carried_out(carried_out)
        planned = carried_out if carried_out in options else planned
        imitated, better = (self._response(prompt, action) for action in (chosen, planned))
        self.planned.append((planned == carried_out, imitated, better))
        # Later prompts of a conversation contain the executed action, not the imitated one.
        response = imitated if carried_out == chosen else self._response(prompt, carried_out)
        return Turn(action=carried_out, prompt_ids=prompt.ids, insert_at=prompt.insert_at, response_ids=response)

    def _response(self, prompt: Prompt, action: str) -> np.ndarray:
        """Return the token ids of the response with an action."""
        builder, style = self.policy.builder, self.policy.settings.response_style
        if isinstance(builder, ToolConversationBuilder):
            return builder.encode_action(prompt, action)
        demonstrator = self.demonstrator
        text = demonstrator.response(action) if isinstance(demonstrator, Speaker) else response_text(action, style)
        return builder.encode(prompt, text)

    def demonstrations(self, trajectory: Trajectory) -> list[Demonstration]:
        """Return the demonstrations of the episode that was played, one per turn."""
        contexts = outcome_contexts(trajectory, self.policy.tokenizer)
        return [
            Demonstration(
                trajectory.task_id,
                Example(turn.prompt_ids, imitated),
                Example(augment(turn.prompt_ids, context.insert_at, context.ids), better),
                planned,
            )
            for turn, context, (planned, imitated, better) in zip(trajectory.turns, contexts, self.planned, strict=True)
        ]

    def _malformed(self, action: str, known: Sequence[str]) -> str | None:
        """Replace a random word of ``action`` by the last word of a random admissible action.

        Return ``None`` with probability ``1 - MALFORMED_SHARE``, if the result is in ``known``, or if no response can express it.
        """
        if self.random.random() >= MALFORMED_SHARE:
            return None
        words = action.split()
        place = int(self.random.integers(len(words)))
        words[place : place + 1] = str(self.random.choice(known[1:])).split()[-1:]
        malformed = " ".join(words)
        # The words of two admissible actions may form a third admissible action or the chosen one.
        if malformed in known:
            return None
        builder = self.policy.builder
        # Not every action can be expressed as a tool call.
        if isinstance(builder, ToolConversationBuilder) and builder.tools.call_of(malformed) is None:
            return None
        return malformed

    def _other(self, actions: Sequence[str], than: str) -> str | None:
        """Draw an admissible action that is not ``than``; return ``None`` if there is none."""
        excluded = {than, *getattr(self.policy.builder.template, "hidden_actions", ())}
        others = [action for action in actions if action.strip() and action not in excluded]
        return str(self.random.choice(others)) if others else None


def outcome_contexts(trajectory: Trajectory, tokenizer: Any) -> list[TeacherContext]:
    """Return one teacher context for each turn, which contains the outcome of that turn."""
    last = len(trajectory.turns) - 1 if trajectory.ended == "terminated" else None
    return [
        TeacherContext(
            encode_teacher_text(
                outcome_text(turn.outcome, terminal=index == last, success=trajectory.success), tokenizer
            ),
            turn.insert_at,
        )
        for index, turn in enumerate(trajectory.turns)
    ]


def response_text(action: str, style: str) -> str:
    """Return the response that consists of an action, with the tags that the prompt style needs."""
    return action if style == "plain" else f"<think>\n\n</think>\n<action>{action}</action>"


def to_examples(demonstrations: Sequence[Demonstration], settings: WarmStartSettings) -> list[Example]:
    """Return the examples to clone: all demonstrated decisions, and additional examples with teacher context.

    The response to an ordinary prompt is the demonstrated action, including suboptimal actions. A prompt with teacher context
    contains the outcome of the executed action, and its response is the planned action. The model therefore learns that the
    outcome of a planned action confirms this action, and that the outcome of a suboptimal or noisy action suggests the planned
    action instead. The model can judge an action by its outcome better than it can choose an action in advance; the sign of
    the hindsight log-ratio (TRIAL paper, Eq. 4) is this judgement.

    A share ``hindsight_wasted_share`` of the examples with teacher context has the outcome of an action that was not planned.
    If all outcomes were used equally often, most would be outcomes of planned actions, and the model would learn to repeat the
    action in the teacher context. Among the planned actions, and among the others, all decisions are used equally often, up to
    a difference of one.
    """
    fraction, wasted_share = settings.hindsight_fraction, settings.hindsight_wasted_share
    random = np.random.default_rng([settings.seed, 1])
    examples = [demonstration.ordinary for demonstration in demonstrations]
    number = round(len(demonstrations) * fraction / (1 - fraction))
    wasted = [demonstration.hindsight for demonstration in demonstrations if not demonstration.planned]
    planned = [demonstration.hindsight for demonstration in demonstrations if demonstration.planned]
    num_wasted = round(number * wasted_share) if wasted and planned else number * bool(wasted)
    for kind, count in ((wasted, num_wasted), (planned, number - num_wasted)):
        drawn: list[int] = []
        while len(drawn) < count:
            drawn += random.permutation(len(kind)).tolist()
        examples += [kind[index] for index in drawn[:count]]
    return examples
