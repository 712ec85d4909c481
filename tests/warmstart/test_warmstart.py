"""Warm start on real generated games: what is demonstrated, what cloning achieves, what the cache keeps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_tokenizers import published_tokenizer
from torch.nn.functional import cross_entropy

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.adapters.external import GameAgent
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.adapters.registry import EnvironmentEntry, make_entries
from trial_ray.errors import (
    CheckpointError,
    ConfigError,
    EnvironmentFaultError,
    InfrastructureError,
    TrainingDivergedError,
    UserInputError,
)
from trial_ray.files import CACHE_VARIABLE, get_or_build
from trial_ray.models.tiny import build_tiny_model
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.prompts.tool_conversation import ToolConversationBuilder
from trial_ray.prompts.writer import Prompt
from trial_ray.warmstart import WarmStartSettings, cloning, warm_start
from trial_ray.warmstart import warmstart as module
from trial_ray.warmstart.cloning import (
    Example,
    Renamer,
    cloning_loss,
    collate,
    conversation_batches,
    shared_prefix_loss,
    updates,
)
from trial_ray.warmstart.demonstrations import collect, encode_response, to_examples
from trial_ray.warmstart.policy import HeldOutGames, Policy, load_policy
from trial_ray.warmstart.settings import CHECKED, DEMONSTRATED, task_set

SETTINGS = WarmStartSettings(
    env_config={"difficulty": "tiny", "max_turns": 8},
    size="nano",
    games=6,
    max_steps=4,
    check_every=2,
    check_games=3,
    evaluation_games=5,
    threads=1,
)


def entry_of(settings: WarmStartSettings) -> EnvironmentEntry:
    (entry,) = make_entries([(settings.env, settings.env_config, 1.0)])
    return entry


HOME = entry_of(SETTINGS)


@pytest.fixture(scope="module")
def builder(tokenizer):
    return PromptBuilder(tokenizer, ADAPTER.template("plain"), SETTINGS.max_prompt_tokens)


@pytest.fixture(scope="module")
def policy(tokenizer, builder):
    """Makes an untrained policy with settings that differ from ``SETTINGS``."""

    def make(**changes):
        return Policy(replace(SETTINGS, **changes), HOME, build_tiny_model(tokenizer, "nano"), tokenizer, builder)

    return make


@pytest.fixture(scope="module")
def demonstrations(policy):
    return collect(policy())


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_models_only(monkeypatch):
    """Let checks be played although the model knows nothing yet."""
    monkeypatch.setattr(module, "LEAST_RESPONSE_ACCURACY", 0.0)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A warm start with ``SETTINGS``, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        patch.setattr(module, "LEAST_RESPONSE_ACCURACY", 0.0)
        return warm_start(SETTINGS, progress=False)


@pytest.fixture
def demonstrated(first, own_cache):
    """Puts the demonstrations of ``first`` where those of other settings would be."""

    def demonstrate(settings):
        (made,) = (first.path.parents[1] / "demonstrations").iterdir()
        shutil.copytree(made, own_cache / "demonstrations" / module.cache_key(settings, HOME))

    return demonstrate


def said(example, tokenizer) -> str:
    return tokenizer.decode(example.response_ids, skip_special_tokens=True)


def test_the_demonstrator_does_not_know_where_the_object_is(tokenizer, policy):
    """A player with that knowledge would go straight to it; the explorer looks elsewhere first in many games."""
    undisturbed = policy(games=40, episodes_per_game=1, action_noise=0.0)
    (entry, tasks), opening = task_set(undisturbed.settings, HOME, DEMONSTRATED), {}
    with closing(entry.make()) as env:
        for task in tasks:
            env.reset(options={"task": task})
            opening[task] = env.unwrapped.walkthrough[0]
    first = {}
    for demonstration in collect(undisturbed):
        first.setdefault(demonstration.task_id, said(demonstration.ordinary, tokenizer))
    straight = sum(first[task] == opening[task] for task in opening)
    assert len(first) == 40
    assert straight < 30


def test_noise_is_carried_out_but_never_imitated(tokenizer, policy):
    noisy = collect(policy(action_noise=1.0, games=3))
    for demonstration in noisy:
        assert demonstration.ordinary.response_ids[-1] == tokenizer.eos_token_id
        assert f"\n{said(demonstration.ordinary, tokenizer)}" in tokenizer.decode(demonstration.ordinary.prompt_ids)
    # Now and then the noise is an action that the demonstrator might as well have planned.
    assert np.mean([demonstration.planned for demonstration in noisy]) < 0.4
    malformed = [each for each in noisy if "Nothing happens." in evidence(each, tokenizer)]
    assert malformed
    assert not any(demonstration.planned for demonstration in malformed)


def test_hindsight_views_show_what_was_carried_out_and_are_answered_with_the_plan(tokenizer, policy):
    settings = replace(SETTINGS, suboptimal_probability=0.4, hindsight_fraction=0.5)
    demonstrations = collect(policy(suboptimal_probability=0.4))
    examples = to_examples(demonstrations, settings)
    assert len(examples) == 2 * len(demonstrations)
    assert [id(each) for each in examples[: len(demonstrations)]] == [id(each.ordinary) for each in demonstrations]
    views = {id(each.hindsight): each for each in demonstrations}
    wasted = 0
    for example in examples[len(demonstrations) :]:
        of = views[id(example)]
        planned = said(example, tokenizer)
        if planned.startswith("go to "):
            arrives = f"You arrive at {planned.removeprefix('go to ')}." in evidence(of, tokenizer)
            assert arrives == of.planned
        wasted += not of.planned
    assert wasted == round(len(demonstrations) / 2)


def evidence(demonstration, tokenizer) -> str:
    """What the hindsight prompt shows beyond the ordinary one."""
    shown, prompt = demonstration.hindsight.prompt_ids, demonstration.ordinary.prompt_ids
    added = len(shown) - len(prompt)
    at = next(at for at in range(len(prompt) + 1) if np.array_equal(np.delete(shown, range(at, at + added)), prompt))
    return tokenizer.decode(shown[at : at + added])


@pytest.mark.parametrize("prompt_weight", [0.0, 0.3])
def test_padding_and_shared_prefixes_change_no_loss(prompt_weight, tokenizer):
    """The loss of a ragged batch is the token-weighted mean over its rows alone, computed one by one."""
    model = build_tiny_model(tokenizer, "nano")
    rows = [Example(_ids(4), _ids(2)), Example(_ids(9), _ids(3)), Example(_ids(6), _ids(5))]
    rows.append(Example(np.concatenate((rows[1].prompt_ids, rows[1].response_ids, _ids(2))), _ids(4)))
    together, _ = cloning_loss(model, collate(rows), prompt_weight)
    shared, _ = shared_prefix_loss(model, rows, prompt_weight)
    prompts, responses = [], []
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        nll = cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:].long(), reduction="none")
        prompts.append(nll[: len(row.prompt_ids) - 1])
        responses.append(nll[len(row.prompt_ids) - 1 :])
    expected = torch.cat(responses).mean() + prompt_weight * torch.cat(prompts).mean()
    torch.testing.assert_close(together.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shared.double(), expected, rtol=1e-5, atol=1e-5)


def test_batches_of_conversations_have_every_decision_once_an_epoch_and_next_to_its_prefixes():
    conversations = [np.cumsum(np.arange(9) + first).astype(np.int32) for first in range(5)]
    # Turn by turn, so that the decisions of a conversation are far from each other.
    examples = [Example(ids[:end], ids[end : end + 1]) for end in range(2, 8) for ids in conversations]
    drawn = islice(conversation_batches(examples, 6, Renamer({}, (), 0.0), np.random.default_rng(0)), 12)
    epoch, held = [], 0
    for batch in drawn:
        epoch += [(*each.prompt_ids, *each.response_ids) for each in batch]
        assert len({int(each.prompt_ids[0]) for each in batch}) <= 2
        held += len(batch)
        if held >= len(examples):
            break
    assert len(set(epoch)) == len(epoch) == len(examples)


@pytest.mark.parametrize(
    ("optimizer", "compute_dtype"), [("muon", "float32"), ("adamw", "float32"), ("adamw", "bfloat16")]
)
def test_cloning_a_handful_of_games_learns_them(optimizer, compute_dtype, demonstrations, policy, monkeypatch):
    pupil = policy(
        optimizer=optimizer,
        compute_dtype=compute_dtype,
        learning_rate=2e-2,
        matrix_learning_rate=0.05,
        max_steps=40,
        renaming_probability=0.0,
    )
    examples = to_examples(demonstrations, SETTINGS)[:24]
    _, before = cloning_loss(pupil.model, collate(examples), 0.0)
    monkeypatch.setattr(cloning, "WARMUP", 5)
    losses = [loss for loss, _ in islice(updates(pupil, examples), 40)]
    assert losses[-1] < 0.5 * losses[0]
    assert {parameter.dtype for parameter in pupil.model.parameters()} == {torch.float32}
    assert before == 0.0
    _, after = cloning_loss(pupil.model, collate(examples), 0.0)
    assert after > 0.2


def test_renaming_exchanges_names_alike_in_prompt_and_response_and_leaves_the_rest(tokenizer):
    def ids(text):
        return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)

    prompt, response = (
        ids("put some mug on shelf\ngo to shelf 1\ntake mug 1 from desk 1"),
        ids("take mug 1 from desk 1"),
    )
    table = Renamer(tokenizer, ADAPTER.warm_start.interchangeable, 1.0).table(np.random.default_rng(0))
    words, said = tokenizer.decode(table[prompt]).split(), tokenizer.decode(table[response])
    mug, shelf = words[2], words[4]
    assert (mug, shelf) != ("mug", "shelf")
    assert words[:2] == ["put", "some"]
    assert words[7] == shelf
    assert tokenizer.decode(table[prompt]).endswith(said)
    assert f"take {mug} 1 from " in said
    assert sorted(table.tolist()) == list(range(len(tokenizer)))


def test_games_stop_at_every_end_token_of_the_model_and_an_action_that_spells_one_is_no_end(tokenizer, policy):
    untrained = policy(seed=7)
    untrained.model.generation_config.eos_token_id = list(range(len(tokenizer)))
    with HeldOutGames(untrained, CHECKED) as games:
        played = games.play()
    assert {len(turn.response_ids) for trajectory in played for turn in trajectory.turns} == {1}
    for style in ("plain", "tagged"):
        ids = encode_response(tokenizer, f"open {tokenizer.eos_token} drawer", style)
        assert np.flatnonzero(ids == tokenizer.eos_token_id).tolist() == [len(ids) - 1]


@pytest.mark.parametrize("special", [False, True], ids=["ordinary", "special"])
def test_a_cloned_response_goes_on_behind_what_the_prompt_opened(special):
    tokenizer = published_tokenizer("qwen3_5_think", special)
    template = ADAPTER.template("tagged")
    build = PromptBuilder(tokenizer, template, 4096)
    prompt = build.build(task="look", observation="A room.", admissible_actions=["look"], history=[], step=1)
    ids = encode_response(tokenizer, "look", "tagged", build.responses.opened(prompt.ids, prompt.insert_at))
    assert tokenizer.decode(ids) == "\n</think>\n<action>look</action><|im_end|>"
    assert ids[1] == tokenizer.convert_tokens_to_ids("</think>")
    assert template.project(build.responses.text(prompt.ids, prompt.insert_at, ids)).valid


@pytest.mark.usefixtures("tiny_models_only")
def test_a_second_warm_start_comes_from_the_cache_and_another_setting_does_not(first, own_cache, tmp_path, monkeypatch):
    assert not first.cached
    assert first.episodes == SETTINGS.evaluation_games
    assert first.interval[0] <= first.success_rate <= first.interval[1]
    assert [point["step"] for point in first.curve] == [2, 4]
    assert json.loads((first.path / module.RECORD).read_text())["settings"]["games"] == SETTINGS.games

    shutil.copytree(first.path.parents[1], own_cache)
    second = warm_start(SETTINGS, out=tmp_path / "copy", progress=False)
    assert second.cached
    assert second.success_rate == first.success_rate
    assert json.loads((first.path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (first.path / name).read_bytes()
    for taken, found in (("copy", "copy is not empty"), ("copy/config.json", "config.json is a file")):
        with pytest.raises(UserInputError, match=found):
            warm_start(SETTINGS, out=tmp_path / taken, progress=False)

    def interrupted(source, target):
        target.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copytree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warm_start(SETTINGS, out=tmp_path / "cut", progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "cache"}

    onward = warm_start(replace(SETTINGS, model_path=str(first.path), max_steps=2), progress=False)
    assert not onward.cached
    assert onward.path != first.path
    assert len(list((own_cache / "warmstart").iterdir())) == 2


@pytest.mark.usefixtures("tiny_models_only")
def test_demonstrations_of_an_interrupted_warm_start_are_kept_once_there_are_all(first, own_cache, monkeypatch):
    played, cloned = [], []

    def collect_until(last):
        def interrupted(*args):
            def on_game():
                played.append(1)
                if len(played) == last:
                    raise KeyboardInterrupt

            return collect(args[0], on_game)

        return interrupted

    def interrupted_updates(*args):
        for update in updates(*args):
            cloned.append(1)
            if len(cloned) == 2:
                raise KeyboardInterrupt
            yield update

    monkeypatch.setattr(module, "collect", collect_until(SETTINGS.games))
    with pytest.raises(KeyboardInterrupt):
        warm_start(SETTINGS, progress=False)
    assert [path for path in own_cache.rglob("*") if path.is_file()] == []

    monkeypatch.setattr(module, "collect", collect_until(None))
    monkeypatch.setattr(module, "updates", interrupted_updates)
    with pytest.raises(KeyboardInterrupt):
        warm_start(SETTINGS, progress=False)
    assert list((own_cache / "warmstart").iterdir()) == []
    assert len(list((own_cache / "demonstrations").iterdir())) == 1

    continued = warm_start(SETTINGS, progress=False)
    assert not continued.cached
    assert len(played) == 2 * SETTINGS.games  # none in the last warm start
    assert (continued.path / "model.safetensors").read_bytes() == (first.path / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("tiny_models_only")
def test_failed_evaluation_costs_no_cloning(demonstrated, monkeypatch, caplog):
    demonstrated(SETTINGS)

    def fail(*arguments):
        raise EnvironmentFaultError("the power is gone")

    with monkeypatch.context() as patched:
        patched.setattr("trial_ray.warmstart.agreement.compare_with_expert", fail)
        with pytest.raises(EnvironmentFaultError, match="the power is gone"):
            warm_start(SETTINGS, progress=False)
    assert "The cloned model is complete in " in caplog.text
    monkeypatch.setattr(module, "_clone", fail)
    found = warm_start(SETTINGS, progress=False)
    assert (found.cached, found.steps, found.episodes) == (True, 4, SETTINGS.evaluation_games)
    record = json.loads((found.path / module.RECORD).read_text())
    assert record["agreement"]["games"] == SETTINGS.evaluation_games
    monkeypatch.setattr("trial_ray.warmstart.agreement.compare_with_expert", fail)
    assert warm_start(SETTINGS, progress=False).seconds == found.seconds


def failing_games(monkeypatch, failing: Callable[[int], bool]) -> None:
    """Have games fail at their first step, by the number of the game in the order of play."""
    plain, resets = GuardedEnv.reset, []

    def reset(self, task_id, seed):
        resets.append(task_id)
        if failing(len(resets)):
            self._call("reset", lambda: 1 / 0)
        return plain(self, task_id, seed)

    monkeypatch.setattr(GuardedEnv, "reset", reset)


def test_games_that_fail_are_not_counted_and_their_environments_are_replaced(policy, monkeypatch, caplog):
    untrained = policy(seed=7)
    failing_games(monkeypatch, lambda number: number in (1, 2))
    with HeldOutGames(untrained, CHECKED) as games:
        assert len(games.play()) == 1
        assert "2 of 3 held-out games failed; the first: EnvironmentFaultError: trial/ALFWorld-v0" in caplog.text
        assert len(games.play()) == 3
    monkeypatch.undo()
    failing_games(monkeypatch, lambda number: True)
    with (
        HeldOutGames(untrained, CHECKED) as games,
        pytest.raises(InfrastructureError, match="3 of 3 held-out games failed"),
    ):
        games.play()


@pytest.mark.parametrize(
    ("right", "target", "checks"), [(1.0, 0.35, [2, 4, 5]), (0.0, 0.35, [5]), (1.0, 0.0, [2])], ids=str
)
def test_checks_go_by_the_updates_so_far_until_the_target_and_the_last_update_is_always_checked(
    right, target, checks, demonstrated, monkeypatch, caplog
):
    monkeypatch.setattr(module, "updates", lambda *_: repeat((1.0, right)))
    settings = replace(SETTINGS, max_steps=5, check_every=2, target_success=target)
    demonstrated(settings)
    result = warm_start(settings, progress=False)
    assert ([point["step"] for point in result.curve], result.steps) == (checks, checks[-1])
    ended = "ended after 5 updates with 0 % of the last check's games won, below the target of 35 %"
    assert (ended in caplog.text) == (target > 0)


@pytest.mark.parametrize("of_weights", [False, True])
def test_a_model_that_diverges_is_not_kept(of_weights, demonstrated, own_cache, monkeypatch):
    demonstrated(SETTINGS)

    def diverging(policy, examples):
        if of_weights:
            next(policy.model.parameters()).data.fill_(torch.nan)
        return repeat((1.0 if of_weights else torch.nan, 0.0))

    monkeypatch.setattr(module, "updates", diverging)
    with pytest.raises(TrainingDivergedError, match="Lower learning_rate"):
        warm_start(SETTINGS, progress=False)
    assert list((own_cache / "warmstart").iterdir()) == []


def test_of_two_builders_the_first_wins(own_cache):
    def build(work):
        (work / "model").write_text("second")
        (own_cache / "warmstart" / "key").mkdir()
        (own_cache / "warmstart" / "key" / "model").write_text("first")

    path, cached = get_or_build("warmstart", "key", build)
    assert (path / "model").read_text() == "first"
    assert not cached
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


def test_demonstrations_with_tools_are_calls_that_make_the_actions(policy, monkeypatch):
    """Later prompts hold the calls of what was carried out, of which noise makes half; prefixes are computed once."""
    tokenizer, settings = published_tokenizer("qwen3"), {"action_noise": 0.5, "max_prompt_tokens": 100_000}
    writer = ToolConversationBuilder(tokenizer, ADAPTER.template("tools"), ADAPTER.tools, 100_000)
    demonstrator = replace(policy(**settings), tokenizer=tokenizer, builder=writer)
    found = collect(replace(demonstrator, settings=replace(demonstrator.settings, games=2)))
    said, disturbed = [], 0
    for each, following in zip(found, [*found[1:], None], strict=True):
        opened = each.ordinary.prompt_ids
        prompt = Prompt(opened, int(np.flatnonzero(opened == tokenizer.eos_token_id)[-1]), "none")
        said.append(writer.read(prompt, each.ordinary.response_ids))
        assert each.ordinary.response_ids[-1] == tokenizer.eos_token_id
        if following is not None and len(following.ordinary.prompt_ids) > len(opened):
            assert following.ordinary.prompt_ids[: len(opened)].tolist() == opened.tolist()
            carried_out = following.ordinary.prompt_ids[len(opened) :][: len(each.ordinary.response_ids)]
            disturbed += carried_out.tolist() != each.ordinary.response_ids.tolist()
    assert all(each.valid for each in said)
    assert {each.action.split()[0] for each in said} >= {"go", "take"}
    assert 0 < disturbed < len(found)
    monkeypatch.delattr(cloning, "cloning_loss")
    monkeypatch.setattr(cloning, "WARMUP", 1)
    settings = replace(demonstrator.settings, prompt_weight=0.0)
    pupil = replace(demonstrator, model=build_tiny_model(tokenizer, "nano"), settings=settings)
    losses = [loss for loss, _ in islice(updates(pupil, [each.ordinary for each in found[:6]]), 6)]
    assert losses[-1] < 0.9 * losses[0]
    with pytest.raises(ConfigError, match=r"'help' cannot be expressed as a call of clean, close"):
        writer.encode_action(prompt, "help")
    with pytest.raises(ConfigError, match=r"response_style is 'tools'.*set model_path"):
        load_policy(replace(SETTINGS, response_style="tools"), HOME)


def test_every_setting_and_the_adapter_are_part_of_the_key():
    settings = {"seed": 1, "hindsight_fraction": 0.5, "env_config": {"data": Path("games")}, "optimizer": "adamw"}
    experts = [partial(GameAgent, opening) for opening in ("[", "<")]
    specs = [replace(ADAPTER.warm_start, vocabulary=("mug",)), replace(ADAPTER.warm_start, interchangeable=())]
    specs += [replace(ADAPTER.warm_start, demonstrator=expert) for expert in experts]
    adapters = [{"max_turns": 3}, {"templates": {}}, *({"warm_start": spec} for spec in specs)]
    keys = [module.cache_key(replace(SETTINGS, **{name: value}), HOME) for name, value in settings.items()]
    for changes in adapters:
        keys.append(module.cache_key(SETTINGS, replace(HOME, adapter=replace(ADAPTER, **changes))))

    def registered(hint):
        def told() -> str:
            return hint

        return module.cache_key(SETTINGS, replace(HOME, spec=replace(HOME.spec, kwargs={"told": told, "hint": hint})))

    # A function counts by name and file, not by its address, which differs in each process.
    assert registered("a") == registered("a") != registered("b")
    assert len({*keys, module.cache_key(SETTINGS, HOME)}) == len(keys) + 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("games", 0),
        ("hindsight_fraction", 1.0),
        ("optimizer", "sgd"),
        ("response_style", "conversation"),
        ("env_config", {"generator_seed": 3}),
    ],
)
def test_settings_out_of_range_are_named(setting, value):
    with pytest.raises(ConfigError, match=setting):
        WarmStartSettings(**{setting: value})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_path": "tests"}, CheckpointError, r"config\.json"),
        ({"device": "cuda"}, ConfigError, "finds no CUDA device"),
        ({"env": "trial/Elsewhere-v0"}, ConfigError, "No environment is registered as 'trial/Elsewhere-v0'"),
    ],
)
@pytest.mark.usefixtures("own_cache")
def test_what_is_not_there_is_refused(changes, error, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(error, match=words):
        warm_start(replace(SETTINGS, **changes), progress=False)


@pytest.mark.gpu
@pytest.mark.usefixtures("own_cache")
def test_a_gpu_clones_and_evaluates_as_a_cpu_does():
    found = {}
    for device in ("cpu", "cuda"):
        settings = replace(SETTINGS, device=device, evaluation_games=2)
        record = json.loads((warm_start(settings, progress=False).path / "warmstart.json").read_text())
        found[device] = record["steps"], record["examples"], record["agreement"]["games"]
    assert found["cuda"] == found["cpu"]


def _ids(length: int) -> np.ndarray:
    return np.arange(300, 300 + length, dtype=np.int32)
