"""Journals of unfinished evaluations, and the evaluation sets that are committed."""

import json

import pytest
from evaluation_samples import coin_flips, evaluation

from trial_ray.adapters.registry import make_entries
from trial_ray.errors import CheckpointError, InfrastructureError, UnwritableError
from trial_ray.evaluation import evaluation_sets as named_sets
from trial_ray.evaluation.evaluation_sets import (
    EvaluationSet,
    EvaluationSetError,
    choose_evaluation_set,
    evaluation_set_names,
    instructions_digest,
    read_evaluation_set,
)
from trial_ray.evaluation.results import EpisodeJournal, EvaluationResult, partial_path

RESULT = evaluation(coin_flips(10, 0.5, 0))


def journal(path, protocol=RESULT.protocol, weights="w"):
    return EpisodeJournal(path, protocol, weights)


def write_half(path):
    with journal(path) as first:
        for episode in RESULT.episodes[:5]:
            first.add(episode)


def test_an_interrupted_evaluation_knows_what_it_played(tmp_path):
    path = tmp_path / "deep" / "result.json"
    write_half(path)
    assert not path.exists()
    with journal(path) as second:
        assert list(second.episodes.values()) == RESULT.episodes[:5]
        for episode in RESULT.episodes[5:]:
            second.add(episode)
        second.finish(RESULT)
    assert EvaluationResult.load(path) == RESULT
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_a_finished_evaluation_is_not_played_again(tmp_path):
    path = tmp_path / "result.json"
    finished = EvaluationResult(RESULT.protocol, RESULT.episodes, weights="w")
    finished.save(path)
    with journal(path) as again:
        assert again.result == finished
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_a_line_that_a_crash_cut_is_dropped_and_written_again(tmp_path):
    path = tmp_path / "result.json"
    write_half(path)
    partial = partial_path(path)
    whole = partial.read_bytes()
    partial.write_bytes(whole[:-20])
    with journal(path) as second:
        assert list(second.episodes.values()) == RESULT.episodes[:4]
        second.add(RESULT.episodes[4])
    assert partial.read_bytes() == whole
    partial.write_bytes(whole[:10])  # not even the head was whole
    with journal(path) as third:
        assert third.episodes == {}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("protocol", "weights", "words"),
    [
        ({"temperature": 1.0}, "w", "temperature is 0.4 there and 1.0 here"),
        ({"panel_sha256": "x"}, "w", "panel_sha256"),
        ({}, "other", "other weights"),
    ],
)
def test_another_protocol_evaluation_set_or_policy_is_refused(tmp_path, finished, protocol, weights, words):
    path = tmp_path / "result.json"
    if finished:
        EvaluationResult(RESULT.protocol, RESULT.episodes, weights="w").save(path)
    else:
        write_half(path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=words):
        journal(path, {**RESULT.protocol, **protocol}, weights)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_journal_that_is_anything_else_is_a_typed_error(tmp_path):
    path = tmp_path / "result.json"
    partial = partial_path(path)
    write_half(path)
    written = partial.read_text()
    for old, new in (
        ("protocol", "other"),
        ("weights", "other"),
        ('"score"', '"points"'),
        (written, "notes"),
        ("{", "["),
    ):
        partial.write_text(content := written.replace(old, new))
        with pytest.raises(CheckpointError):
            journal(path)
        assert partial.read_text() == content  # nothing is lost to an error
    (tmp_path / "file").write_text("")
    with pytest.raises(UnwritableError, match="file"):
        journal(tmp_path / "file" / "result.json")


def test_one_process_at_a_time(tmp_path):
    with journal(tmp_path / "r.json"), pytest.raises(InfrastructureError, match="Another process"):
        journal(tmp_path / "r.json")
    with journal(tmp_path / "r.json"):
        pass


DIGESTS = {"seen-128": "7af17ef91f00", "unseen-128": "bf88f008bd86", "webshop-128": "688a46f48880"}


def test_committed_evaluation_sets_never_change():
    assert {"quick", "standard", "full", *DIGESTS} == set(evaluation_set_names())
    for name, digest in DIGESTS.items():
        evaluation_set = read_evaluation_set(name)
        assert len(evaluation_set) == 128
        assert evaluation_set.digest.startswith(digest)
        assert evaluation_set.instructions
    goals = [int(task) for task in read_evaluation_set("webshop-128").task_ids]
    assert 0 <= min(goals) < max(goals) < 500


def test_a_committed_evaluation_set_is_what_its_size_chooses():
    goals = [str(number) for number in range(500)]
    assert EvaluationSet.choose("e", "s", goals, 128).task_ids == read_evaluation_set("webshop-128").task_ids


(GAMES,) = make_entries([("trial/ALFWorld-v0", {"split": "generated", "difficulty": "tiny", "num_games": 8}, 1.0)])


@pytest.fixture
def own_set(tmp_path, monkeypatch):
    """A function that commits an evaluation set of generated games, changed at will."""
    monkeypatch.setattr(named_sets, "FOLDER", tmp_path)

    def write(**changes):
        tasks = GAMES.tasks()[:3]
        value = {
            "env": GAMES.env_id,
            "split": "generated",
            "task_ids": tasks,
            "sha256": EvaluationSet(GAMES.env_id, "generated", tuple(tasks)).digest,
            "instructions_sha256": instructions_digest(GAMES, tasks),
        }
        (tmp_path / "mine.json").write_text(json.dumps({**value, **changes}))
        return tasks

    return write


def test_a_committed_evaluation_set_is_found_in_the_data(own_set):
    tasks = own_set()
    assert choose_evaluation_set(GAMES, "mine").task_ids == tuple(tasks)


@pytest.mark.parametrize(
    ("changes", "entry", "words"),
    [
        ({}, GAMES.with_config(generator_seed=5), "lack 3 of the 3 tasks"),
        ({"instructions_sha256": "0" * 64}, GAMES, "equal ids have other instructions"),
        ({"sha256": "0" * 64}, GAMES, "was changed"),
        ({"split": "valid_seen"}, GAMES, "expected trial/ALFWorld-v0 split 'valid_seen', got"),
    ],
)
def test_other_data_than_the_evaluation_set_was_made_from_are_refused(own_set, changes, entry, words):
    own_set(**changes)
    with pytest.raises(EvaluationSetError, match=words):
        choose_evaluation_set(entry, "mine")


def test_an_unknown_evaluation_set_names_the_known_ones():
    with pytest.raises(EvaluationSetError, match="seen-128"):
        choose_evaluation_set(GAMES, "huge")
