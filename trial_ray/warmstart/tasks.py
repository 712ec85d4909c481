"""Which tasks a warm start demonstrates, checks itself on, and is evaluated on: no task serves two of these."""

from __future__ import annotations

from dataclasses import dataclass

from trial_ray.environments.registry import TRAIN, EnvironmentEntry, warm_start_seed_tasks
from trial_ray.errors import ConfigError
from trial_ray.files import text_digest
from trial_ray.warmstart.settings import WarmStartSettings

DEMONSTRATED, CHECKED, EVALUATED = 0, 1, 2
"""What tasks are for; added to ``generator_seed`` where tasks are generated."""


@dataclass(frozen=True)
class TaskSet:
    """Tasks of one purpose, and the environment that they are played in."""

    entry: EnvironmentEntry
    tasks: tuple[str, ...]


def task_set(settings: WarmStartSettings, entry: EnvironmentEntry, purpose: int, number: int) -> TaskSet:
    """``number`` tasks for a purpose: generated, seeds, or a part of the split ``train``, as the environment has them.

    Raises:
        ConfigError: the split ``train`` has fewer tasks than the three purposes need, or the seeds are those of another split.
    """
    if entry.adapter.generated is not None:
        generated = entry.at(**entry.adapter.generated(settings.generator_seed + purpose, number))
        return TaskSet(generated, tuple(generated.tasks()))
    needs = [settings.games, settings.check_games, settings.evaluation_games]
    if entry.lists_tasks():
        entry = entry.at(split=TRAIN)
        tasks = _shuffled_split(settings, entry, needs)
    else:
        tasks = warm_start_seed_tasks(settings.generator_seed, sum(needs))
    first = sum(needs[:purpose])
    return TaskSet(entry, tuple(tasks[first : first + number]))


def require_tasks(settings: WarmStartSettings, entry: EnvironmentEntry) -> None:
    """Refuse a split that has too few tasks, without playing or generating any.

    Raises:
        ConfigError: as :func:`task_set`.
    """
    if entry.adapter.generated is None:
        task_set(settings, entry, EVALUATED, settings.evaluation_games)


def _shuffled_split(settings: WarmStartSettings, entry: EnvironmentEntry, needs: list[int]) -> list[str]:
    tasks = sorted(entry.tasks(), key=lambda task: text_digest(f"{settings.generator_seed}\n{task}"))
    if len(tasks) < sum(needs):
        raise ConfigError(
            f"The split {entry.split!r} of {entry.env_id} has {len(tasks)} tasks, but the warm start needs {sum(needs)} "
            f"(games={needs[0]}, check_games={needs[1]}, evaluation_games={needs[2]}); lower them, or give the adapter "
            "`generated`, which makes further ones."
        )
    return tasks
