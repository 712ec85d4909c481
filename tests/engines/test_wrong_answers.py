"""Engines that answer wrongly: another engine answers, or a typed error says what was found; nothing of it is used."""

from __future__ import annotations

import asyncio
import pickle
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


def first(**changes):
    """Spoils the first response of a message: each field becomes what a function makes of it."""

    def lie(answers):
        (number, response), *others = answers
        made = {name: change(getattr(response, name)) for name, change in changes.items()}
        return [(number, replace(response, **made)), *others]

    return lie


LIES = {
    "too few log-probabilities": (first(logprobs=lambda values: values[:-1]), r"and \(1,\) log"),
    "log-probabilities of each alternative": (first(logprobs=lambda values: values[:, None]), r"and \(2, 1\) log"),
    "ids that are no integers": (first(response_ids=np.float32), "ids of float32"),
    "a request that nobody made": (
        lambda answers: [(number + 100, response) for number, response in answers],
        "WrongAnswerError: The engine answered request 100, which was never sent",
    ),
    "an id beyond the vocabulary": (
        first(response_ids=lambda ids: with_first(ids, VOCAB_SIZE)),
        "WrongAnswerError: .*token id 100, expected 0 to 99",
    ),
    "a negative id": (first(response_ids=lambda ids: with_first(ids, -1)), "token id -1"),
    "NaN": (first(logprobs=lambda values: with_first(values, np.nan)), "log-probability of nan.* lower lr"),
    "a probability of more than 1": (first(logprobs=lambda values: with_first(values, 0.5)), "of 0.5"),
    "too long a response": (first(response_ids=lambda ids: np.resize(ids, 5)), "has 5 tokens, expected 1 to 2"),
    "an empty response": (first(response_ids=lambda ids: ids[:0]), "has 0 tokens"),
    "no known end": (first(finish_reason=lambda _: "abort"), "finish_reason 'abort'"),
    "answers that are none": (lambda answers: [(number, None) for number, _ in answers], "AttributeError"),
    "no weights": (first(weight_version=lambda _: -1), "weight version -1"),
}


class Liar(Handle):
    """Spoils what an engine answers."""

    def __init__(self, lie):
        super().__init__(CountingEngine())
        self.lie = lie

    async def _answer(self, client, batch):
        answers = pickle.loads(await super()._answer(client, batch))
        return pickle.dumps(self.lie(answers) if answers else answers)


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
    assert len(errors) == 4  # the other responses of the message are not trusted
    assert all(type(error) is EngineError for error in errors)
    with pytest.raises(EngineError, match=words):
        raise errors[0]
