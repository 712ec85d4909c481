"""What a forward pass of the learner holds until its backward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from synthetic_groups import synthetic_groups
from transformers import Qwen2Config, Qwen2ForCausalLM

from trial_ray.algorithms.methods import new_config
from trial_ray.learner.connectors import group_turn_rows
from trial_ray.learner.loss import WeightedMeans
from trial_ray.learner.passes import MicrobatchPasses
from trial_ray.learner.update_plan import Microbatch
from trial_ray.models import tree_attention

VOCABULARY = 400


def model(**settings):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=VOCABULARY, num_key_value_heads=1, attn_implementation=tree_attention.register(), **sizes, **settings
    )
    return Qwen2ForCausalLM(config).eval()


MODELS = {
    "trees": {},
    "padded": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
}


class Watched:
    """A module that computes nothing and notes how many inputs each pass with a gradient has."""

    teacher = None

    def __init__(self, lm):
        self.lm = lm
        self.held = []

    def forward_train(self, batch):
        packed = batch["sequences"]
        if torch.is_grad_enabled():
            self.held.append(sum(pack.input_ids.numel() for pack in packed.packs))
        outputs = torch.zeros(2, len(packed.tokens), requires_grad=True)
        return {"logprobs": outputs[0], "entropy": outputs[1]}


@pytest.mark.parametrize("limit", [300, 2000])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("method", ["grpo", "trial"])
def test_no_pass_holds_more_inputs_than_allowed(kind, limit, method):
    groups = synthetic_groups(vocab_size=VOCABULARY, num_groups=40, group_size=4, seed=1)
    config = new_config(method).training(max_tokens_per_forward=limit, **_active(method))
    rows = group_turn_rows(groups, config)
    tokens = int(rows.lengths.sum())
    rows.logprobs, rows.hindsight_logprobs = torch.zeros(tokens), torch.zeros(tokens)
    rows.weights = torch.ones(len(rows))
    module = Watched(model(**MODELS[kind]))
    passes = MicrobatchPasses(module, config.method_class(config), config, WeightedMeans())
    pieces = np.array_split(np.arange(len(rows)), 3)
    passes.backward(rows, [Microbatch(piece, 0, len(piece) / len(rows)) for piece in pieces], 1)
    longest = max(turn.num_tokens for turn in rows.turns)
    assert sum(turn.num_tokens for turn in rows.turns) > limit, "else there is nothing to cut"
    assert longest < limit
    assert max(module.held) <= limit


def test_log_probabilities_that_are_not_finite_leave_a_minibatch_without_scalars():
    """So that its step is skipped, as with a clamp of each microbatch."""

    class Broken(Watched):
        def forward_train(self, batch):
            return {name: value * torch.nan for name, value in super().forward_train(batch).items()}

    groups = synthetic_groups(vocab_size=VOCABULARY, num_groups=2, group_size=4, seed=1)
    config = new_config("trial").training(clamp_scope="minibatch", **_active("trial"))
    rows = group_turn_rows(groups, config)
    tokens = int(rows.lengths.sum())
    rows.logprobs, rows.hindsight_logprobs = torch.zeros(tokens), torch.zeros(tokens)
    rows.weights = torch.ones(len(rows))
    passes = MicrobatchPasses(Broken(model()), config.method_class(config), config, WeightedMeans())
    scalars = passes.clamp_scalars(rows, [Microbatch(np.arange(len(rows)), 0, 1.0)], 1)
    assert scalars.isnan().all()
    assert passes.broken


def _active(method):
    return {"hindsight_start_iteration": 1} if method == "trial" else {}
