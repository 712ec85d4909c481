"""Import of a corpus and of questions: what is taken, what is dropped, and what ends the import."""

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

from trial_envs.errors import CorruptCatalogueError, MissingDataError
from trial_envs.search_qa import importing
from trial_envs.search_qa.env import SearchQAEnv
from trial_envs.search_qa.importing import TAKEN, import_data
from trial_ray import cli

PASSAGES = [{"id": str(n), "contents": f'"Lamp {n}"\nLamp number{n} is red.'} for n in range(25)]
BAD_PASSAGES = ["nonsense", "[1]", '{"id": "x"}', '{"contents": " "}', '{"contents": 3}', "[" * 10**5]
QUESTIONS = {
    "question": ["Which lamp is red? ", "", "Which lamp?", "Which?"],
    "golden_answers": [["Lamp 3", "3"], ["x"], ["Lamp 7"], []],
    "data_source": ["nq", "nq", "bamboogle", "nq"],
    "prompt": [[{"role": "user", "content": "published prompt"}]] * 4,
}


@pytest.fixture(autouse=True)
def cache(own_cache, monkeypatch):
    monkeypatch.delenv("SEARCH_QA_DATA", raising=False)


@pytest.fixture
def files(tmp_path):
    lines = [*map(json.dumps, PASSAGES), *BAD_PASSAGES]
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt") as stream:
        stream.write("\n".join(lines))
    parquet.write_table(pyarrow.table(QUESTIONS), tmp_path / "train.parquet")
    rows = [{"question": "Which lamp?", "golden_answers": "Lamp 1"}, {"question": "Which?", "golden_answers": [1]}]
    (tmp_path / "test.dev.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [tmp_path / name for name in ("corpus.jsonl.gz", "train.parquet", "test.dev.jsonl")]


def test_imported_data_are_played_without_naming_a_folder(files, capsys, monkeypatch):
    monkeypatch.setattr(importing, "REPORTED", 10)
    corpus, *questions = map(str, files)
    assert cli.main(["data", "search-qa", "--corpus", corpus, "--questions", *questions]) == 0
    shown = capsys.readouterr().out.split()
    assert {"25", "taken", "JSON"} <= {*shown}
    env = SearchQAEnv()
    assert (env.split, len(env.tasks()), len(env.tasks("test"))) == ("train", 2, 1)
    _, info = env.reset(options={"task": 0})
    assert (info["task"], info["family"]) == ("Which lamp is red?", "nq")
    assert env.step("search[number3]")[0] == "[1] Lamp 3: Lamp number3 is red."
    assert env.step("answer[3]")[1] == 1.0
    assert cli.main(["data", "search-qa"]) == 0
    assert "25 passages, questions: train 2, test 1" in capsys.readouterr().out


def test_entries_are_counted_with_the_reason_for_which_they_were_dropped(files, tmp_path):
    reported = []
    _, counts = import_data(files[0], files[1:], tmp_path / "index", lambda file, number: reported.append(number))
    reasons = {"not a JSON object": 3, "contents is not a text": 3}
    assert counts[files[0]] == {TAKEN: 25, **reasons}
    assert counts[files[1]] == {TAKEN: 2, "question is not a text": 1, "golden_answers is not a list of texts": 1}
    assert counts[files[2]] == {TAKEN: 1, "golden_answers is not a list of texts": 1}
    assert reported == []


def test_questions_without_a_corpus_need_a_server(files, tmp_path):
    folder, _ = import_data(None, files[1:], tmp_path / "index")
    with pytest.raises(MissingDataError, match="no passages"):
        SearchQAEnv(data=folder).reset(seed=0)
    SearchQAEnv(data=folder, retriever="http://127.0.0.1:1").reset(seed=0)


def test_a_failed_import_keeps_the_earlier_one(files, tmp_path):
    target = tmp_path / "index"
    import_data(files[0], files[1:], target)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "cut.jsonl.gz").write_bytes(files[0].read_bytes()[:-20])
    (tmp_path / "generated.jsonl").write_bytes(files[2].read_bytes())
    (tmp_path / "two words.jsonl").write_bytes(files[2].read_bytes())
    for corpus, questions, error in (
        (tmp_path / "nowhere", files[1:], MissingDataError),
        (tmp_path, files[1:], CorruptCatalogueError),
        (tmp_path / "cut.jsonl.gz", files[1:], CorruptCatalogueError),
        (files[0], [], CorruptCatalogueError),
        (files[0], [files[1], files[1]], CorruptCatalogueError),
        *((files[0], [tmp_path / name], CorruptCatalogueError) for name in ("empty.jsonl", "broken.parquet")),
        *((files[0], [tmp_path / name], CorruptCatalogueError) for name in ("generated.jsonl", "two words.jsonl")),
    ):
        with pytest.raises(error):
            import_data(corpus, questions, target)
    assert SearchQAEnv(data=target).tasks() == SearchQAEnv(data=target).tasks("train")
    assert not list(tmp_path.glob("*.part"))


def test_wrong_arguments_of_the_command(files, tmp_path, capsys):
    assert cli.main(["data", "search-qa", "--corpus", str(files[0])]) == 2
    assert cli.main(["data", "search-qa", "--generate", "3"]) == 2
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letter").touch()
    arguments = ["--questions", str(files[1]), "--out", str(tmp_path / "letters")]
    assert cli.main(["data", "search-qa", *arguments]) == 2
    assert (tmp_path / "letters" / "letter").exists()
