"""The adapter of ``trial/SearchQA-v0``: prompts, teacher contexts, the committed evaluation set, and Search-R1's format."""

import asyncio
from contextlib import closing

import pytest
from text_games import Script, begin

from trial_envs.chat import make_chat_env
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.adapters.registry import make_entries
from trial_ray.adapters.search_qa import ADAPTER, SearchR1Template
from trial_ray.adapters.templates import PromptContext
from trial_ray.evaluation.evaluation_sets import EvaluationSet, choose_evaluation_set
from trial_ray.prompts.teacher_context import teacher_text
from trial_ray.rollout.episode import play_episode

SETTINGS = {"split": "generated_valid", "num_passages": 300, "num_games": 8}


def entry_of(**settings):
    return make_entries([("trial/SearchQA-v0", settings, 1.0)])[0]


def play(task, actions=None):
    """Play the walkthrough of a task, or other actions."""
    with closing(GuardedEnv(entry_of(**SETTINGS))) as env:
        env.reset(task, seed=0)
        solution = env.walkthrough()
        return asyncio.run(play_episode(env, task, Script(actions or solution))), solution


def test_the_committed_set_is_the_one_that_the_environment_generates(own_cache):
    entry = entry_of(split="generated_test")
    assert choose_evaluation_set(entry, "search-qa-128") == EvaluationSet.from_entry(entry, 128)


def test_outcomes_of_searches_are_passages_and_of_answers_verdicts(own_cache):
    trajectory, solution = play("2")
    wrong, _ = play("2", [*solution[:-1], "answer[nobody]"])
    texts = [teacher_text("outcome", trajectory, index, ADAPTER).text for index in range(len(solution))]
    assert all(text.startswith("[1] ") and "ended" not in text for text in texts[:-1])
    assert texts[-1] == "The answer is right.\nThe episode ended: the task succeeded."
    refused = teacher_text("outcome", wrong, len(solution) - 1, ADAPTER)
    assert refused.text == "The answer is wrong.\nThe episode ended: the task failed."


@pytest.mark.parametrize("style", ["tagged", "plain", "conversation", "tools"])
def test_prompts_show_the_question_once_and_the_passages(style):
    template = ADAPTER.template(style)
    question = "Who wrote The Ledger of Melkar?"
    forms = ("search[<your query>]", "answer[<your answer>]")
    first = template.render(PromptContext(question, f"Question: {question}", forms, (), 1))
    if style in ("conversation", "tools"):
        assert question in template.system(question)
    else:
        assert first.lower().count("wrote the ledger of melkar") == 1
    later = template.render(PromptContext(question, "[1] Melkar: Melkar lies in Zoria.", forms, (), 2))
    assert "zoria" in later.lower()
    assert all(form in later for form in forms)


def test_search_r1s_format_is_played_from_whole_responses(own_cache):
    template = SearchR1Template(ADAPTER.template("tagged"))
    assert "Who wrote it?" in template.system("Who wrote it?")
    with closing(GuardedEnv(entry_of(**SETTINGS, style="search_r1"))) as env:
        env.reset("0", seed=0)
        search, answer = env.walkthrough()
        for action in (f"<think>so</think>{search}", answer):
            projection = template.project(action)
            assert projection.valid
            result = env.step(projection.action)
            assert not result.invalid_action
    assert result.won
    assert not template.project("<think>I need <b>it</b>.</think>\n<search> {} ").valid


def test_lower_cased_actions_of_a_chat_win(own_cache):
    env = make_chat_env("trial/SearchQA-v0", **SETTINGS)
    for task in range(4):
        begin(env, task)
        for action in env.unwrapped.walkthrough:
            *_, info = env.step(f"<think>so</think><action>{action}</action>")
        assert info["won"]
