"""Agreement of the hindsight log-ratio with the expert and the planner, for models that are known to judge well or not at all."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cli_fakes import read
from scored_rows import Row, own_scores
from warm_starts import HOME, SETTINGS

from trial_ray import cli
from trial_ray.trajectory import Turn
from trial_ray.warmstart.agreement import auc, compare_with_expert, mean_gaps
from trial_ray.warmstart.demonstrations import outcome_contexts
from trial_ray.warmstart.policy import held_out_games
from trial_ray.warmstart.settings import EVALUATED


def test_area_is_the_share_of_pairs_in_the_right_order():
    scores, positive = np.random.randint(0, 6, 60).astype(float), np.random.random(60) < 0.3
    pairs = [(a > b) + (a == b) / 2 for a in scores[positive] for b in scores[~positive]]
    assert auc(scores, positive) == pytest.approx(np.mean(pairs))
    assert auc(scores, np.ones(60, bool)) is None


def test_gaps_are_mean_differences_of_the_two_views(policy):
    untrained = policy(evaluation_games=2)
    with held_out_games(untrained, EVALUATED) as games:
        trajectories = games.play()
    expected = []
    for trajectory in trajectories:
        for turn, context in zip(trajectory.turns, outcome_contexts(trajectory, untrained.tokenizer), strict=True):
            row = Row(turn.prompt_ids, turn.insert_at, turn.response_ids, context.ids)
            ordinary, hindsight = own_scores(untrained.model, [row])
            expected.append((hindsight - ordinary).clamp(-2, 2).mean().item())
    assert mean_gaps(untrained, trajectories) == pytest.approx(expected, abs=1e-5)


def test_games_that_fail_leave_the_model_in_training_mode(policy):
    untrained = policy(evaluation_games=1)
    untrained.model.train()
    with held_out_games(untrained, EVALUATED) as games, pytest.raises(ZeroDivisionError):
        games.play(lambda *_: 1 / 0)
    assert untrained.model.training


def test_decisive_and_wasted_turns_have_different_gaps(policy, monkeypatch):
    """The scorer confirms the actions of solutions; the player gives an idle command before each command of the solution."""

    def scripted(task, player, env):
        async def act(result, history, step):
            action = "inventory" if step % 2 else env.walkthrough()[(step - 1) // 2]
            ids = np.array([5, 6, 7])
            return Turn(action=action, prompt_ids=ids, insert_at=2, response_ids=ids)

        return SimpleNamespace(act=act)

    def gaps(policy, trajectories):
        return [1.0 - 2 * (turn.action == "inventory") for trajectory in trajectories for turn in trajectory.turns]

    monkeypatch.setattr("trial_ray.warmstart.agreement.mean_gaps", gaps)
    untrained = replace(policy(evaluation_games=4), entry=HOME.with_config(max_turns=12))
    with held_out_games(untrained, EVALUATED) as games:
        agreement = compare_with_expert(untrained, games, scripted)
    figures = agreement.figures
    assert figures["won"] == figures["games"] == 4
    assert figures["decisive"]["turns"] == figures["routine"]["turns"] == figures["turns"] / 2
    assert figures["decisive"]["gap"] == 1.0
    assert figures["routine"]["gap"] == -1.0
    assert figures["auc_routine"][0] == 1.0
    # The explorer does not know where objects are, and may plan another receptacle than the solution's.
    assert not any(turn.planned for turn in agreement.turns if turn.action == "inventory")
    assert figures["planned"]["turns"] > figures["turns"] / 4
    assert figures["auc_wasted"][0] > 0.8


def test_command_measures_a_model_and_writes_its_turns(policy, tmp_path):
    untrained, folder, file = policy(), tmp_path / "model", tmp_path / "out/hindsight.json"
    for part in (untrained.model, untrained.tokenizer):
        part.save_pretrained(folder)

    def evaluate(options="", model=folder):
        line = f'evaluate {model} --hindsight --set env_config={{"difficulty":"tiny","max_turns":4}} {options}'
        return cli.main(line.split())

    assert evaluate(f"--tasks 3 --env {SETTINGS.env} --json {file}") == 0
    written = read(file)
    assert written["games"] == 3
    assert written["won"] == 0
    assert written["auc_wasted"] is None
    assert len(written["of_turns"]) == 12
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for rate, wastes in ((0.0, False), (0.5, True)):
        again = tmp_path / str(rate)
        assert evaluate(f"--tasks 5 --demonstrator {rate} --env {SETTINGS.env} --json {again}") == 0
        assert (read(again)["wasted"]["turns"] > 0) == wastes
    for refused in (f"--json {file}", "--tasks quick", "--split train", "--env no/Such-v0"):
        assert evaluate(refused) == 2
    assert evaluate(model="oracle") == evaluate(model=tmp_path / "absent") == 2
    assert cli.main(f"evaluate {folder} --demonstrator 0.5".split()) == 2
    (folder / "warmstart.json").write_text("{}")
    assert evaluate() == 2
