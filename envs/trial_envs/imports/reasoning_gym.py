"""``trial/ReasoningGym-v0``: questions of Reasoning Gym's generated data sets, as a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trial_envs.core import Outcome
from trial_envs.errors import GeneratorSettingError
from trial_envs.imports.seeded_env import SeededEnv, import_library, plain_settings


class ReasoningGymEnv(SeededEnv):
    """A question of a Reasoning Gym data set; the action is the answer and ends the episode.

    Question n of a split is the first question of the data set that is generated with the split's n-th seed. The reward is the
    data set's own score of the answer, usually in [0, 1]; ``won`` means a score of 1. The last observation contains the score
    and, if it is below 1, an answer with a score of 1.

    Args:
        dataset: name in Reasoning Gym's registry, such as ``chain_sum``.
        dataset_args: fields of the data set's config, without ``seed`` and ``size``.
        split: ``train``, ``valid`` or ``test``; their questions have different seeds. A data set with few questions has the
            same questions in several splits.
        num_games: number of questions that ``tasks()`` lists, at most a million.
        max_turns: at least 1, and without effect, because an episode has one turn.
        actions: list for ``info["admissible_actions"]``, such as the answers of a data set with few answers.
        render_mode: ``"ansi"`` or ``None``.

    Raises:
        MissingEngineError, UnknownSplitError, GeneratorSettingError: see :mod:`trial_envs.errors`.
    """

    def __init__(
        self,
        dataset: str = "chain_sum",
        dataset_args: Mapping[str, Any] | None = None,
        split: str = "train",
        num_games: int = 4096,
        max_turns: int = 1,
        actions: Sequence[str] = (),
        render_mode: str | None = None,
    ) -> None:
        super().__init__(dataset, split, num_games, max_turns, actions, render_mode)
        self._factory = import_library("reasoning_gym.factory", "reasoning-gym")
        import_library("reasoning_gym", "reasoning-gym")
        if dataset not in self._factory.DATASETS:
            raise GeneratorSettingError(f"Reasoning Gym has no data set {dataset!r}; expected a name in its registry.")
        self._dataset_args = plain_settings("dataset_args", dataset_args, reserved=("seed", "size"))
        self.walkthrough: tuple[str, ...] = ()
        """The data set's own answer to the current question; empty before the first ``reset``, or if there is no answer."""

    def _begin(self, seed: int) -> tuple[str, Outcome]:
        self.walkthrough = ()
        try:
            self._questions = self._factory.create_dataset(self._name, seed=seed, size=1, **self._dataset_args)
        except (TypeError, ValueError, AssertionError) as error:
            raise GeneratorSettingError(
                f"Reasoning Gym cannot make {self._name} with {self._dataset_args}: {type(error).__name__}: {error}"
            ) from error
        self._entry = self._questions[0]
        self.walkthrough = () if self._entry["answer"] is None else (str(self._entry["answer"]),)
        question = self._entry["question"].strip()
        return question, Outcome(question, self._listed)

    def _play(self, action: str) -> Outcome:
        score = float(self._questions.score_answer(action, self._entry))
        observation = f"The answer scores {score:g}."
        if score < 1 and self.walkthrough:
            observation = f"{observation} An answer that scores 1: {self.walkthrough[0]}"
        return Outcome(
            observation, self._listed, reward=score, score=min(1.0, max(0.0, score)), won=score >= 1, done=True
        )

    def _free(self) -> None:
        """Do nothing: a data set has no resources except memory."""
