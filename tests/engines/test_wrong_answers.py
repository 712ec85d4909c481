"""Engines that answer wrongly: another engine answers, or a typed error says what was found; nothing of it is used."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from fake_engines import CountingEngine, Handle, healthy, run

from trial_ray.engines.client import EngineClient
from trial_ray.engines.protocol import SamplingParams
from trial_ray.errors import EngineError

VOCAB_SIZE = 100


def with_first(values, value):
    """A copy whose first element is ``value``."""
    changed = np.array(values)
    changed[0] = value
    return changed


LIES = {
    "too few log-probabilities": (lambda batch: {"logprobs": batch.logprobs[:-1]}, "belong to different numbers"),
    "log-probabilities of each alternative": (lambda batch: {"logprobs": batch.logprobs[:, None]}, r"and \(2, 1\) log"),
    "ids that are no integers": (lambda batch: {"response_ids": batch.logprobs}, "ids of float32"),
    "a response too few": (lambda batch: {"lengths": batch.lengths[1:]}, "belong to different numbers"),
    "a request that nobody made": (
        lambda batch: {"numbers": tuple(number + 100 for number in batch.numbers)},
        "WrongAnswerError: the engine answered to request 100, which was never sent",
    ),
    "an id beyond the vocabulary": (
        lambda batch: {"response_ids": with_first(batch.response_ids, VOCAB_SIZE)},
        "WrongAnswerError: .*token id 100, expected 0 to 99",
    ),
    "a negative id": (lambda batch: {"response_ids": with_first(batch.response_ids, -1)}, "token id -1"),
    "NaN": (lambda batch: {"logprobs": with_first(batch.logprobs, np.nan)}, "log-probability of nan.* lower lr"),
    "a probability of more than 1": (lambda batch: {"logprobs": with_first(batch.logprobs, 0.5)}, "of 0.5"),
    "too long a response": (lambda batch: {"lengths": (5, 1, 1, 1)}, "has 5 tokens, expected 1 to 2"),
    "an empty response": (lambda batch: {"lengths": (0, 2, 4, 2)}, "has 0 tokens"),
    "the answers of others": (
        lambda batch: {"numbers": (*batch.numbers[1:], batch.numbers[0])},
        "answered to another prompt",
    ),
    "no known end": (lambda batch: {"finish_reasons": ("abort",) * 4}, "ended by 'abort'"),
    "failed that are none": (lambda batch: {"failed": None}, "TypeError"),
    "no weights": (lambda batch: {"weight_versions": (-1,) * 4}, "weights of version -1"),
}


class Liar(Handle):
    """Spoils what an engine answers."""

    def __init__(self, lie):
        super().__init__(CountingEngine())
        self.lie = lie

    async def _answer(self, client, batch):
        answers = await super()._answer(client, batch)
        return replace(answers, **self.lie(answers)) if answers.numbers else answers


def ask_four(handles):
    """Four different prompts of one group, so that one engine is asked first; what became of each."""
    client = EngineClient(handles, timeout_s=5.0, vocab_size=VOCAB_SIZE)
    prompts = [np.array([index, 5], np.int32) for index in range(4)]
    params = SamplingParams(max_tokens=2)

    async def all_of_them():
        asked = [client.generate(prompt, params, "group") for prompt in prompts]
        return await asyncio.gather(*asked, return_exceptions=True)

    return run(handles, all_of_them)


@pytest.mark.parametrize("name", LIES)
def test_a_wrong_answer_is_a_typed_error_and_never_a_response_and_another_engine_answers_instead(name):
    lie, words = LIES[name]
    found = ask_four([Liar(lie), *healthy()])
    assert [each.response_ids.tolist() for each in found] == [[index, index] for index in range(4)]
    found = ask_four([Liar(lie)])
    errors = [each for each in found if isinstance(each, BaseException)]
    assert len(errors) == 4  # the other responses of the message may be shifted
    assert all(type(error) is EngineError for error in errors)
    with pytest.raises(EngineError, match=words):
        raise errors[0]
