"""Supervised fine-tuning on episodes, with the learners that reinforcement learning uses, and checks on held-out episodes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import ray
import torch
from ray.rllib.core import COMPONENT_LEARNER_GROUP, DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from torch import Tensor

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.algorithms.learner_group import PolicyLearnerGroup
from trial_ray.algorithms.methods import with_settings_of
from trial_ray.config.declare import check_settings, setting
from trial_ray.engines.protocol import SamplingParams
from trial_ray.errors import CheckpointError, ConfigError, TrainingDivergedError
from trial_ray.evaluation.evaluation_sets import EvaluationSet
from trial_ray.evaluation.local_games import LocalGames
from trial_ray.files import Json, content_key, finite, read_json, text_digest, write_json
from trial_ray.learner.exchange import TrainingGroups
from trial_ray.learner.learner import GRPOLearner
from trial_ray.learner.method import Method, per_token
from trial_ray.learner.rows import TokenBatch, scored_turn
from trial_ray.models.layout import pack_sequences
from trial_ray.models.logprobs import all_hidden_states, gather_logprobs, output_head
from trial_ray.models.prefix_tree import PrefixOrder
from trial_ray.objectives.segments import masked_mean
from trial_ray.prompts.styles import prompt_writer
from trial_ray.runs.checkpoints import (
    CHECKPOINT_MARK,
    export_model,
    list_checkpoints,
    remove_checkpoint,
    save_checkpoint,
)
from trial_ray.trajectory import Trajectory, TrajectoryGroup

RECORD = "sft.json"
"""File in a fine-tuned model's folder, with the settings, the counts of dropped episodes and turns, and the checks."""
ALL_ROWS = 1 << 30
"""Minibatch size that exceeds the number of turns of any update, so that every update has one minibatch."""


@dataclass(frozen=True)
class SFTSettings:
    """Settings of supervised fine-tuning.

    Settings of model, prompts, LoRA, precision and learners are in the config of the run that will start from the fine-tuned
    policy.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    epochs: int = setting(3, "passes over the episodes", at_least=1)
    learning_rate: float = setting(
        1e-5, "learning rate of AdamW after the warm-up; it then falls linearly to 0", above=0
    )
    warmup_share: float = setting(0.05, "share of the updates in which the learning rate rises", within=(0, 1))
    weight_decay: float = setting(0.0, "weight decay of AdamW", at_least=0)
    batch_rows: int = setting(
        32,
        "minimum number of turns of an update; episodes are not split, so that their prefixes are shared",
        at_least=1,
    )
    held_out: float = setting(0.1, "share of the tasks whose episodes are held out", within=(0, 0.9))
    checks: int = setting(
        10, "number of checks on the held-out episodes, at equal distances; the best policy is kept", at_least=1
    )
    games: int = setting(
        0, "number of games of the experiment's evaluation set that are played at each check", at_least=0
    )
    seed: int = setting(0, "seed of the order of episodes", within=(0, 2**63 - 1))

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_settings(self, "Setting ")


class Imitation(Method["SFTConfig"]):
    """Method with the loss of supervised fine-tuning: the mean of −log π_θ over the response tokens of an update."""

    name = "sft"
    needs_scores = False

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> Tensor:
        """Return 1 for every turn, float64 ``[K]``; the loss does not use advantages."""
        return torch.ones(
            sum(map(len, groups)), dtype=torch.float64
        )  # No episode to imitate has failed, so all turns count.

    @per_token
    def surrogate(self, tokens: TokenBatch, logprobs: Tensor, iteration: int) -> Tensor:
        """Return the mean negative log-likelihood of the response tokens."""
        return -masked_mean(logprobs, tokens.mask)


class SFTConfig(GRPOConfig):
    """Config of the learners during supervised fine-tuning."""

    method_class = Imitation


def learner_config(config: GRPOConfig, settings: SFTSettings, updates: int) -> SFTConfig:
    """Return the config of the learners: model, LoRA, precision and learners of ``config``, with the loss of SFT."""
    warmup = max(1, round(settings.warmup_share * updates))
    learners: SFTConfig = with_settings_of(config, SFTConfig())
    learners.training(
        # RLlib's schedule depends on environment steps; FineTuning._update() passes the number of updates instead.
        lr=[[0, settings.learning_rate / warmup], [warmup, settings.learning_rate], [max(updates, warmup + 1), 0.0]],
        weight_decay=settings.weight_decay,
        minibatch_rows=ALL_ROWS,
        microbatch_rows=math.ceil(settings.batch_rows / (4 * max(1, config.num_learners))),
        microbatch_weighting="tokens",
        batch_shards=1,
        num_epochs=1,
        shuffle=False,
        ref_kl_coeff=0.0,
        entropy_coeff=0.0,
        mask_truncated=False,
        teacher_context=None,
        teacher_model=None,
        teacher_sync_iterations=None,
    )
    learners.recording(trajectories_folder=None, training_folder=None)
    learners.engines(colocate=False, weight_transfer="object_store")
    return learners


@dataclass(frozen=True)
class Check:
    """Scores of the policy after a number of updates.

    Attributes:
        step: number of updates.
        training_loss: mean loss of the updates since the last check, in nats per token; ``None`` before the first update.
        loss: mean negative log-likelihood of the held-out responses, in nats per token.
        accuracy: share of held-out response tokens that are the policy's most likely token.
        success: share of games won; ``None`` without games.
    """

    step: int
    training_loss: float | None
    loss: float
    accuracy: float
    success: float | None = None

    def __str__(self) -> str:
        """Return a summary in one line."""
        training = "" if self.training_loss is None else f"training loss {self.training_loss:.3f}, "
        success = "" if self.success is None else f", success {self.success:.1%}"
        return (
            f"update {self.step}: {training}held-out loss {self.loss:.3f}, token accuracy {self.accuracy:.1%}{success}"
        )


def split_tasks(episodes: Sequence[Trajectory], share: float) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return the episodes to train on, and those of held-out tasks.

    Args:
        episodes: all episodes.
        share: share of the tasks that are held out; if it is above 0 and there are several tasks, at least one is held out.
    """
    tasks = sorted({episode.task_id for episode in episodes}, key=lambda task: text_digest(f"held out\n{task}"))
    number = min(len(tasks) - 1, max(1, round(share * len(tasks)))) if share else 0
    chosen = set(tasks[:number])
    training = [episode for episode in episodes if episode.task_id not in chosen]
    return training, [episode for episode in episodes if episode.task_id in chosen]


class FineTuning:
    """Fine-tunes one policy; an interrupted fine-tuning with the same output folder is continued.

    Args:
        config: config of the run that will start from the fine-tuned policy, with a model folder as ``model_path``.
        settings: settings of the fine-tuning.
        episodes: episodes to imitate.
        out: folder of the model; it appears when the fine-tuning is complete.

    Attributes:
        num_updates: number of updates.
        training: episodes that are trained on.
        held_out: held-out episodes.
        checks: checks so far.

    Raises:
        ConfigError: there are no held-out episodes, or ``config`` does not allow games (see :func:`games_of`).
        CheckpointError: an interrupted fine-tuning into ``out`` had other settings or episodes.
    """

    def __init__(self, config: GRPOConfig, settings: SFTSettings, episodes: Sequence[Trajectory], out: Path) -> None:
        self._settings, self._out = settings, out.absolute()  # RLlib reads a relative path as a URI without scheme.
        self._play = games_of(config, settings.games) if settings.games else None
        self.training, self.held_out = split_tasks(episodes, settings.held_out)
        if not self.held_out:
            raise ConfigError(
                f"All {len(episodes)} episodes are of one task, or held_out is 0, so none can be held out. Give episodes of "
                "several tasks."
            )
        self.num_updates = sum(1 for _ in self._batches())
        self._every = math.ceil(self.num_updates / settings.checks)
        self._config = learner_config(config, settings, self.num_updates)
        self._work = self._out.with_name(f"{out.name}.partial")
        ids = [(turn.prompt_ids.tolist(), turn.response_ids.tolist()) for episode in episodes for turn in episode.turns]
        self._key = content_key({"settings": asdict(settings), "episodes": ids, "model": config.model_path})
        self.checks: list[Check] = []
        if states := list_checkpoints(self._work):
            record = read_json(states[-1] / RECORD)
            if record["key"] != self._key:
                raise CheckpointError(
                    f"{self._work} has an unfinished fine-tuning with other settings, episodes or model. Delete it, or name "
                    "another --out."
                )
            self.checks = [Check(**check) for check in record["checks"]]

    def _batches(self) -> Iterator[list[Trajectory]]:
        """Yield shuffled batches of episodes; only an epoch's last batch may have fewer than ``batch_rows`` turns."""
        for epoch in range(self._settings.epochs):
            batch: list[Trajectory] = []
            for index in np.random.default_rng([self._settings.seed, epoch]).permutation(len(self.training)):
                batch.append(self.training[index])
                if sum(len(episode.turns) for episode in batch) >= self._settings.batch_rows:
                    yield batch
                    batch = []
            if batch:
                yield batch

    def run(self, on_update: Callable[[int, float], None], on_check: Callable[[Check], None]) -> None:
        """Train until the last update; Ray must be running. Call :meth:`finish` afterwards to export the best policy.

        Args:
            on_update: called after each update with its number and loss.
            on_check: called after each check.

        Raises:
            TrainingDivergedError: the held-out loss is not finite.
        """
        learners: PolicyLearnerGroup = self._config.build_learner_group()
        try:
            if done := self.checks[-1].step if self.checks else 0:
                learners.restore_from_path(self._state(done) / COMPONENT_LEARNER_GROUP)
            else:
                self._check(learners, 0, [], on_check)
            losses: list[float] = []
            for step, batch in enumerate(self._batches(), start=1):
                if step <= done:
                    continue
                losses.append(self._update(learners, batch, step))
                on_update(step, losses[-1])
                if step % self._every == 0 or step == self.num_updates:
                    self._check(learners, step, losses, on_check)
                    losses = []
        finally:
            learners.shutdown()

    def _update(self, learners: PolicyLearnerGroup, batch: Sequence[Trajectory], step: int) -> float:
        refs = [ray.put(TrajectoryGroup(episode.task_id, [episode])) for episode in batch]
        data = TrainingGroups(episodes_refs=refs)
        timesteps = {"training_iteration": step, NUM_ENV_STEPS_SAMPLED_LIFETIME: step}
        metrics, *_ = learners.update(training_data=data, timesteps=timesteps)
        return float(metrics[DEFAULT_MODULE_ID]["grpo"]["surrogate_loss"].peek())

    def _check(
        self, learners: PolicyLearnerGroup, step: int, losses: Sequence[float], on_check: Callable[[Check], None]
    ) -> None:
        held_out = self.held_out
        (loss, accuracy), *_ = learners.ask(lambda learner: held_out_scores(learner, held_out))
        if not math.isfinite(loss):
            raise TrainingDivergedError(
                f"The held-out loss is {loss} after update {step}. Lower learning_rate; {self._work} has the state before."
            )
        success = None if self._play is None else learners.ask(self._play)[0]
        check = Check(step, fmean(losses) if losses else None, loss, accuracy, success)
        self.checks = [*(earlier for earlier in self.checks if earlier.step < step), check]

        def save(folder: Path) -> None:
            """Write the checks so far, and a checkpoint in the layout of a run, from which a model can be exported."""
            learners.save_to_path(str(folder / COMPONENT_LEARNER_GROUP))
            write_json(folder / RECORD, {"key": self._key, "checks": [asdict(check) for check in self.checks]})
            (folder / CHECKPOINT_MARK).touch()

        save_checkpoint(self._state(step), save)
        for state in list_checkpoints(self._work):
            if state not in (self._state(step), self._state(self._best.step)):
                remove_checkpoint(state)
        on_check(check)

    @property
    def _best(self) -> Check:
        """The check with the highest success rate (0 without games), then the lowest loss; of equal ones, the first."""
        return max(self.checks, key=lambda check: (check.success or 0.0, -check.loss))

    def _state(self, step: int) -> Path:
        return self._work / f"{step:06d}"

    def finish(self, record: Json) -> Path:
        """Move the best model to the output folder, write its record :data:`RECORD`, and delete the checkpoints.

        Args:
            record: further values for the record.
        """
        checks = [asdict(check) for check in self.checks]
        content = {**record, "settings": asdict(self._settings), "updates": self.num_updates, "checks": checks}
        best = self._work / "best"
        shutil.rmtree(best, ignore_errors=True)
        write_json(export_model(self._state(self._best.step), best) / RECORD, finite(content, default=str))
        best.rename(self._out)
        shutil.rmtree(self._work)
        return self._out


def games_of(config: GRPOConfig, number: int) -> Callable[[GRPOLearner], float]:
    """Return a function that plays games of the evaluation set with a learner's policy, and returns the share won.

    Raises:
        ConfigError: there is no evaluation set, or the learners run in other processes.
    """
    if config.num_learners:
        raise ConfigError(
            f"games={number} are played by the learner in this process, but num_learners is {config.num_learners}. Set games=0 "
            "and evaluate the model afterwards, or set num_learners=0."
        )
    if not (entries := config.evaluation_entries()):
        raise ConfigError(f"games={number} needs .evaluation(evaluation_split=...) in the experiment, or set games=0.")
    entry, seed = entries[0], config.evaluation_seed
    tasks = EvaluationSet.from_entry(entry, number, seed).task_ids
    params = SamplingParams(config.max_response_tokens, config.evaluation_temperature, config.evaluation_top_p)

    def play(learner: GRPOLearner) -> float:
        module = learner.policy_module
        writer = prompt_writer(module.tokenizer, config, entry.adapter)
        with LocalGames(entry, tasks, params, seed, module.lm, module.tokenizer, writer) as games:
            played = games.play()
        return fmean(trajectory.success for trajectory in played)

    return play


def held_out_scores(learner: GRPOLearner, episodes: Sequence[Trajectory]) -> tuple[float, float]:
    """Return the mean negative log-likelihood of the responses, and the share of their tokens that are the most likely ones.

    Every learner scores all episodes, because learners with sharded weights must run the same forward passes.
    """
    module, limit = learner.policy_module, learner.config.max_tokens_per_forward
    nll, right, number = 0.0, 0, 0
    for episode in episodes:
        order = PrefixOrder([scored_turn(turn) for turn in episode.turns])
        with torch.no_grad(), module.autocast():
            packed = pack_sequences(module.lm, order, limit)
            hidden = all_hidden_states(module.lm, packed)
            logprobs, is_top = gather_logprobs(hidden, output_head(module.lm), packed.targets, second="is_top")
        nll -= logprobs[packed.tokens].double().sum().item()
        right += int(is_top[packed.tokens].sum())
        number += len(packed.tokens)
    module.finish_passes()
    return nll / number, right / number
