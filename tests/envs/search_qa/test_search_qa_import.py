"""Import of a corpus and of questions: what is taken, what is dropped, and what ends the import."""

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet
from text_games import begin

from trial_envs.errors import CorruptCatalogueError, MissingDataError
from trial_envs.search_qa.env import SearchQAEnv
from trial_envs.search_qa.importing import TAKEN, import_data
from trial_ray import cli

PASSAGES = [
    *(json.dumps({"id": str(n), "contents": f'"Lamp {n}"\nLamp number{n} is red.'}) for n in range(25)),
    "nonsense",
    "[1]",
    '{"id": "x"}',
    '{"contents": " "}',
    '{"contents": 3}',
    "[" * 10**5,
]
QUESTIONS = {
    "question": ["Which lamp is red? ", "", "Which lamp?", "Which?"],
    "golden_answers": [["Lamp 3", "3"], ["x"], ["Lamp 7"], []],
    "data_source": ["nq", "nq", "bamboogle", "nq"],
}


@pytest.fixture
def files(tmp_path, own_cache):
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt") as stream:
        stream.write("\n".join(PASSAGES))
    parquet.write_table(pyarrow.table(QUESTIONS), tmp_path / "train.parquet")
    (tmp_path / "test.dev.jsonl").write_text(
        '{"question": "Which lamp?", "golden_answers": "Lamp 1"}\n{"question": "x", "golden_answers": [1]}'
    )
    return [tmp_path / name for name in ("corpus.jsonl.gz", "train.parquet", "test.dev.jsonl")]


def test_imported_data_are_played_without_naming_a_folder(files, capsys):
    corpus, *questions = map(str, files)
    assert cli.main(["data", "search-qa", "--corpus", corpus, "--questions", *questions]) == 0
    env = SearchQAEnv()
    _, info = begin(env, 0)
    assert env.split == "train"
    assert info["task"] == "Which lamp is red?"
    assert info["family"] == "nq"
    assert env.step("search[number3]")[0] == "[1] Lamp 3: Lamp number3 is red."
    assert env.step("answer[3]")[1] == 1.0
    assert cli.main(["data", "search-qa"]) == 0
    assert "25 passages, questions: train 2, test 1" in capsys.readouterr().out
    for words in (f"--corpus {corpus}", "--generate 3", f"--questions {corpus} --out {files[0].parent}"):
        assert cli.main(["data", "search-qa", *words.split()]) == 2
    assert files[0].exists()


def test_entries_are_counted_with_the_reason_for_which_they_were_dropped(files, tmp_path):
    folder, counts = import_data(files[0], [*files[1:], files[2]], tmp_path / "index")
    answers = {"golden_answers is not a list of texts": 1}
    assert counts == {
        files[0]: {TAKEN: 25, "not a JSON object": 3, "contents is not a text": 3},
        files[1]: {TAKEN: 2, "question is not a text": 1} | answers,
        files[2]: {TAKEN: 1} | answers,
    }
    assert len(SearchQAEnv("test", data=folder).tasks()) == 2  # files of one name are one split


def test_questions_without_a_corpus_need_a_server(files, tmp_path):
    folder, _ = import_data(None, files[1:], tmp_path / "index")
    with pytest.raises(MissingDataError, match="no passages"):
        SearchQAEnv(data=folder).reset(seed=0)


def test_a_failed_import_keeps_the_earlier_one(files, tmp_path):
    folder, _ = import_data(files[0], files[1:])
    contents = {"empty.jsonl": b"", "broken.parquet": b"PAR1 nothing", "cut.jsonl.gz": files[0].read_bytes()[:-20]}
    for name, content in {**contents, "nowhere": None}.items():
        file, error = tmp_path / name, MissingDataError
        if content is not None:
            file.write_bytes(content)
            error = CorruptCatalogueError
        for corpus, questions in ((file, files[1:]), (files[0], [file])):
            with pytest.raises(error):
                import_data(corpus, questions)
    assert begin(SearchQAEnv(), 1)[1]["family"] == "bamboogle"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
