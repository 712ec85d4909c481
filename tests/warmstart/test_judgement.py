"""What the judgement of a hindsight view says of a model that is known to judge well, badly, or not at all."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_warmstart import ADAPTER, HOME, SETTINGS

from trial_ray import cli
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.adapters.registry import make_entries
from trial_ray.models.tiny import build_tiny_model, build_tokenizer
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.rollout.episode import play_episode
from trial_ray.trajectory import Turn
from trial_ray.warmstart import judgement as module
from trial_ray.warmstart.demonstrations import outcome_evidence
from trial_ray.warmstart.judgement import auc, judge
from trial_ray.warmstart.policy import HeldOutGames, Policy
from trial_ray.warmstart.settings import EVALUATED


def test_the_area_is_the_share_of_pairs_in_the_right_order():
    random = np.random.default_rng(0)
    scores, positive = random.integers(0, 6, 60).astype(float), random.random(60) < 0.3
    pairs = [(a > b) + (a == b) / 2 for a in scores[positive] for b in scores[~positive]]
    assert auc(scores, positive) == pytest.approx(np.mean(pairs))
    assert auc(scores, np.ones(60, bool)) is None


@contextmanager
def untrained():
    """An untrained policy, and held-out games for it."""
    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
    builder = PromptBuilder(tokenizer, ADAPTER.template("plain"), SETTINGS.max_prompt_tokens)
    policy = Policy(SETTINGS, HOME, build_tiny_model(tokenizer, "nano"), tokenizer, builder)
    with HeldOutGames(policy, EVALUATED) as games:
        yield policy, games


def test_gaps_are_means_of_the_two_views_differences():
    with untrained() as (policy, games):
        played = games.play()[:2]
    tokenizer, model = policy.tokenizer, policy.model
    expected = []
    for trajectory in played:
        for turn, evidence in zip(trajectory.turns, outcome_evidence(trajectory, tokenizer), strict=True):
            prompt, at, said = turn.prompt_ids, turn.insert_at, turn.response_ids
            views = [prompt, np.concatenate([prompt[:at], evidence, prompt[at:]])]
            logprobs = [
                model(torch.tensor([[*view, *said]])).logits[0, len(view) - 1 : -1].double().log_softmax(-1)
                for view in views
            ]
            ordinary, hindsight = (found[range(len(said)), said.tolist()] for found in logprobs)
            expected.append((hindsight - ordinary).clamp(-2, 2).mean().item())
    assert module._gaps(policy, played) == pytest.approx(expected, abs=1e-5)


def scripted(entry):
    """Trajectories of the solution with an idle command before each of its commands, in place of the model's."""

    def play(watch):
        found = []
        for task in entry.tasks():
            env = GuardedEnv(entry)

            async def act(result, history, step, env=env):
                action = "inventory" if step % 2 else env.walkthrough()[(step - 1) // 2]
                ids = np.array([5, 6, 7], np.int32)
                return Turn(action=action, prompt_ids=ids, insert_at=2, response_ids=ids)

            found.append(asyncio.run(play_episode(env, task, watch(task, SimpleNamespace(act=act), env))))
            env.close()
        return found

    return SimpleNamespace(play=play)


def test_decisive_and_wasted_turns_have_different_gaps(monkeypatch):
    """The scorer is a hindsight view that confirms solutions and nothing else."""
    (entry,) = make_entries([(SETTINGS.env, {"difficulty": "tiny", "max_turns": 12}, 1.0)])
    entry = entry.with_config(split="generated", num_games=4, generator_seed=3)
    monkeypatch.setattr(
        module,
        "_gaps",
        lambda policy, trajectories: [
            -1.0 if turn.action == "inventory" else 1.0 for each in trajectories for turn in each.turns
        ],
    )
    judged = judge(Policy(SETTINGS, entry, None, None, None), scripted(entry))
    found = judged.figures
    assert all(each.success for each in judged.trajectories)
    assert found["decisive"]["turns"] == found["routine"]["turns"] == found["turns"] / 2
    assert (found["decisive"]["gap"], found["routine"]["gap"]) == (1.0, -1.0)
    assert found["auc_routine"][0] == 1.0
    # The explorer, which does not know where things are, may plan another receptacle than the solution's.
    assert not any(turn.planned for turn in judged.turns if turn.action == "inventory")
    assert found["planned"]["turns"] > len(judged.turns) / 4
    assert found["auc_wasted"][0] > 0.8


def test_turns_of_the_demonstrator_are_judged_in_place_of_the_models(monkeypatch):
    tokenizer, scored = build_tokenizer(ADAPTER.warm_start.vocabulary), []
    builder = PromptBuilder(tokenizer, ADAPTER.template("plain"), SETTINGS.max_prompt_tokens)
    monkeypatch.setattr(
        module,
        "load_policy",
        lambda settings, entry: Policy(settings, entry, build_tiny_model(tokenizer, "nano"), tokenizer, builder),
    )
    monkeypatch.setattr(module, "_gaps", lambda *arguments: scored.extend(arguments[-1]) or [0.0] * 99)
    found = [module.judge_model(SETTINGS, HOME, demonstrator=probability) for probability in (0.0, 0.5)]
    assert [each.figures["games"] for each in found] == [5, 5]
    assert found[0].figures["wasted"]["turns"] == 0
    assert found[1].figures["planned"]["turns"] > found[1].figures["wasted"]["turns"] > 0
    # What is scored is what was done: no action noise.
    turns = [turn for trajectory in scored for turn in trajectory.turns]
    assert [tokenizer.decode(turn.response_ids, skip_special_tokens=True) for turn in turns] == [
        turn.action for turn in turns
    ]


def test_the_command_judges_a_model_and_writes_what_it_found(tmp_path, capsys):
    folder = tmp_path / "model"
    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
    build_tiny_model(tokenizer, "nano").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = ["judge", str(folder), "--games", "3", "--set", 'env_config={"difficulty":"tiny","max_turns":4}']
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "3 held-out games, 0 won" in said
    assert "area under the curve as a detector of wasted turns unknown" in said
    written = json.loads((tmp_path / "out" / "judgement.json").read_text())
    assert len(written["of_turns"]) == 12
    assert (tmp_path / "out" / "judgement.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    assert cli.main([*words, "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert cli.main(["judge", str(tmp_path / "absent")]) == 2
    with pytest.raises(SystemExit) as refused:
        cli.main(["judge", str(folder), "--games", "0"])
    assert refused.value.code == 2
    (folder / "warmstart.json").write_text("{}")
    assert cli.main(["judge", str(folder)]) == 2
    assert "not a record of a warm start" in capsys.readouterr().err
