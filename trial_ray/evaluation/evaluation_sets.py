"""Evaluation sets, and protocols of published evaluations, which name an evaluation set and settings.

An evaluation set has fixed tasks in a fixed order, chosen by the number of tasks or by the name of the set.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.errors import UserInputError
from trial_ray.files import Json, read_json, text_digest

if TYPE_CHECKING:
    from trial_ray.adapters.registry import EnvironmentEntry

PROBED = 2
"""Number of tasks whose instructions the digest ``EvaluationSet.instructions`` covers."""


class EvaluationSetError(UserInputError):
    """An evaluation set cannot be created or read."""


@dataclass(frozen=True)
class EvaluationSet:
    """Tasks of one split of one environment, in a fixed order.

    Attributes:
        env_id: Gymnasium id, for example ``trial/ALFWorld-v0``.
        split: split of the environment that contains the tasks.
        task_ids: task ids, without duplicates.
        instructions: SHA-256 (hexadecimal) of the instructions of the first :data:`PROBED` tasks, one per line; empty if the
            instructions were not read from an environment. The digest distinguishes data whose tasks have the same ids, such as
            two WebShop catalogues.
        rollouts: number of episodes of each task; they have the same initial state and different sampling seeds.
    """

    env_id: str
    split: str
    task_ids: tuple[str, ...]
    instructions: str = ""
    rollouts: int = 1

    def __post_init__(self) -> None:
        if not self.task_ids:
            raise EvaluationSetError(
                f"An evaluation set needs at least one task; {self.env_id} split {self.split!r} gave none."
            )
        if len(set(self.task_ids)) != len(self.task_ids):
            raise EvaluationSetError("Expected each task once in an evaluation set, got a task id twice.")

    def __len__(self) -> int:
        return len(self.task_ids)

    @property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of the task ids in order, one per line."""
        return text_digest("\n".join(self.task_ids)).hex()

    def protocol(self) -> Json:
        """Return the entries of an evaluation's protocol (its settings besides the policy) that describe this set of tasks."""
        return {
            "env": self.env_id,
            "split": self.split,
            "num_tasks": len(self),
            "panel_sha256": self.digest,
            "instructions_sha256": self.instructions,
            **({"rollouts": self.rollouts} if self.rollouts > 1 else {}),
        }

    @classmethod
    def choose(
        cls, env_id: str, split: str, tasks: Sequence[str], num_tasks: int | None = None, seed: int = 0
    ) -> EvaluationSet:
        """Choose ``num_tasks`` of ``tasks`` (``None``: all of them) in the order of the SHA-256 of seed and task id.

        The choice does not depend on a random generator or on the order of ``tasks``, so it is the same on every machine.
        An evaluation set is a prefix of every larger one with the same seed.

        Raises:
            EvaluationSetError: there are fewer tasks than requested, or ``num_tasks`` is below 1.
        """
        ids = [str(task) for task in tasks]
        if num_tasks is not None and not 1 <= num_tasks <= len(ids):
            raise EvaluationSetError(f"Requested {num_tasks} tasks, but split {split!r} of {env_id} has {len(ids)}.")
        ranked = sorted(ids, key=lambda task: text_digest(f"{seed}\n{task}"))
        return cls(env_id, split, tuple(ranked[:num_tasks]))

    @classmethod
    def from_entry(cls, entry: EnvironmentEntry, num_tasks: int | None, seed: int = 0) -> EvaluationSet:
        """Choose among all tasks of the environment's split as :meth:`choose` does, and add the digest of the instructions."""
        evaluation_set = cls.choose(entry.env_id, entry.split, entry.tasks(), num_tasks, seed)
        return replace(evaluation_set, instructions=instructions_digest(entry, evaluation_set.task_ids))


def instructions_digest(entry: EnvironmentEntry, task_ids: Sequence[str]) -> str:
    """Return the digest of the environment's instructions for :attr:`EvaluationSet.instructions`.

    Raises:
        EnvironmentFaultError: the environment fails on a task.
    """
    # Import here: `trial-ray --help` imports this module, and must not wait for Gymnasium and Ray.
    from trial_ray.adapters.guarded import GuardedEnv

    with closing(GuardedEnv(entry)) as env:
        instructions = [env.reset(task, seed=0).task for task in task_ids[:PROBED]]
    return text_digest("\n".join(instructions)).hex()


SIZES: dict[str, int | None] = {"quick": 32, "standard": 256, "full": None}
"""Number of tasks by name, for the evaluation sets that exist for every split; ``None`` means all tasks."""
FOLDER = Path(__file__).parent / "evaluation_sets"
SEED = 0
"""Seed for choosing the tasks of evaluation sets that have no file in :data:`FOLDER`."""


def evaluation_set_names() -> list[str]:
    """Return all names that :func:`choose_evaluation_set` accepts."""
    return [*SIZES, *sorted(file.stem for file in FOLDER.glob("*.json"))]


def choose_evaluation_set(entry: EnvironmentEntry, chosen: str | int = "full") -> EvaluationSet:
    """Return an evaluation set, which has the same tasks on every machine.

    Args:
        entry: the environment, with the split in its keyword arguments.
        chosen: a name from :func:`evaluation_set_names`, or a number of tasks.

    Raises:
        EvaluationSetError: the evaluation set is for another environment or split, its tasks or instructions differ from those
            of the installed data, or the split has fewer tasks than requested.
    """
    if isinstance(chosen, int) or chosen in SIZES:
        return EvaluationSet.from_entry(entry, chosen if isinstance(chosen, int) else SIZES[chosen], seed=SEED)
    committed = read_evaluation_set(chosen)
    if (committed.env_id, committed.split) != (entry.env_id, entry.split):
        raise EvaluationSetError(
            f"Evaluation set {chosen!r}: expected {committed.env_id} split {committed.split!r}, got {entry.env_id} split "
            f"{entry.split!r}."
        )
    missing = sorted(set(committed.task_ids) - set(entry.tasks()))
    if missing:
        raise EvaluationSetError(
            f"The installed data lack {len(missing)} of the {len(committed)} tasks of evaluation set {chosen!r}, for example "
            f"{missing[0]!r}: they are another release. Choose --tasks full or --tasks N instead."
        )
    digest = instructions_digest(entry, committed.task_ids)
    if digest != committed.instructions:
        raise EvaluationSetError(
            f"The installed data differ from the data of evaluation set {chosen!r}: equal ids have other instructions (digest "
            f"{digest[:12]}, expected {committed.instructions[:12]}). Choose --tasks full or --tasks N instead."
        )
    return committed


def read_evaluation_set(name: str) -> EvaluationSet:
    """Read the evaluation set in a file of :data:`FOLDER`.

    Raises:
        CheckpointError: the file is damaged.
        EvaluationSetError: the name is unknown, or the tasks in the file do not match the file's digest.
    """
    path = FOLDER / f"{name}.json"
    if name not in evaluation_set_names() or not path.is_file():
        raise EvaluationSetError(
            f"There is no evaluation set {name!r}; the evaluation sets are {', '.join(evaluation_set_names())}."
        )
    value = read_json(path)
    evaluation_set = EvaluationSet(value["env"], value["split"], tuple(value["task_ids"]), value["instructions_sha256"])
    if evaluation_set.digest != value["sha256"]:
        raise EvaluationSetError(
            f"{path} was changed: its tasks have digest {evaluation_set.digest[:12]}, not {value['sha256'][:12]}."
        )
    return evaluation_set


# -- protocols of published evaluations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedProtocol:
    """Tasks and settings of a published evaluation.

    Attributes:
        source: publication or repository that states the values.
        split: split of the environment.
        tasks: evaluation set, as for :func:`choose_evaluation_set`.
        overrides: settings of the config as ``key=value``.
    """

    source: str
    split: str
    tasks: str
    overrides: tuple[str, ...]


def _limits(max_turns: int, max_prompt_tokens: int) -> tuple[str, ...]:
    """Return the settings that all named evaluation protocols share, and these limits of turns and prompt tokens."""
    return (
        f"env_config.max_turns={max_turns}",
        f"max_prompt_tokens={max_prompt_tokens}",
        "max_response_tokens=512",
        "history_window=2",
        "prompt_style=tagged",
        "evaluation_temperature=0.4",
        "evaluation_top_p=1.0",
    )


_PAPER = "the paper's full-set evaluation; its temperature is that of the released scripts"
_SDAR = "github.com/ZJU-REAL/SDAR at 8b85c23, examples/sdar_trainer, which has the values of verl-agent's scripts"
_ALFWORLD = NamedProtocol(_PAPER, "valid_seen", "full", _limits(50, 2048))
_WEBSHOP = NamedProtocol(_PAPER, "test", "full", _limits(15, 4096))
NAMED_PROTOCOLS = {
    "paper": {"trial/ALFWorld-v0": _ALFWORLD, "trial/WebShop-v0": _WEBSHOP},
    "sdar": {
        "trial/ALFWorld-v0": replace(_ALFWORLD, source=_SDAR, tasks="seen-128"),
        "trial/WebShop-v0": replace(_WEBSHOP, source=_SDAR, tasks="webshop-128"),
    },
}
"""Protocols of published evaluations, by the name that ``trial-ray evaluate --protocol`` takes, and by environment id."""


def find_protocol(name: str, env: str | None) -> NamedProtocol:
    """Return the named evaluation protocol for an environment.

    Raises:
        UserInputError: there is no protocol of this name, or it is not for this environment.
    """
    if name not in NAMED_PROTOCOLS:
        raise UserInputError(f"There is no protocol {name!r}; expected one of {', '.join(NAMED_PROTOCOLS)}.")
    if env not in NAMED_PROTOCOLS[name]:
        raise UserInputError(f"The protocol {name} is for --env {' or '.join(NAMED_PROTOCOLS[name])}, not for {env}.")
    return NAMED_PROTOCOLS[name][env]
