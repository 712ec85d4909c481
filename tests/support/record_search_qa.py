"""Record scores and turns of released code, and rankings of bm25s, for tests/envs/search_qa.

    python tests/support/record_search_qa.py SEARCH_R1 SQUAD     # checkouts of Search-R1 a14dc3a and SQuAD-explorer eee5fdb

It needs bm25s 0.3.16. The scores are those of Search-R1's ``verl/utils/reward_score/qa_em.py`` (exact match) and of SQuAD's
``evaluate-v2.0.py`` (exact match and F1), the turns those of Search-R1's ``search_r1/llm_agent/generation.py`` over our corpus.
"""

import json
import lzma
import random
import runpy
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock

from trial_envs.search_qa.env import SearchQAEnv

DATA = Path(__file__).parents[1] / "data"
SCORES, RANKINGS = DATA / "search_qa_scores.json.xz", DATA / "search_qa_rankings.json.xz"
TURNS = DATA / "search_qa_turns.json.xz"
PAIRS, QUERIES, PASSAGES, TOP = 2000, 1000, 3000, 10
EPISODES, SEARCHES = 50, 4
FORMS = (
    "<think> Why? </think>\n<search>{}</search>",
    "<search>\n {} </search> and <answer>nothing</answer>",
    "</search><search>{}</search>",
    "<answer><search>{}</search>",
    "<search>{}<search></search>",
    "<search>{}",
    "{}",
)
"""Responses that search, or that are invalid."""
WORLD = ("recorded", PASSAGES, False)
PIECES = (
    "The|a|an|THE|theatre|Anna|A.|the-the|’the’|Straße|İstanbul|ﬁn|ǅ|Ⅻ|ß|É|e\u0301|| |\t|\n|\u00a0|\u3000|\u200b|\u2028|1,000|1000|"
    "3.14|-5|٣|½|1st|!?|…|“|”|_|U.S.A.|rock'n'roll|rock’n’roll|['a', 'b']|[]|None|東京|日本 語|🎉|an_an|a1|\ud800|\x00"
)


def odd_text(rng):
    return rng.choice(["", " ", "  ", " \t"]).join(rng.choices(PIECES.split("|"), k=rng.randint(0, 5)))


def odd_pairs():
    """Return answers and accepted answers with odd characters; many share words."""
    rng, pairs = random.Random(0), []
    for _ in range(PAIRS):
        accepted = [odd_text(rng) for _ in range(rng.randint(1, 3))]
        words = rng.choices([*rng.choice(accepted).split(), odd_text(rng)], k=rng.randint(1, 6))
        changed = [rng.choice((word, word.upper(), f"the {word}", f"{word}.")) for word in words]
        pairs.append((rng.choice((" ".join(changed), " ".join(changed), rng.choice(accepted))), accepted))
    return pairs


def recorded_environment(**settings):
    return SearchQAEnv(split="generated", num_games=EPISODES, num_passages=500, max_turns=SEARCHES + 1, **settings)


def turns_of_search_r1(checkout):
    """Return response, observation, end and validity of the turns of scripted episodes, as Search-R1's loop has them."""
    for name in ("verl", "verl.utils", "verl.utils.tracking"):  # of training alone
        sys.modules[name] = MagicMock()
    sys.path.insert(0, str(checkout))
    manager = object.__new__(import_module("search_r1.llm_agent.generation").LLMGenerationManager)
    env, rng, episodes = recorded_environment(), random.Random(1), []

    def documents(query):
        return [{"document": {"contents": "\n".join(passage)}} for passage in env._corpus.search(query, 3)]

    manager._batch_search = lambda queries: {"result": [*map(documents, queries)]}
    for task in env.tasks():
        env.reset(options={"task": task})
        answer = f"So <answer> {env.question.answers[0]} </answer>"
        queries = rng.choices([*env.question.searches, env.question.text, "qwertz"], k=SEARCHES)
        responses = [*(rng.choice(FORMS).format(query) for query in queries), rng.choice((answer, answer, FORMS[0]))]
        episode = []
        for number, response in enumerate(responses[rng.randint(0, SEARCHES) :], start=1):
            observations, dones, valid, _ = manager.execute_predictions(
                [response], "", [True], do_search=number <= SEARCHES
            )
            episode.append((response, observations[0], bool(dones[0]), bool(valid[0])))
            if dones[0]:
                break
        episodes.append(episode)
    return episodes


def write(path, value):
    path.write_bytes(lzma.compress(json.dumps(value).encode()))


def main(search_r1, squad):
    import bm25s

    from trial_envs.search_qa.world import World
    from trial_envs.text_index.analyser import index_terms

    released = runpy.run_path(f"{search_r1}/verl/utils/reward_score/qa_em.py")
    evaluation = runpy.run_path(f"{squad}/evaluate-v2.0.py")
    rows = [
        (
            answer,
            accepted,
            released["em_check"](answer, accepted),
            max(evaluation["compute_exact"](text, answer) for text in accepted),
            max(evaluation["compute_f1"](text, answer) for text in accepted),
        )
        for answer, accepted in odd_pairs()
    ]
    write(SCORES, rows)
    write(TURNS, turns_of_search_r1(search_r1))
    world = World(*WORLD)
    terms = [list(index_terms("\n".join(passage))) for passage in world.passages()]
    index = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    index.index(terms, show_progress=False)
    rankings = []
    for number, question in enumerate(world.questions(QUERIES)):
        query = question.text if number % 2 else question.searches[-1]
        scores = index.get_scores(list(index_terms(query)))
        best = sorted(range(len(scores)), key=lambda position: (-scores[position], position))[:TOP]
        rankings.append((query, [(at, round(float(scores[at]), 4)) for at in best if scores[at] > 0]))
    write(RANKINGS, rankings)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
