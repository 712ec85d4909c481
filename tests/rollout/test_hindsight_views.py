import numpy as np
import pytest
from chat_tokenizers import MODELS, chat_tokenizer
from recordings import alfworld_episodes, turns

from trial_ray.environments.alfworld import ADAPTER
from trial_ray.rollout.hindsight import CUT_MARK, OUTCOME, PrivilegedView, augment, encode_evidence, outcome_view
from trial_ray.rollout.prompts import PromptBuilder


def recorded_turns(origin, model, num_episodes=6):
    """Ordinary prompt, response ids and outcome view of every turn of some recorded episodes."""
    tokenizer = chat_tokenizer(model)
    build = PromptBuilder(tokenizer, ADAPTER.template("tagged"), 4096)
    for episode in alfworld_episodes(origin)[:num_episodes]:
        for arguments, action, after in turns(episode):
            response = f"<think>The goal is {arguments['task']}</think>\n<action>{action}</action>"
            response = np.asarray([*tokenizer.encode(response), tokenizer.eos_token_id], dtype=np.int32)
            view = outcome_view(after["observation"], terminal=after["done"], success=after["won"])
            yield build.build(**arguments), response, view, after


@pytest.mark.parametrize("model", MODELS)
def test_both_views_of_recorded_turns_score_the_identical_response(model, origin):
    tokenizer = chat_tokenizer(model)
    count = 0
    for prompt, response, view, _ in recorded_turns(origin, model):
        evidence = encode_evidence(view, tokenizer)
        hindsight = augment(prompt.ids, prompt.insert_at, evidence)
        ordinary_context = np.concatenate([prompt.ids, response])
        hindsight_context = np.concatenate([hindsight, response])
        assert len(hindsight) == len(prompt.ids) + len(evidence)
        assert np.array_equal(ordinary_context[len(prompt.ids) :], hindsight_context[len(hindsight) :])
        # Taking the evidence out gives back the ordinary prompt: nothing else differs between the views.
        end = prompt.insert_at + len(evidence)
        assert np.array_equal(np.delete(hindsight, slice(prompt.insert_at, end)), prompt.ids)
        count += 1
    assert count > 50


@pytest.mark.parametrize("model", MODELS)
def test_evidence_reads_as_the_end_of_the_users_message(model, origin):
    tokenizer = chat_tokenizer(model)
    for prompt, _, view, after in recorded_turns(origin, model, 2):
        hindsight = augment(prompt.ids, prompt.insert_at, encode_evidence(view, tokenizer))
        behind = tokenizer.decode(prompt.ids[prompt.insert_at :])
        verdict = "\nThe episode ended: the task succeeded." if after["won"] else ""
        text = tokenizer.decode(hindsight)
        assert text.endswith("</action>." + OUTCOME.lead + after["observation"] + verdict + behind)
        assert text.startswith(tokenizer.decode(prompt.ids[: prompt.insert_at]))


def test_ongoing_turn_shows_what_the_environment_answered_and_nothing_else():
    view = outcome_view("You pick up the apple 1.\n", terminal=False, success=False)
    assert view == PrivilegedView("You pick up the apple 1.")


def test_truncated_last_turn_carries_no_verdict():
    assert outcome_view("Nothing happens.", terminal=False, success=False).text == "Nothing happens."


def test_terminal_turn_carries_its_consequence():
    won = outcome_view("You move it.", terminal=True, success=True).text
    lost = outcome_view("You move it.", terminal=True, success=False).text
    assert won == "You move it.\nThe episode ended: the task succeeded."
    assert lost == "You move it.\nThe episode ended: the task failed."
    assert outcome_view("", terminal=True, success=True).text == "The episode ended: the task succeeded."


@pytest.mark.parametrize("model", MODELS)
def test_special_tokens_in_an_outcome_stay_text(model):
    tokenizer = chat_tokenizer(model)
    specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    view = outcome_view(" ".join(specials), terminal=False, success=False)
    ids = encode_evidence(view, tokenizer)
    assert not set(ids.tolist()) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == OUTCOME.lead + view.text


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("limit", [100, 101, 512])
def test_long_evidence_is_cut_in_its_middle_and_marked(model, limit):
    tokenizer = chat_tokenizer(model)
    outcome = " ".join(f"shelf {i}" for i in range(1000))
    ids = encode_evidence(outcome_view(outcome, terminal=True, success=True), tokenizer, limit)
    text = tokenizer.decode(ids)
    assert len(ids) == limit
    assert text.startswith(OUTCOME.lead + "shelf")
    assert CUT_MARK.strip() in text
    assert text.endswith("succeeded.")


def test_evidence_of_exactly_the_limit_is_not_cut():
    tokenizer = chat_tokenizer("qwen3")
    view = PrivilegedView("shelf 1 and a mug 2")
    whole = encode_evidence(view, tokenizer)
    assert np.array_equal(encode_evidence(view, tokenizer, len(whole)), whole)
    assert whole.dtype == np.int32
    assert CUT_MARK.strip() not in tokenizer.decode(whole)


def test_limit_that_leaves_no_room_is_refused():
    with pytest.raises(ValueError, match="max_outcome_tokens"):
        encode_evidence(PrivilegedView("shelf " * 50), chat_tokenizer("tiny"), 8)


def test_empty_evidence_leaves_the_prompt():
    assert augment(np.arange(4), 2, []).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("insert_at", "expected"), [(0, [9, 1, 2]), (1, [1, 9, 2]), (2, [1, 2, 9])])
def test_evidence_goes_before_the_index(insert_at, expected):
    augmented = augment([1, 2], insert_at, [9])
    assert augmented.tolist() == expected
    assert augmented.dtype == np.int32


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([1, 2], 3, [9]), "insert_at"),
        (([1, 2], -1, [9]), "insert_at"),
        (([[1, 2]], 0, [9]), "prompt_ids"),
        (([1, 2], 0, [0.5]), "evidence_ids"),
    ],
)
def test_wrong_arguments_are_named(arguments, name):
    with pytest.raises(ValueError, match=name):
        augment(*arguments)
