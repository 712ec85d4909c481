"""Partial results of unfinished evaluations, and the evaluation sets that are committed."""

import json
from dataclasses import replace

import pytest
from evaluation_samples import coin_flips, evaluation

from trial_ray.adapters.registry import make_entries
from trial_ray.errors import CheckpointError, InfrastructureError, UnwritableError
from trial_ray.evaluation.evaluation_sets import (
    EvaluationSet,
    EvaluationSetError,
    choose_evaluation_set,
    evaluation_set_names,
    read_evaluation_set,
)
from trial_ray.evaluation.results import EpisodeJournal, EvaluationResult, partial_path

RESULT = replace(evaluation(coin_flips(10, 0.5, 0)), weights="w")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep/result.json"


def journal(path, protocol=RESULT.protocol, weights="w"):
    return EpisodeJournal(path, protocol, weights)


def write_half(path, episodes=RESULT.episodes[:5], protocol=RESULT.protocol):
    with journal(path, protocol) as first:
        for episode in episodes:
            first.add(episode)


def known(journal):
    return [episode for episodes in journal.episodes.values() for episode in episodes]


def files(path):
    return {file.name: file.read_bytes() for file in path.parent.iterdir()}


def test_interrupted_evaluation_continues_and_is_not_played_again(path):
    """An evaluation of another protocol that ended before its first episode has left no header behind."""
    with journal(path, {**RESULT.protocol, "panel_sha256": "x"}):
        pass
    write_half(path)
    assert not path.exists()
    with journal(path) as second:
        assert known(second) == RESULT.episodes[:5]
        for episode in RESULT.episodes[5:]:
            second.add(episode)
        second.finish(RESULT)
    assert EvaluationResult.load(path) == RESULT
    with journal(path) as again:
        assert again.result == RESULT
    assert list(files(path)) == ["result.json"]


def test_truncated_line_is_dropped_and_written_again(path):
    write_half(path)
    partial = partial_path(path)
    whole = partial.read_bytes()
    partial.write_bytes(whole[:-20])
    with journal(path) as second:
        assert known(second) == RESULT.episodes[:4]
        second.add(RESULT.episodes[4])
    assert partial.read_bytes() == whole
    partial.write_bytes(whole[:10])  # not even the header is complete
    with journal(path) as third:
        assert third.episodes == {}


def test_a_task_is_known_with_all_of_its_episodes(path):
    """The process ended between two episodes of the last task, which is then played again."""
    protocol = {**RESULT.protocol, "rollouts": 3}
    lost, won = ([replace(RESULT.episodes[0], success=success)] * 3 for success in (False, True))
    other = [RESULT.episodes[1]] * 3
    write_half(path, [*other, *lost[:2]], protocol)
    write_half(path, won, protocol)
    with journal(path, protocol) as second:
        assert known(second) == other + won


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(("protocol", "weights"), [({"panel_sha256": "x"}, "w"), ({}, "other")])
def test_another_set_or_policy_is_refused(path, finished, protocol, weights):
    write_half(path)
    if finished:
        RESULT.save(path)
    before = files(path)
    with pytest.raises(CheckpointError):
        journal(path, {**RESULT.protocol, **protocol}, weights)
    assert files(path) == before


@pytest.mark.parametrize(("old", "new"), [("protocol", "other"), ('"score"', '"points"'), ("{", "["), (None, "notes")])
def test_other_content_is_a_typed_error_and_is_kept(path, old, new):
    write_half(path)
    partial = partial_path(path)
    partial.write_text(new if old is None else partial.read_text().replace(old, new))
    before = files(path)
    with pytest.raises(CheckpointError):
        journal(path)
    assert files(path) == before


def test_one_process_at_a_time_writes_where_it_can(path, tmp_path):
    with journal(path), pytest.raises(InfrastructureError):
        journal(path)
    with journal(path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError):
        journal(tmp_path / "file/result.json")


# -- committed evaluation sets -----------------------------------------------------------------------------------------

DIGESTS = {
    "seen-128": "7af17ef91f00",
    "unseen-128": "bf88f008bd86",
    "webshop-128": "688a46f48880",
    "search-qa-128": "771d4f25c49b",
}


def test_committed_evaluation_sets_never_change():
    assert {"quick", "standard", "full", *DIGESTS} == set(evaluation_set_names())
    for name, digest in DIGESTS.items():
        evaluation_set = read_evaluation_set(name)
        assert len(evaluation_set) == 128
        assert evaluation_set.digest[:12] == digest
        assert evaluation_set.instructions
    assert EvaluationSet.choose("e", "s", range(500), 128).task_ids == read_evaluation_set("webshop-128").task_ids


(GAMES,) = make_entries([("trial/ALFWorld-v0", {"split": "generated", "difficulty": "tiny", "num_games": 8}, 1.0)])


@pytest.mark.parametrize(
    "changes",
    [{}, {"instructions_sha256": "0" * 64}, {"sha256": "0" * 64}, {"split": "valid_seen"}],
)
def test_evaluation_set_is_played_on_its_own_data_only(changes, tmp_path, monkeypatch):
    monkeypatch.setattr("trial_ray.evaluation.evaluation_sets.FOLDER", tmp_path)
    chosen = EvaluationSet.from_entry(GAMES, 3)
    committed = {
        "env": chosen.env_id,
        "split": chosen.split,
        "task_ids": chosen.task_ids,
        "sha256": chosen.digest,
        "instructions_sha256": chosen.instructions,
        **changes,
    }
    (tmp_path / "mine.json").write_text(json.dumps(committed))
    if not changes:
        assert choose_evaluation_set(GAMES, "mine") == chosen
    for name, entry in (("mine", GAMES if changes else GAMES.with_config(generator_seed=5)), ("huge", GAMES)):
        with pytest.raises(EvaluationSetError):
            choose_evaluation_set(entry, name)
