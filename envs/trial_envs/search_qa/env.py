"""``trial/SearchQA-v0``: questions that are answered with a search engine, as a Gymnasium environment."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

from trial_envs.core import Outcome, TextEnv
from trial_envs.core.levels import level_named, require_whole
from trial_envs.core.task_numbers import TaskNumbers
from trial_envs.errors import GeneratorSettingError, MissingDataError
from trial_envs.search_qa.corpus import GENERATED, Corpus, find_data, open_data, open_world
from trial_envs.search_qa.scoring import exact_match, f1
from trial_envs.search_qa.server import RetrievalServer
from trial_envs.search_qa.world import FAMILIES, SHORT_NAMES, Question

REWARDS = ("exact_match", "f1")
STYLES = {"brackets": "{}[{}]", "search_r1": "<{0}>{1}</{0}>"}
"""Style -> template of an action, with placeholders for its name and its argument."""
PASSAGES = {"tiny": 24, "official": 10_000}
"""Difficulty level of the generated worlds -> default number of passages."""
MIN_PASSAGES = 16


class SearchQAEnv(TextEnv):
    """Questions to answer with the passages that searches return; an episode has one question.

    Actions are ``search[query]`` and ``answer[text]``, alone or within other text. An action without either, and a search in the
    last turn, changes nothing and sets ``invalid_action``. An answer ends the episode with its only reward; ``won`` means an
    exact match, and ``score`` is F1.

    A task id is the number of a question in the environment's split, from 0.

    Attributes:
        question: the question of the current episode with its accepted answers; ``None`` before the first ``reset``.

    Args:
        split: ``generated``, ``generated_valid`` or ``generated_test`` for generated worlds of invented entities, or a split
            of imported data, such as ``train``; default ``train`` if data are found, else ``generated``.
        data: folder of imported data; default ``SEARCH_QA_DATA``, then the corpus that was imported last.
        max_turns: maximum number of actions per episode; the last one can only be an answer. The default allows 4 searches.
        top_k: number of passages that a search returns.
        reward: ``exact_match`` (0 or 1) or ``f1`` (in [0, 1]).
        style: ``brackets``, or ``search_r1`` for the actions and observations of Search-R1: the first
            ``<search>query</search>`` or ``<answer>text</answer>`` in the action, and passages between ``<information>`` tags.
        retriever: URL of a retrieval server with Search-R1's protocol, which is searched in place of the corpus.
        timeout_s: seconds for each request to the retrieval server.
        num_games: number of questions about the generated worlds.
        num_passages: number of passages of a generated world; default: 10,000, or 24 at the level ``tiny``.
        generator_seed: seed of the generated worlds.
        difficulty: level of the generated worlds: ``official``, or ``tiny`` with few short passages and names from a fixed
            list; at ``tiny``, admissible actions contain only words that the episode's texts have shown so far.
        num_worlds: number of generated worlds among which the questions are divided; a model cannot memorise many worlds.
        families: kinds of questions about the generated worlds, which alternate: ``one_hop``, ``two_hop``, ``three_hop`` and
            ``comparison``.
        render_mode: ``"ansi"`` or ``None``.

    Raises:
        UnknownSplitError, GeneratorSettingError, MissingDataError, CorruptCatalogueError: see
            :mod:`trial_envs.errors`.
        ValueError: ``reward`` or ``style`` is unknown, ``retriever`` is not an HTTP address, or ``timeout_s`` is not positive.
    """

    def __init__(
        self,
        split: str | None = None,
        data: str | os.PathLike[str] | None = None,
        max_turns: int = 5,
        top_k: int = 3,
        reward: str = "exact_match",
        style: str = "brackets",
        retriever: str | None = None,
        timeout_s: float = 10.0,
        num_games: int = 256,
        num_passages: int | None = None,
        generator_seed: int = 0,
        difficulty: str = "official",
        num_worlds: int = 1,
        families: Sequence[str] = FAMILIES,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(split or ("train" if find_data(data) else GENERATED[0]), max_turns, render_mode)
        for name, value, known in (("reward", reward, REWARDS), ("style", style, STYLES)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}.")
        default = level_named(PASSAGES, difficulty)
        passages = default if num_passages is None else num_passages
        self._concise = difficulty == "tiny" and self.split in GENERATED
        require_whole(0, generator_seed=generator_seed)
        require_whole(1, num_games=num_games, top_k=top_k, num_worlds=num_worlds)
        require_whole(MIN_PASSAGES, num_passages=passages)
        if self._concise and passages > len(SHORT_NAMES):
            raise GeneratorSettingError(
                f"Expected at most {len(SHORT_NAMES)} passages at the level tiny, got {passages}."
            )
        self._seed, self._num_games, self._num_worlds = generator_seed, num_games, int(num_worlds)
        self._families = tuple(families)
        if not self._families or not set(self._families) <= set(FAMILIES):
            raise GeneratorSettingError(f"families is {families!r}, expected some of {', '.join(FAMILIES)}.")
        questions = math.ceil(num_games / num_worlds) + min(self._num_worlds, len(self._families)) - 1
        self._world = (int(passages), self._concise, questions, self._families)
        self._top_k, self._f1, self._form = top_k, reward == "f1", STYLES[style]
        self._imported = None if self.split in GENERATED else open_data(data)
        self._data, self._tasks = data, self.tasks()
        self._server = RetrievalServer(retriever, timeout_s) if retriever else None
        self.question: Question | None = None

    @property
    def walkthrough(self) -> tuple[str, ...]:
        """Actions that find and give the right answer; empty before ``reset``.

        If no suitable searches are known, as for imported questions, the only action is the answer.
        """
        if self.question is None:
            return ()
        return self._actions_of(self.question.searches[: self.max_turns - 1], self.question.answers[:1])

    def tasks(self, split: str | None = None) -> TaskNumbers:
        """Return the numbers of the questions of a split (default: the environment's own), ascending."""
        self._refuse_closed()
        chosen = split or self.split
        if chosen in GENERATED:
            return TaskNumbers(range(self._num_games))
        return TaskNumbers(range((self._imported or open_data(self._data)).num_questions(chosen)))

    def family(self, task_id: str) -> str:
        """Return the kind of a generated question, such as ``two_hop``; for an imported question, the name of its data set."""
        return self._find(task_id)[1].family

    def _find(self, task_id: str) -> tuple[Corpus, Question]:
        number = self._tasks.number_of(task_id)
        if (corpus := self._imported) is None:
            number, world = divmod(number, self._num_worlds)
            corpus = open_world(f"{self.split} {int(self._seed)} {world}", *self._world)
            # Successive worlds start with different families, so families alternate even if each world has only one question.
            number += world % len(self._families)
        return corpus, corpus.question(self.split, number)

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        self._corpus, self.question = self._find(task_id)
        if not (self._server or self._corpus.num_passages):
            raise MissingDataError(
                f"{self._corpus.folder} has questions and no passages; import a corpus with them, or set the retriever."
            )
        self._shown, self._turn = [self.question.text], 1  # `_turn` is the number of the next action.
        return self.question.text, self._outcome(f"Question: {self.question.text}")

    def _advance(self, action: str) -> Outcome:
        name, argument = self._read(action)
        searchable = self._turn < self.max_turns
        self._turn += 1
        if name == "answer":
            return self._answer(argument)
        if name == "search" and searchable:
            return self._search(argument)
        return self._outcome("This action is not possible now.", invalid_action=True)

    def _read(self, action: str) -> tuple[str, str]:
        """Return the name and the argument of the first search or answer in an action; empty texts if there is none."""
        elements: list[tuple[int, str, str]] = []
        for name in ("search", "answer"):
            opening, closing = self._form.format(name, "\n").split("\n")
            before, _, rest = action.partition(opening)
            argument, closed, _ = rest.partition(closing)
            if closed and argument.strip():
                elements.append((len(before), name, argument.strip()))
        return min(elements, default=(0, "", ""))[1:]

    def _answer(self, text: str) -> Outcome:
        assert self.question is not None
        won, score = exact_match(text, self.question.answers), f1(text, self.question.answers)
        verdict = f"The answer is {'right' if won else 'wrong'}."
        return Outcome(verdict, (), score if self._f1 else float(won), score, won, done=True)

    def _search(self, query: str) -> Outcome:
        passages = (self._server or self._corpus).search(query, self._top_k)
        self._shown += [text for passage in passages for text in passage]
        form, frame = "Doc {}(Title: {}) {}", "<information>{}</information>"
        if self._form == STYLES["brackets"]:
            form, frame = "[{}] {}: {}", "{}" if passages else "No passage has any of these words."
        texts = (form.format(number, *passage) for number, passage in enumerate(passages, start=1))
        return self._outcome(frame.format("\n".join(texts)))

    def _outcome(self, observation: str, invalid_action: bool = False) -> Outcome:
        queries, answers = ["<your query>"], ["<your answer>"]
        if self._concise:
            words = dict.fromkeys(word for text in self._shown for word in re.findall(r"\w+", text))
            queries = [word for word in words if word in SHORT_NAMES]
            answers = queries + [word for word in words if word.isdigit()]
        offered = self._actions_of(queries if self._turn < self.max_turns else (), answers)
        return Outcome(observation, offered, invalid_action=invalid_action)

    def _actions_of(self, queries: Sequence[str], answers: Sequence[str]) -> tuple[str, ...]:
        """Return the search actions with these queries, and the answer actions with these answers."""
        forms = (*(("search", query) for query in queries), *(("answer", text) for text in answers))
        return tuple(self._form.format(*form) for form in forms)

    def _free(self) -> None:
        """Do nothing: environments share a corpus, which is closed when none of them uses it."""
