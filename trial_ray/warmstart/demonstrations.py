"""Demonstrations: a player that sees no more than the policy plays tasks of its own, and its decisions are written down.

It knows the task, the answers so far and the actions on offer: nothing that a prompt could not hold. A solution would show
where hidden objects are, which no policy can learn to know. Only where the task says all that its solution depends on, as a
question does, a demonstrator may read it (``SolutionReader``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trial_ray.environments.adapter import Demonstrator, begin, plan
from trial_ray.environments.guarded import GuardedEnv, StepResult
from trial_ray.errors import EnvironmentFaultError, PromptTooLongError
from trial_ray.files import checked_content, get_or_build
from trial_ray.rollout.episode import History, play_episode
from trial_ray.rollout.hindsight import augment, encode_evidence, encode_untrusted, outcome_view
from trial_ray.rollout.prompts import Prompt
from trial_ray.rollout.tool_conversation import ToolConversationBuilder
from trial_ray.rollout.trajectory import Trajectory, Turn
from trial_ray.warmstart.cloning import Example
from trial_ray.warmstart.policy import Policy, make_demonstrator
from trial_ray.warmstart.settings import DEMONSTRATED, WarmStartSettings, task_set

MALFORMED_SHARE = 0.3
"""Share of the noisy actions that the environment does not understand."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One decision of the demonstrator.

    Attributes:
        task_id: the task.
        ordinary: the ordinary prompt, and the response that states the demonstrated action.
        hindsight: the prompt with the outcome of the action that was carried out, and the response that states what should have
            been: the planned action, unless the demonstrator might as well have planned the one that was carried out.
        planned: whether that was carried out; otherwise a suboptimal action was, or action noise.
    """

    task_id: str
    ordinary: Example
    hindsight: Example
    planned: bool


def collect(policy: Policy, on_game: Callable[[], None] = lambda: None) -> list[Demonstration]:
    """Let the demonstrator play ``games`` × ``episodes_per_game`` episodes; one demonstration a turn.

    Args:
        policy: that shall imitate it.
        on_game: called after each task.

    Raises:
        ConfigError: there is no demonstrator and the environment lists no actions.
        EnvironmentFaultError: the environment fails.
        PromptTooLongError: a prompt does not fit.
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
            on_game()
    return demonstrations


@dataclass(frozen=True, slots=True)
class DemonstratorPlayer:
    """A demonstrator in an episode: its plan is what the policy shall imitate; action noise may carry out something else.

    Attributes:
        policy: that shall imitate it.
        demonstrator: plans.
        random: draws noise, and the demonstrator's seed.
        solution: the environment's, for a demonstrator that reads it.
        planned: of each turn, whether the planned action was carried out, the response that states what the policy shall imitate,
            and the one that states the planned action.
    """

    policy: Policy
    demonstrator: Demonstrator
    random: np.random.Generator
    solution: Callable[[], Sequence[str]]
    planned: list[tuple[bool, np.ndarray, np.ndarray]] = field(default_factory=list)

    async def act(self, result: StepResult, history: History, step: int) -> Turn:
        """Write the prompt, ask the demonstrator, apply noise; see :class:`~trial_ray.rollout.episode.Player`."""
        if step == 1:
            seed = int(self.random.integers(2**31))
            begin(self.demonstrator, result.task, result.observation, seed, self.solution)
        actions, settings, builder = tuple(result.admissible_actions), self.policy.settings, self.policy.builder
        prompt = builder.write(result, history)
        planned, as_good = plan(self.demonstrator, result.observation, actions)
        chosen = planned
        if self.random.random() < settings.suboptimal_probability:
            chosen = self._other(actions, planned) or planned
        carried_out = chosen
        if self.random.random() < settings.action_noise and (other := self._other(actions, chosen)):
            carried_out = self._malformed(other, (chosen, *actions)) or other
        self.demonstrator.carried_out(carried_out)
        planned = carried_out if carried_out in as_good else planned
        imitated, better = (self._response(prompt, action) for action in (chosen, planned))
        self.planned.append((planned == carried_out, imitated, better))
        # A conversation goes on from what was carried out.
        said = imitated if carried_out == chosen else self._response(prompt, carried_out)
        return Turn(action=carried_out, prompt_ids=prompt.ids, insert_at=prompt.insert_at, response_ids=said)

    def _response(self, prompt: Prompt, action: str) -> np.ndarray:
        """Ids of the response that states an action."""
        builder, style = self.policy.builder, self.policy.settings.response_style
        if isinstance(builder, ToolConversationBuilder):
            return builder.encode_action(prompt, action)
        opened = builder.responses.opened(prompt.ids, prompt.insert_at)
        return encode_response(self.policy.tokenizer, action, style, opened)

    def demonstrations(self, trajectory: Trajectory) -> list[Demonstration]:
        """Demonstrations of the last episode."""
        evidence = outcome_evidence(trajectory, self.policy.tokenizer)
        return [
            Demonstration(
                trajectory.task_id,
                Example(turn.prompt_ids, imitated),
                Example(augment(turn.prompt_ids, turn.insert_at, shown), better),
                planned,
            )
            for turn, shown, (planned, imitated, better) in zip(trajectory.turns, evidence, self.planned, strict=True)
        ]

    def _malformed(self, action: str, known: Sequence[str]) -> str | None:
        """Now and then the action with a word of another in place of one of its own."""
        if self.random.random() >= MALFORMED_SHARE:
            return None
        words = action.split()
        place = int(self.random.integers(len(words)))
        words[place : place + 1] = str(self.random.choice(known[1:])).split()[-1:]
        malformed = " ".join(words)
        # Words of two actions on offer can make a third one that is, or the chosen one.
        return None if malformed in known or not self._can_say(malformed) else malformed

    def _can_say(self, action: str) -> bool:
        """Whether a response can state an action; calls of tools cannot state any."""
        builder = self.policy.builder
        return not isinstance(builder, ToolConversationBuilder) or builder.tools.call_of(action) is not None

    def _other(self, actions: Sequence[str], than: str) -> str | None:
        """Any action on offer but one; ``None`` if there is no other."""
        passed_over = {than, *getattr(self.policy.builder.template, "hidden_actions", ())}
        others = [each for each in actions if each.strip() and each not in passed_over]
        return str(self.random.choice(others)) if others else None


def outcome_evidence(trajectory: Trajectory, tokenizer: Any) -> list[np.ndarray]:
    """Ids of the outcome view of every turn, int32 ``[z]`` each."""
    last = len(trajectory.turns) - 1 if trajectory.ended == "terminated" else None
    return [
        encode_evidence(outcome_view(turn.outcome, terminal=index == last, success=trajectory.success), tokenizer)
        for index, turn in enumerate(trajectory.turns)
    ]


def encode_response(tokenizer: Any, action: str, style: str, opened: str = "") -> np.ndarray:
    """Ids of the response that states an action, end token included: int32 ``[y]``; an action that spells one is no end.

    Args:
        tokenizer: the policy's.
        action: the action.
        style: form of the response, ``"plain"`` or ``"tagged"``.
        opened: text at the end of the prompt that belongs to the response already.
    """
    if style == "plain":
        return np.asarray([*encode_untrusted(tokenizer, action), tokenizer.eos_token_id], dtype=np.int32)
    reasoning, text = "<think>\n\n</think>".removeprefix(opened), f"\n<action>{action}</action>"
    if "</think>" in tokenizer.get_added_vocab():  # a token of its own, which may be special
        ids = [*tokenizer.encode(reasoning, add_special_tokens=False), *encode_untrusted(tokenizer, text)]
    else:
        ids = encode_untrusted(tokenizer, reasoning + text)
    return np.asarray([*ids, tokenizer.eos_token_id], dtype=np.int32)


def to_examples(demonstrations: Sequence[Demonstration], settings: WarmStartSettings) -> list[Example]:
    """Examples to clone: every demonstrated decision, and hindsight views beside them.

    The ordinary prompt is answered with what was demonstrated, suboptimal actions included. The hindsight view shows the
    outcome of the action that was carried out, and is answered with what the demonstrator had planned. So the outcome of a
    planned action speaks for it, and that of a suboptimal one, or of action noise, for what should have been done instead: in
    hindsight the model judges better than it acts, and the gap (Eq. 4) has the sign of that judgement.

    ``hindsight_wasted_share`` of the views show the outcome of an action that was not the planned one. As often as demonstrated,
    an outcome would mostly be that of the planned action, and a model would learn to repeat what it reads there. Each decision
    is shown as often as any other of its kind, or once more.
    """
    fraction, wasted_share = settings.hindsight_fraction, settings.hindsight_wasted_share
    random = np.random.default_rng([settings.seed, 1])
    examples = [each.ordinary for each in demonstrations]
    number = round(len(demonstrations) * fraction / (1 - fraction))
    wasted = [each.hindsight for each in demonstrations if not each.planned]
    kept = [each.hindsight for each in demonstrations if each.planned]
    from_wasted = round(number * wasted_share) if wasted and kept else number * bool(wasted)
    for kind, count in ((wasted, from_wasted), (kept, number - from_wasted)):
        drawn: list[int] = []
        while len(drawn) < count:
            drawn += random.permutation(len(kind)).tolist()
        examples += [kind[index] for index in drawn[:count]]
    return examples


def kept_examples(key: str, make: Callable[[], Sequence[Example]]) -> list[Example]:
    """The examples of a warm start in their order: those kept under ``key``, else made, and kept once there are all of them.

    Args:
        key: of everything that decides the examples.
        make: collects them.

    Raises:
        CheckpointError: the kept file is damaged.
    """
    import pandas

    name = "examples.parquet"
    folder, _ = get_or_build("demonstrations", key, lambda work: pandas.DataFrame(make()).to_parquet(work / name))
    with checked_content(folder / name):
        return [Example(*row) for row in pandas.read_parquet(folder / name).itertuples(index=False)]
