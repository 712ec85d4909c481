"""Search in texts: terms, stems, rankings of the published engine, and an index that is written in bounded memory."""

import random
from collections import Counter

import numpy as np
import pytest
from recordings import read_lines, webshop_records
from third_party import WEBSHOP_1K

from trial_envs.text_index import indexing, search
from trial_envs.text_index.analyser import index_terms
from trial_envs.text_index.indexing import IndexBuilder
from trial_envs.text_index.porter import stem
from trial_envs.text_index.records import save_array
from trial_envs.text_index.search import SearchIndex
from trial_envs.webshop.catalogue import open_catalogue


def test_terms_of_a_text():
    for text, terms in {
        "The men's running shoes, and a dog": ["men", "run", "shoe", "dog"],
        "non-slip 7.8 oz 1,000 10:30 don’t": ["non", "slip", "7.8", "oz", "1,000", "10", "30", "don’t"],
        "snake_case _ __ 3-pack come.assemble": ["snake_cas", "3", "pack", "come.assembl"],
        "漢字 ひら カタカナ 한국어": ["漢", "字", "ひ", "ら", "カタカナ", "한국어"],
        "★ ❤️ 👩‍💻 🇩🇪 & # $": ["★", "❤️", "👩‍💻", "🇩🇪"],
        "café crème it is": ["café", "crème"],
        "": [],
    }.items():
        assert list(index_terms(text)) == terms


def test_long_tokens_are_cut_into_pieces():
    assert [len(term) for term in index_terms("b" * 600)] == [255, 255, 90]


STEMS = """
caresses caress, ponies poni, agreed agre, feed feed, motoring motor, hopping hop, falling fall, filing file, sky sky,
happy happi, relational relat, technology technolog, geology geologi, triplicate triplic, goodness good, adjustment adjust,
adoption adopt, rate rate, cease ceas, controll control, as as
"""


def test_stems():
    for pair in STEMS.split(","):
        word, stemmed = pair.split()
        assert stem(word) == stemmed


@pytest.mark.data
def test_every_document_has_the_terms_of_the_published_index(published_shop):
    shop = open_catalogue(published_shop)
    for record in read_lines(WEBSHOP_1K / "doc_terms.jsonl.xz"):
        terms = Counter(index_terms(shop.product(shop.position(record["asin"])).document))
        assert terms == record["terms"], record["asin"]


def test_every_recorded_ranking_is_reproduced_in_full(origin, shop_folder):
    shop = open_catalogue(shop_folder)
    for record in webshop_records("search", origin):
        asins = [shop.listing(position).asin for position in shop.search(record["query"]).tolist()]
        assert asins == record["asins"], record["query"]


def build(folder, documents):
    folder.mkdir()
    builder = IndexBuilder(folder)
    for terms in documents:
        builder.add(terms)
    save_array(folder, "tie_ranks", range(len(documents)), "int32")
    return SearchIndex(folder, builder.finish())


def test_an_index_built_in_many_runs_answers_as_one_built_in_one(tmp_path, monkeypatch):
    rng = random.Random(0)
    documents = [rng.choices("abcdefghijkl", k=rng.randint(0, 40)) for _ in range(300)]
    whole = build(tmp_path / "whole", documents)
    monkeypatch.setattr(indexing, "RUN", 50)
    pieces = build(tmp_path / "pieces", documents)
    for query in ("b", "b c d", "e e e k", "z"):
        np.testing.assert_array_equal(whole.rank(query), pieces.rank(query))


def test_terms_of_equal_hash_are_distinguished(tmp_path, monkeypatch):
    for module in (indexing, search):
        monkeypatch.setattr(module, "term_hash", lambda term: 7)
    index = build(tmp_path / "index", [["b"], ["c"], ["d", "b"]])
    assert [index.search(term).tolist() for term in "cbx"] == [[1], [0, 2], []]


def test_equal_scores_are_ordered_by_the_ranks_of_the_index(tmp_path):
    index = build(tmp_path / "index", [["b"]] * 5)
    index._tie_ranks = np.array([3, 0, 4, 1, 2])
    assert index.search("b").tolist() == [1, 3, 4, 0, 2]
    assert index.search("b", limit=2).tolist() == [1, 3]
