"""Compute the log-probabilities of an update's responses before the update, and find the tokens of actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from torch import Tensor

from trial_envs.core.projection import ACTION_CLOSE, ACTION_OPEN
from trial_ray.adapters.templates import PromptStyle, ToolFormat
from trial_ray.config.run import RunSettings
from trial_ray.errors import MethodError, PolicyBrokenError, TrainingDivergedError, WeightSyncError
from trial_ray.learner.exchange import LearnerExchange
from trial_ray.learner.method import Method
from trial_ray.learner.rows import TurnRows, group_turn_rows, required
from trial_ray.learner.update_plan import UpdatePlan, plan_update
from trial_ray.metrics import EFFECTIVE_SAMPLE_SIZE, LEARNER, log
from trial_ray.models.layout import score_views
from trial_ray.models.model_shape import special_token_ids
from trial_ray.models.module import CausalLMModule
from trial_ray.models.prefix_tree import ScoredSequence
from trial_ray.objectives.divergences import engine_divergences
from trial_ray.objectives.losses import effective_sample_size, importance_weights
from trial_ray.prompts.tool_calls import last_calls, prepare_parsing
from trial_ray.trajectory import TrajectoryGroup, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(eq=False, repr=False)
class Scoring:
    """Scores an update's responses: computes their log-probabilities under the policy before the update.

    With a teacher context, responses are also scored after the prompt that includes the context, by the teacher model or stale
    teacher if there is one. Otherwise, the policy scores them, with the same weights, kernels and precision as without the
    context. Each learner scores its share of the trajectories; then all learners exchange the results.

    The old log-probabilities of the surrogate are the learner's, not the engine's. The difference between them is logged. For
    responses sampled with the weights that are now updated, a mean difference of more than ``max_logprob_diff`` is an error,
    because the engine then sampled from another policy. With an ``importance_cap``, each token gets an importance weight that
    corrects for the difference.

    Attributes:
        method: method whose ``prepare`` is called with the scored rows.
        module: the policy.
        exchange: exchange with the other learners.
        metrics: the learner's metrics logger.
    """

    method: Method[RunSettings]
    module: CausalLMModule
    exchange: LearnerExchange
    metrics: MetricsLogger

    def scored_rows(
        self, groups: list[TrajectoryGroup], iteration: int, version: int | None
    ) -> tuple[TurnRows, UpdatePlan]:
        """Score the responses of an update; return its turns as training samples (rows), and the plan of its steps.

        Args:
            groups: groups of rollouts, the same on every learner.
            iteration: iteration of the update, counted from 1.
            version: version of the weights that are updated; ``None`` stands for the newest version that sampled a row.

        Raises:
            PolicyBrokenError: the learner's weights give log-probabilities that are not finite.
            WeightSyncError: engine and learner disagree on the log-probabilities of the sampled tokens.
            MethodError: the method gave the rows a field of the wrong shape or has a divergence without a teacher, or turns have no
                teacher context although ``teacher_context`` is set.
            TrainingDivergedError: rewards, advantages or weights of turns are not finite.
        """
        config, tokenizer, rank = self.method.config, self.module.tokenizer, self.exchange.rank
        if self.method.divergence is not None and not config.has_teacher:
            raise MethodError(
                f"{type(self.method).__name__} has a divergence, which needs a teacher: set needs_teacher_context = True, and "
                "teacher_context or teacher_model in the config."
            )
        rows = group_turn_rows(groups, config)
        tokens = [[turn.num_tokens for turn in episode.turns] for group in groups for episode in group.completed]
        plan = plan_update(tokens, config, iteration)
        share = plan.scoring[rank]
        if config.teacher_context is not None and any(turn.teacher_context is None for turn in rows.turns):
            raise MethodError(
                "teacher_context is set, but turns have no teacher context: call add_teacher_contexts() with each group first."
            )
        if self.method.needs_scores:
            self._fill_logprobs(rows, share, version)
        else:
            rows.logprobs = torch.zeros(len(rows.turn_ids), dtype=self._score_dtype)
        if self.method.needs_action_spans:
            mask = action_mask([rows.turns[row] for row in share], tokenizer, config.prompt_style, config.tool_format)
            rows.action_mask = self._sum_over_learners(rows, share, mask, torch.uint8).bool()
        for name, value in self.method.prepare(rows, groups, iteration).items():
            self._log(f"{self.method.name}/{name}", value)
        _require_trainable(self.method, rows)
        return rows, plan if config.microbatch_weighting == "equal" else plan.weighted_by(_weights(rows, config))

    @property
    def _score_dtype(self) -> torch.dtype:
        return torch.float64 if self.module.lm.dtype == torch.float64 else torch.float32

    def _fill_logprobs(self, rows: TurnRows, share: np.ndarray, version: int | None) -> None:
        """Set the log-probabilities of all rows: this learner scores its share, and the learners exchange their results."""
        with self.module.autocast():
            scores = self._share_logprobs(rows, share)
        self.module.finish_passes()
        for name, own_values in scores.items():
            values = self._sum_over_learners(rows, share, own_values, self._score_dtype)
            if wrong := int((~values.isfinite()).sum()):
                raise PolicyBrokenError(
                    f"{name} of {wrong} of {len(values)} sampled tokens are not finite: the policy's weights no longer give "
                    "probabilities. Nothing was trained on them. Lower lr, and continue from the last checkpoint."
                )
            setattr(rows, name, values)
        sampled = np.concatenate([np.empty(0, np.float32), *(rows.turns[row].logprobs for row in share)])
        behaviour = self._sum_over_learners(rows, share, torch.from_numpy(sampled), self._score_dtype)
        self._compare_with_engine(rows, behaviour, version)
        if self.method.config.teacher_model is not None:
            # The policy's log-probabilities are passed in place of the engine's, so "kl" estimates KL(policy ‖ teacher).
            distance = engine_divergences(required(rows.hindsight_logprobs), rows.logprobs)
            for name in ("logprob_diff", "kl"):
                self._log(f"teacher/{name}", distance[name])
        log(self.metrics, EFFECTIVE_SAMPLE_SIZE, effective_sample_size(rows.logprobs, behaviour).item())
        if (cap := self.method.config.importance_cap) is not None:
            rows.importance_weights = importance_weights(
                rows.logprobs, behaviour, rows.turn_ids, len(rows), cap, self.method.config.importance_mode
            )
            bounded = (rows.importance_weights >= cap) | (rows.importance_weights == 0)
            self._log("engine/bounded_fraction", bounded.double().mean())

    def _share_logprobs(self, rows: TurnRows, share: np.ndarray) -> dict[str, Tensor]:
        """Return log-probabilities of this learner's response tokens, flat, by the name of their field in :class:`TurnRows`."""
        module, views = self.module, {"logprobs": rows.sequences(share)}
        scores: dict[str, Tensor] = {}
        if self.method.config.has_teacher:
            hindsight = {"hindsight_logprobs": rows.sequences(share, hindsight=True)}
            if module.teacher is None:  # Score prompts with and without context together: they share prefixes.
                views |= hindsight
            else:
                scores = self._score_views(module.teacher, hindsight)
        scores |= self._score_views(module.lm, views)
        with module.reference_model() as reference:
            if reference is not None:
                scores |= self._score_views(reference, {"reference_logprobs": views["logprobs"]})
        return scores

    def _score_views(self, lm: PreTrainedModel, views: dict[str, list[ScoredSequence]]) -> dict[str, Tensor]:
        """Return the log-probabilities of each view (prompts with or without teacher context), flat; log the numbers of tokens."""
        scores, packed = score_views(lm, views, max_tokens=self.method.config.max_tokens_per_forward)
        if packed is not None:
            log(self.metrics, f"{LEARNER}scoring/tokens_forwarded", packed.num_tokens)
            log(self.metrics, f"{LEARNER}scoring/tokens_distinct", packed.num_distinct)
        return scores

    def _sum_over_learners(self, rows: TurnRows, share: np.ndarray, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of all tokens of ``rows``, ``[T]`` on the CPU, from those that each learner computed for its share.

        They are the sum over learners of arrays ``[T]`` that are zero outside the learner's share.

        Args:
            rows: all rows of the update, with T tokens.
            share: indices of the rows in this learner's share.
            values: values of the share's tokens, flat, on any device.
            dtype: dtype of the result.
        """
        whole = torch.zeros(len(rows.turn_ids), dtype=dtype)
        whole[rows.token_positions(share)] = values.to("cpu", dtype)
        self.exchange.add_up([whole])
        return whole

    def _log(self, name: str, value: Tensor) -> None:
        log(self.metrics, f"{LEARNER}{name}", value.item())

    def _compare_with_engine(self, rows: TurnRows, behaviour: Tensor, version: int | None) -> None:
        """Log the differences between the engine's and the learner's log-probabilities; raise an error if they disagree."""
        sampled_by = torch.tensor([turn.weight_version for turn in rows.turns], dtype=torch.int64)
        staleness = (int(sampled_by.max()) if version is None else version) - sampled_by
        # Compare only responses that the current weights sampled: older weights give other log-probabilities, which is no error.
        differences = engine_divergences(rows.logprobs, behaviour, compared=(staleness <= 0)[rows.turn_ids])
        for name, value in differences.items():
            self._log(f"engine/{name}", value)
        self._log("rows/staleness_mean", staleness.double().mean())
        self._log("rows/staleness_max", staleness.max())
        mismatch = math.nan if differences["kl"].isnan() else differences["logprob_diff"].item()
        limit = self.method.config.logprob_diff_limit()
        if not mismatch <= limit:  # The condition is also true for NaN.
            raise WeightSyncError(
                f"Engine and learner disagree by {mismatch:.3g} nats per token on average (expected at most {limit:g}, "
                "max_logprob_diff): the engine sampled from another policy than the trained policy, so nothing was trained on its "
                "responses. Check that both use the same dtype and temperature, and that the engine supports reloading this "
                "model's weights."
            )


def _weights(rows: TurnRows, config: RunSettings) -> NDArray[np.int64]:
    """Return what each row adds to its microbatch's weight: its number of tokens to learn from or, by default, 1 if it has any."""
    tokens = rows.num_eligible()
    return tokens if config.microbatch_weighting == "tokens" else (tokens > 0).astype(np.int64)


def _require_trainable(method: Method[Any], rows: TurnRows) -> None:
    """Reject the rows if ``method.prepare`` left a field with the wrong shape, or values that are not finite.

    With a wrong shape, values would be assigned to other turns or tokens.

    Raises:
        MethodError: a field has the wrong shape.
        TrainingDivergedError: advantages, weights or terms are not finite.
    """
    method_name = type(method).__name__
    for name in ("advantages", "scores", "weights", "mask", "terms"):
        values = getattr(rows, name)
        size = len(rows.turn_ids if name in ("mask", "terms") else rows)
        if values is None:
            continue
        if values.shape != (size,):
            raise MethodError(
                f"{method_name}.prepare must leave rows.{name} with shape [{size}], got {list(values.shape)}."
            )
        if name != "scores" and (wrong := int((~values.isfinite()).sum())):
            raise TrainingDivergedError(
                f"{wrong} of {size} values of rows.{name} are not finite, so nothing was trained on them. Check how "
                f"{method_name}.prepare computes them."
            )


def action_mask(
    turns: Sequence[Turn], tokenizer: Any, style: PromptStyle = "tagged", tool_format: ToolFormat | None = None
) -> Tensor:
    """Return the mask of the action's tokens in the concatenated responses of turns, bool ``[T]``.

    In the styles ``"tagged"`` and ``"conversation"``, the action is between the first ``<action>`` and the first ``</action>``; it
    includes every token with a character between these tags, and no token if there is no such pair. In the style ``"plain"``, it
    consists of all tokens except special tokens; in the style ``"tools"``, of the tokens of the last tool calls, see
    :func:`~trial_ray.prompts.tool_calls.last_calls`.

    Args:
        turns: turns with their responses.
        tokenizer: the policy's tokenizer.
        style: style of the prompts, which determines the form of the responses.
        tool_format: the run's ``tool_format``.
    """
    if style == "plain":
        special = list(special_token_ids(tokenizer))
        masks = [~np.isin(turn.response_ids, special) for turn in turns]
    elif style == "tools":
        prepare_parsing(tokenizer, tool_format)
        masks = [last_calls(tokenizer, turn.response_ids, len(turn.actions) or 1) for turn in turns]
    else:
        masks = [_between_tags(turn.response_ids, tokenizer) for turn in turns]
    return torch.from_numpy(np.concatenate([np.empty(0, bool), *masks]))


def _between_tags(ids: np.ndarray, tokenizer: Any) -> np.ndarray:
    mask = np.zeros(len(ids), bool)
    text = _decode(ids, tokenizer)
    opening, closing = ACTION_OPEN.search(text), ACTION_CLOSE.search(text)
    if opening and closing and opening.end() < closing.start():
        first = _tokens_within(ids, opening.end(), tokenizer)
        # The number of tokens up to the action's end is the larger of two numbers. Only `shared` includes a token with both the
        # action's last character and the beginning of the closing tag; only the other number includes all tokens of a last
        # character that consists of several tokens.
        shared = _tokens_within(ids, closing.start() - 1, tokenizer) + 1
        mask[first : max(shared, _tokens_within(ids, closing.start(), tokenizer))] = True
    return mask


def _tokens_within(ids: np.ndarray, characters: int, tokenizer: Any) -> int:
    """Return the number of leading tokens that spell at most ``characters`` characters, by bisection."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_decode(ids[:middle], tokenizer)) <= characters:
            low = middle
        else:
            high = middle - 1
    return low


def _decode(ids: np.ndarray, tokenizer: Any) -> str:
    # Do not let decode() clean up tokenization spaces: it would remove spaces, and so shift the positions of characters.
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
