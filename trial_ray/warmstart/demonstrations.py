"""Demonstrations: a player that sees no more than the policy plays tasks of its own, and its decisions are written down.

It knows the task, the answers so far and the actions on offer: nothing that a prompt could not hold. A solution would show
where hidden objects are, which no policy can learn to know. Only where the task says all that its solution depends on, as a
question does, a demonstrator may read it (``SolutionReader``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trial_ray.environments.adapter import Demonstrator, RandomPlay, begin, plan
from trial_ray.environments.guarded import GuardedEnv, StepResult
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.environments.templates import PromptContext, PromptTemplate
from trial_ray.errors import EnvironmentFaultError, PromptTooLongError
from trial_ray.files import get_or_build
from trial_ray.rollout.episode import Decision, History, Player, play_episode
from trial_ray.rollout.hindsight import augment, encode_evidence, encode_untrusted, outcome_view
from trial_ray.rollout.partitions import IDS, new_schema, read_rows, write_rows
from trial_ray.rollout.prompts import PromptBuilder, records
from trial_ray.rollout.trajectory import Trajectory
from trial_ray.warmstart.cloning import Example
from trial_ray.warmstart.settings import DEMONSTRATED, WarmStartSettings, task_set

MALFORMED_SHARE = 0.3
"""Share of the noisy actions that the environment does not understand."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One decision of the demonstrator.

    Attributes:
        prompt_ids: int32 ``[P]``, the ordinary prompt.
        insert_at: where in it evidence goes.
        response_ids: int32 ``[y]``, the response that states the demonstrated action, end token included.
        planned_ids: int32 ``[y']``, that of what should have been carried out: the planned action, unless the demonstrator might
            as well have planned the one that was.
        evidence_ids: int32 ``[z]``, outcome of the action that was carried out.
        planned: whether that was carried out; otherwise a suboptimal action was, or action noise.
        task_id: the task.
        actions: actions on offer; the demonstrated one is among them.
    """

    prompt_ids: np.ndarray
    insert_at: int
    response_ids: np.ndarray
    planned_ids: np.ndarray
    evidence_ids: np.ndarray
    planned: bool
    task_id: str
    actions: tuple[str, ...]


def collect(
    settings: WarmStartSettings,
    entry: EnvironmentEntry,
    tokenizer: Any,
    builder: PromptBuilder,
    on_game: Callable[[], None] = lambda: None,
) -> list[Demonstration]:
    """Let the demonstrator play ``games`` × ``episodes_per_game`` episodes; one demonstration a turn.

    Args:
        settings: which tasks, how many episodes, how much action noise.
        entry: the environment.
        tokenizer: writes responses and evidence.
        builder: writes prompts, exactly as rollouts do.
        on_game: called after each task.

    Raises:
        ConfigError: there is no demonstrator and the environment lists no actions.
        EnvironmentFaultError: the environment fails.
        PromptTooLongError: a prompt does not fit.
    """
    entry, tasks = task_set(settings, entry, DEMONSTRATED)
    demonstrator = make_demonstrator(entry)
    demonstrations: list[Demonstration] = []
    with closing(GuardedEnv(entry)) as env:
        for game, task_id in enumerate(tasks):
            for episode in range(settings.episodes_per_game):
                seeds = [settings.seed, game, episode]
                player = DemonstratorPlayer(settings, tokenizer, builder, demonstrator, seeds, env.walkthrough)
                demonstrations += player.demonstrations(_play(env, task_id, player))
            on_game()
    return demonstrations


def collect_texts(settings: WarmStartSettings, entry: EnvironmentEntry) -> Iterator[str]:
    """Tasks, prompts, observations and actions of one undisturbed episode of every demonstrated task.

    Raises:
        ConfigError, EnvironmentFaultError: as :func:`collect`.
    """
    entry, tasks = task_set(settings, entry, DEMONSTRATED)
    demonstrator = make_demonstrator(entry)
    with closing(GuardedEnv(entry)) as env:
        for task_id in tasks:
            template = entry.adapter.template(settings.response_style)
            player = _TextCollector(demonstrator, template, settings.seed, env.walkthrough)
            _play(env, task_id, player)
            yield from player.texts


def make_demonstrator(entry: EnvironmentEntry) -> Demonstrator:
    """The player of the environment's adapter, else one that draws actions at random."""
    return (entry.adapter.warm_start.demonstrator or RandomPlay)()


def _play(env: GuardedEnv, task_id: str, player: Player) -> Trajectory:
    trajectory = asyncio.run(play_episode(env, task_id, player))
    if trajectory.failed:
        raise EnvironmentFaultError(trajectory.error)
    if trajectory.ended == "prompt_limit":
        raise PromptTooLongError(trajectory.error)
    return trajectory


class DemonstratorPlayer:
    """A demonstrator in an episode: its plan is what the policy shall imitate; action noise may carry out something else."""

    def __init__(
        self,
        settings: WarmStartSettings,
        tokenizer: Any,
        builder: PromptBuilder,
        demonstrator: Demonstrator,
        seed: list[int],
        solution: Callable[[], Sequence[str]],
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._builder = builder
        self._demonstrator = demonstrator
        self._random = np.random.default_rng(seed)
        self._solution = solution
        self._hidden: frozenset[str] = getattr(builder.template, "hidden_actions", frozenset())
        self._planned: list[str] = []
        self._offered: list[tuple[str, ...]] = []

    async def act(self, result: StepResult, history: History, step: int) -> Decision:
        """Write the prompt, ask the demonstrator, apply noise; see :class:`~trial_ray.rollout.episode.Player`."""
        if step == 1:
            seed = int(self._random.integers(2**31))
            begin(self._demonstrator, result.task, result.observation, seed, self._solution)
        actions = tuple(result.admissible_actions)
        prompt = self._builder.write(result, history)
        planned, as_good = plan(self._demonstrator, result.observation, actions)
        chosen = self._suboptimal(actions, planned)
        carried_out = self._noise(actions, chosen) or chosen
        self._demonstrator.carried_out(carried_out)
        self._planned.append(carried_out if carried_out in as_good else planned)
        self._offered.append(actions)
        opened = self._builder.responses.opened(prompt.ids, prompt.insert_at)
        response = encode_response(self._tokenizer, chosen, self._settings.response_style, opened)
        return Decision(carried_out, prompt_ids=prompt.ids, insert_at=prompt.insert_at, response_ids=response)

    def demonstrations(self, trajectory: Trajectory) -> list[Demonstration]:
        """Demonstrations of the last episode."""
        evidence = outcome_evidence(trajectory, self._tokenizer)
        return [
            Demonstration(
                prompt_ids=turn.prompt_ids,
                insert_at=turn.insert_at,
                response_ids=turn.response_ids,
                planned_ids=encode_response(
                    self._tokenizer,
                    planned,
                    self._settings.response_style,
                    self._builder.responses.opened(turn.prompt_ids, turn.insert_at),
                ),
                evidence_ids=shown,
                planned=turn.action == planned,
                task_id=trajectory.task_id,
                actions=actions,
            )
            for turn, shown, planned, actions in zip(
                trajectory.turns, evidence, self._planned, self._offered, strict=True
            )
        ]

    def _suboptimal(self, actions: Sequence[str], planned: str) -> str:
        """The planned action, or now and then any other on offer, which is demonstrated all the same."""
        if self._random.random() >= self._settings.suboptimal_probability:
            return planned
        return self._other(actions, planned) or planned

    def _noise(self, actions: Sequence[str], chosen: str) -> str | None:
        """Now and then another action on offer than the chosen one, or a malformed one."""
        if self._random.random() >= self._settings.action_noise or (action := self._other(actions, chosen)) is None:
            return None
        if self._random.random() < MALFORMED_SHARE:
            words = action.split()
            place = int(self._random.integers(len(words)))
            words[place : place + 1] = str(self._random.choice(actions)).split()[-1:]
            malformed = " ".join(words)
            # Words of two actions on offer can make a third one that is, or the chosen one.
            return action if malformed in (chosen, *actions) else malformed
        return action

    def _other(self, actions: Sequence[str], than: str) -> str | None:
        """Any action on offer but one; ``None`` where there is no other."""
        others = [each for each in actions if each.strip() and each != than and each not in self._hidden]
        return str(self._random.choice(others)) if others else None


class _TextCollector:
    """A demonstrator in an episode without noise; keeps its texts."""

    def __init__(
        self, demonstrator: Demonstrator, template: PromptTemplate, seed: int, solution: Callable[[], Sequence[str]]
    ) -> None:
        self._demonstrator = demonstrator
        self._template = template
        self._seed = seed
        self._solution = solution
        self.texts: list[str] = []

    async def act(self, result: StepResult, history: History, step: int) -> Decision:
        if step == 1:
            begin(self._demonstrator, result.task, result.observation, self._seed, self._solution)
            self.texts.append(result.task)
        context = PromptContext(result.task, result.observation, result.admissible_actions, records(history[-1:]), step)
        self.texts.append(self._template.render(context))
        action = self._demonstrator.act(result.observation, result.admissible_actions)
        self.texts.append("\n".join((result.observation, *result.admissible_actions, action)))
        self._demonstrator.carried_out(action)
        return Decision(action)


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


def to_examples(
    demonstrations: Sequence[Demonstration], hindsight_fraction: float, wasted_share: float, seed: int
) -> list[Example]:
    """Examples to clone: every demonstrated decision, and hindsight views beside them.

    The ordinary prompt is answered with what was demonstrated, suboptimal actions included. The hindsight view shows the
    outcome of the action that was carried out, and is answered with what the demonstrator had planned. So the outcome of a
    planned action speaks for it, and that of a suboptimal one, or of action noise, for what should have been done instead: in
    hindsight the model judges better than it acts, and the gap (Eq. 4) has the sign of that judgement.

    Args:
        demonstrations: of all episodes.
        hindsight_fraction: share of hindsight views among all examples, below 1.
        wasted_share: of these, how many show the outcome of an action that was not the planned one. As often as demonstrated,
            an outcome would mostly be that of the planned action, and a model would learn to repeat what it reads there.
        seed: of which decisions are shown in hindsight, each as often as any other of its kind (or once more).
    """
    random = np.random.default_rng([seed, 1])
    examples = [Example(each.prompt_ids, each.response_ids) for each in demonstrations]
    number = round(len(demonstrations) * hindsight_fraction / (1 - hindsight_fraction))
    wasted = [each for each in demonstrations if not each.planned]
    kept = [each for each in demonstrations if each.planned]
    from_wasted = round(number * wasted_share) if wasted and kept else number * bool(wasted)
    for kind, count in ((wasted, from_wasted), (kept, number - from_wasted)):
        drawn: list[int] = []
        while len(drawn) < count:
            drawn += random.permutation(len(kind)).tolist()
        examples += [_in_hindsight(kind[index]) for index in drawn[:count]]
    return examples


def _in_hindsight(demonstration: Demonstration) -> Example:
    view = augment(demonstration.prompt_ids, demonstration.insert_at, demonstration.evidence_ids)
    return Example(view, demonstration.planned_ids)


SCHEMA = new_schema(
    (("prompt_ids", IDS, "the prompt, `[P]`"), ("response_ids", IDS, "the demonstrated response, `[y]`")), version=1
)


def kept_examples(key: str, make: Callable[[], Sequence[Example]]) -> list[Example]:
    """The examples of a warm start in their order: those kept under ``key``, else made, and kept once there are all of them.

    Args:
        key: of everything that decides the examples.
        make: collects them.

    Raises:
        UserInputError: a kept file is damaged.
    """

    def build(work: Path) -> None:
        rows = [{"prompt_ids": each.prompt_ids, "response_ids": each.response_ids} for each in make()]
        write_rows(work, 0, rows, SCHEMA, "demonstrator")

    folder, _ = get_or_build("demonstrations", key, build)
    columns = read_rows(folder, None, SCHEMA, "demonstrations", f"Remove {folder}: they are collected again.")
    prompts, responses = (columns[name].to_pylist() for name in SCHEMA.names)
    return [
        Example(np.array(prompt, np.int32), np.array(response, np.int32))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
