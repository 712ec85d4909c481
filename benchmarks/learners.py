"""Learners in this process, without actors, whose forward and backward passes are timed, counted and compared.

Weights never change: gradients are kept on request and not applied, so that every update computes the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trial_ray.learner.rows import TurnRows
from trial_ray.learner.update_plan import Microbatch, UpdatePlan
from trial_ray.prompts.teacher_context import add_teacher_contexts
from trial_ray.rollout.env_runner import TextEnvRunner
from trial_ray.trajectory import TrajectoryGroup

Gradient = dict[str, torch.Tensor]


@dataclass
class Update:
    """The results of an update.

    Attributes:
        rows: scored rows, with old log-probabilities and advantages.
        plan: minibatches of the update.
        seconds: seconds of the forward and backward passes of all minibatches, without scoring and optimizer.
        tokens: number of input tokens of all minibatches' passes, padding included.
        losses: loss of each minibatch.
        gradients: gradients of each minibatch by parameter, before clipping; empty unless ``keep_gradients`` was set.
    """

    rows: TurnRows = field(init=False)
    plan: UpdatePlan = field(init=False)
    seconds: float = 0.0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)


def build_learner(config: Any) -> Any:
    """Build the learner of a config in this process, and return it."""
    spec = config.get_multi_rl_module_spec(spaces=TextEnvRunner.get_spaces(None))
    learner = config.get_default_learner_class()(config=config, module_spec=spec)
    learner.build()
    return learner


class BenchLearner:
    """A config's learner in this process, whose updates are measured.

    Args:
        config: config with a model folder as ``model_path`` and ``num_learners=0``.
    """

    def __init__(self, config: Any) -> None:
        self.learner = build_learner(config)
        self.lm = self.learner.policy_module.lm
        self._names = {id(parameter): name for name, parameter in self.lm.named_parameters()}
        self._scored_rows = self.learner.scoring.scored_rows
        self._optimizer_step = self.learner._optimizer_step
        self.learner.apply_gradients = lambda gradients: None

    def update(self, groups: Sequence[TrajectoryGroup], keep_gradients: bool = False) -> Update:
        """Score and train on the groups; see :class:`Update`."""
        found = Update()

        def scored_rows(*args: Any) -> tuple[TurnRows, UpdatePlan]:
            found.rows, found.plan = self._scored_rows(*args)
            return found.rows, found.plan

        def optimizer_step(rows: TurnRows, microbatches: Sequence[Microbatch]) -> tuple[float, bool]:
            with counted_tokens(self.lm) as count:
                began = time.perf_counter()
                loss, applied = self._optimizer_step(rows, microbatches)
                found.seconds += time.perf_counter() - began
            found.tokens += count()
            found.losses.append(loss)
            return loss, applied

        def keep(gradients: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
            if keep_gradients:
                found.gradients.append({self._names[id(ref)]: value.clone() for ref, value in gradients.items()})
            return gradients

        self.learner.scoring.scored_rows = scored_rows
        self.learner._optimizer_step = optimizer_step
        self.learner.postprocess_gradients = keep
        for group in groups:
            add_teacher_contexts(group, self.learner.config, self.learner.policy_module.tokenizer)
        self.learner.update(episodes=list(groups), timesteps={"training_iteration": 1})
        return found


@contextmanager
def counted_tokens(lm: torch.nn.Module) -> Iterator[Callable[[], int]]:
    """Count the token ids that the model embeds in the context, padding included; the yielded function returns the count."""
    found = [0]

    def count(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        found[0] += args[0].numel()

    hook = lm.get_input_embeddings().register_forward_pre_hook(count)
    try:
        yield lambda: found[0]
    finally:
        hook.remove()


def distinct_prefixes(sequences: Iterable[np.ndarray]) -> int:
    """Return the number of distinct prefixes of sequences: the minimum number of tokens to forward for all hidden states."""
    children: dict[tuple[int, int], int] = {}
    for sequence in sequences:
        node = 0
        for token in sequence.tolist():
            node = children.setdefault((node, token), len(children) + 1)
    return len(children)


def input_ids(table: TurnRows, rows: Iterable[int], two_views: bool) -> list[np.ndarray]:
    """Return the ids that the model needs to score each row; a response's last token predicts nothing."""
    views = (False, True) if two_views else (False,)
    return [sequence.inputs for hindsight in views for sequence in table.sequences(rows, hindsight)]


def relative_difference(found: Gradient, expected: Gradient) -> float:
    """Return the norm of the difference of two gradients, divided by the norm of ``expected``."""
    difference = sum(float((found[name] - value).double().square().sum()) for name, value in expected.items())
    return (difference / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5
