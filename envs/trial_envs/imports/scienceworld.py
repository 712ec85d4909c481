"""``trial/ScienceWorld-v0``: the tasks of ScienceWorld, as a Gymnasium environment with a reward per turn."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from typing import Any

from trial_envs.core import Outcome, TextEnv
from trial_envs.errors import GeneratorSettingError, MissingEngineError, UnknownSplitError, UnknownTaskError
from trial_envs.imports.seeded_env import import_library

SPLITS = {"train": "get_variations_train", "valid": "get_variations_dev", "test": "get_variations_test"}
"""Split -> method of the simulator that lists the split's variations."""
FULL_SCORE = 100

_VARIATION = re.compile(r"0|[1-9][0-9]{0,8}")


class ScienceWorldEnv(TextEnv):
    """A task of ScienceWorld, such as ``boil`` or ``find-animal``, with its variations. The simulator runs in a Java process.

    A task id is ``<task>/<variation>``, and the splits are ScienceWorld's own. The reward of a turn is the change of the
    score. Some tasks start with a score above 0; the reward of a mistake that ends the task is negative. ``won`` means the
    full score.

    Args:
        task: name of the task in ScienceWorld.
        simplifications: comma-separated names of ScienceWorld's simplifications, such as ``easy``; an empty text selects none.
        list_actions: whether ``info["admissible_actions"]`` lists the possible actions, often several hundred.
        split: ``train``, ``valid`` or ``test``.
        max_turns: maximum number of actions per episode; the episode is then truncated.
        render_mode: ``"ansi"`` or ``None``.

    Attributes:
        walkthrough: the simulator's own solution of the current variation; empty before the first ``reset``.

    Raises:
        MissingEngineError, UnknownSplitError, GeneratorSettingError: see :mod:`trial_envs.errors`.
    """

    def __init__(
        self,
        task: str = "boil",
        simplifications: str = "",
        list_actions: bool = False,
        split: str = "train",
        max_turns: int = 100,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(split, max_turns, render_mode)
        self._simulator: Any = None
        self._loaded = False
        self.walkthrough: tuple[str, ...] = ()
        self._name, self._simplifications, self._list_actions = task, simplifications, list_actions
        self._variations: dict[str, list[str]] = {}
        self._library = import_library("scienceworld", "scienceworld")
        known = import_library("scienceworld.constants", "scienceworld").ID2TASK.values()
        if task not in known:
            raise GeneratorSettingError(f"ScienceWorld has no task {task!r:.200}; expected one of {', '.join(known)}.")
        if shutil.which("java") is None:
            raise MissingEngineError(
                "ScienceWorld's simulator needs Java 8 or later, and there is no `java` on the PATH."
            )
        self._require_split(split)

    def tasks(self, split: str | None = None) -> Sequence[str]:
        """Return the task ids of a split (default: the environment's own), in ScienceWorld's order of variations."""
        chosen = split or self.split
        self._require_split(chosen)
        if chosen not in self._variations:
            simulator = self._get_simulator()
            if not self._loaded:  # The simulator lists only the variations of the loaded task.
                self._load(0)
            self._variations[chosen] = [f"{self._name}/{number}" for number in getattr(simulator, SPLITS[chosen])()]
        return self._variations[chosen]

    def family(self, task_id: str) -> str:
        """Return the name of the task."""
        return task_id.rpartition("/")[0]

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        name, _, variation = task_id.rpartition("/")
        simulator = self._get_simulator()
        num_variations = simulator.get_max_variations(self._name)
        if name != self._name or not _VARIATION.fullmatch(variation) or int(variation) >= num_variations:
            raise UnknownTaskError(
                f"Unknown task {task_id!r:.200}; expected {self._name}/<variation below {num_variations}>."
            )
        self._load(int(variation))
        observation, info = simulator.reset()
        self.walkthrough = tuple(simulator.get_gold_action_sequence())
        instruction = str(info["taskDesc"]).strip().removeprefix("Task Description:").strip()
        # The initial score may be above 0, because some tasks give points for the initial state.
        score = max(0, info["score"]) / FULL_SCORE
        return instruction, Outcome(str(observation).strip(), self._listed(info), score=score)

    def _advance(self, action: str) -> Outcome:
        observation, gained, done, info = self._simulator.step(action)
        score = info["score"]
        return Outcome(
            observation=str(observation).strip(),
            admissible_actions=self._listed(info),
            reward=gained / FULL_SCORE,
            score=max(0, score) / FULL_SCORE,
            won=score >= FULL_SCORE,
            done=bool(done),
            invalid_action=str(observation).startswith(("No known action", "Unknown action")),
        )

    def _free(self) -> None:
        """End the Java process."""
        if self._simulator is not None:
            self._simulator.close()

    def _load(self, variation: int) -> None:
        self._get_simulator().load(self._name, variation, self._simplifications, generateGoldPath=True)
        self._loaded = True

    def _listed(self, info: dict[str, Any]) -> tuple[str, ...]:
        return tuple(info["valid"]) if self._list_actions else ()

    def _get_simulator(self) -> Any:
        """Return the simulator; the first call starts it."""
        if self._simulator is None:
            # TextEnv limits the turns, because the simulator would report its own limit as the end of the task.
            self._simulator = self._library.ScienceWorldEnv(envStepLimit=float("inf"))
            known = ("easy", *self._simulator.get_possible_simplifications())
            if wrong := [name for name in self._simplifications.split(",") if name and name not in known]:
                raise GeneratorSettingError(f"Expected simplifications of {[*known]}, got {wrong}.")
        return self._simulator

    @staticmethod
    def _require_split(split: str) -> None:
        if split not in SPLITS:
            raise UnknownSplitError(f"ScienceWorld has no split {split!r:.200}; expected one of {[*SPLITS]}.")
