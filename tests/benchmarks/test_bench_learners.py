"""What the benchmarks of the update measure is what they say: the same gradient in every contestant, every token counted."""

from __future__ import annotations

import gpu_kernels
import gpu_learner
import numpy as np
import pytest
import torch
from gpu_models import Setup
from learners import BenchLearner, counted_tokens, distinct_prefixes, input_ids, relative_difference
from plain_loop import PlainLoop
from synthetic_groups import synthetic_groups
from transformers import AutoModelForCausalLM

from trial_ray.algorithms import TRIALConfig
from trial_ray.learner.packing import Row


@pytest.fixture(scope="module")
def groups():
    return synthetic_groups(vocab_size=400, num_groups=3, group_size=4, seed=3)


@pytest.fixture(scope="module")
def bench(model_path):
    training = {
        "hindsight_coeff": 0.0,  # the plain loop is GRPO's
        "kl_coeff": 0.0,
        "entropy_coeff": 0.0,
        "max_logprob_gap": 1e9,
        "minibatch_rows": 16,
        "microbatch_rows": 6,
    }
    config = TRIALConfig().environment("trial/ALFWorld-v0").rl_module(model_path=model_path).training(**training)
    return BenchLearner(config)


def test_distinct_prefixes_are_those_of_a_set():
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 3, rng.integers(1, 9)) for _ in range(50)]
    prefixes = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
    assert distinct_prefixes(sequences) == len(prefixes)


def test_inputs_leave_out_the_last_token_and_show_the_evidence_in_the_second_view():
    row = Row(np.array([5, 6, 7]), 2, np.array([8, 9]), np.array([1, 2]))
    assert [ids.tolist() for ids in input_ids([row], two_views=True)] == [[5, 6, 7, 8], [5, 6, 1, 2, 7, 8]]


def test_the_plain_loop_comes_to_the_learners_gradients(bench, groups, model_path):
    update = bench.update(groups, keep_gradients=True)
    lm = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    loop = PlainLoop(lm, update.rows, update.plan, tokens_per_batch=100)
    expected = []
    assert loop.update(lambda: expected.append({n: p.grad.clone() for n, p in lm.named_parameters()})) > 0
    assert len(expected) == len(update.gradients) > 1
    for found, plain in zip(update.gradients, expected, strict=True):
        assert relative_difference(found, plain) < 1e-5
    torch.testing.assert_close(loop.logprobs(), update.rows.logprobs, atol=2e-6, rtol=0)


def test_an_update_that_is_measured_changes_no_weights_and_counts_its_tokens(bench, groups):
    before = [parameter.clone() for parameter in bench.lm.parameters()]
    update = bench.update(groups)
    assert all(torch.equal(one, other) for one, other in zip(before, bench.lm.parameters(), strict=True))
    assert update.seconds > 0
    rows = update.rows.model_rows(range(len(update.rows)))
    minibatches = [np.concatenate([each.rows for each in step]) for step in update.plan.steps]
    for count, step in zip(update.tokens, minibatches, strict=True):
        assert count >= distinct_prefixes(input_ids([rows[row] for row in step], two_views=False))
    with counted_tokens(bench.lm) as forwarded:
        bench.lm(torch.ones(2, 7, dtype=torch.long))
    assert forwarded() == 14


@pytest.mark.parametrize("part", [gpu_kernels.kernels, gpu_learner.learner, gpu_learner.numerics])
def test_the_parts_for_a_gpu_run_on_the_cpu(part):
    measures, details = part(Setup(torch.device("cpu"), small=True))
    assert details
    assert all(np.isfinite(measure.figure) for measure in measures)
    exact = [measure for measure in measures if "float32 trees" in measure.name or "gradient of trees" in measure.name]
    assert all(measure.passes for measure in exact)


@pytest.mark.gpu
@pytest.mark.parametrize("part", [gpu_kernels.kernels, gpu_learner.numerics])
def test_the_parts_agree_with_float32_on_a_gpu(part):
    measures, _ = part(Setup(torch.device("cuda"), small=True))
    assert all(measure.passes for measure in measures if measure.better == "lower")
