"""Warm start on generated games: demonstrations, cloning, evaluation and the cache."""

import shutil
import threading
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise, repeat
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from chat_tokenizers import published_tokenizer
from cli_fakes import read
from prompt_games import ids_of, shown, writer_of
from torch.nn.functional import cross_entropy
from warm_starts import HOME, SETTINGS

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.adapters.external import GameAgent
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.errors import (
    CheckpointError,
    ConfigError,
    EnvironmentFaultError,
    InfrastructureError,
    TrainingDivergedError,
    UserInputError,
)
from trial_ray.evaluation.local_games import LocalGames
from trial_ray.files import CACHE_VARIABLE, PACKAGE, get_or_build
from trial_ray.models.tiny import build_tiny_model
from trial_ray.prompts.writer import Prompt
from trial_ray.warmstart import WarmStartSettings, warm_start
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
from trial_ray.warmstart.demonstrations import collect, response_text, to_examples
from trial_ray.warmstart.policy import held_out_games, load_policy
from trial_ray.warmstart.settings import CHECKED

quiet_warm_start = partial(warm_start, progress=False)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Result of a warm start with ``SETTINGS``, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        patch.setattr("trial_ray.warmstart.warmstart.MIN_RESPONSE_ACCURACY", 0.0)
        return quiet_warm_start(SETTINGS)


@pytest.fixture
def demonstrated(first, own_cache):
    """Function that copies the demonstrations of ``first`` into the cache, for other settings."""

    def demonstrate(settings):
        (made,) = (first.path.parents[1] / "demonstrations").iterdir()
        shutil.copytree(made, own_cache / "demonstrations" / module.cache_key(settings, HOME))

    return demonstrate


def text_of(example, tokenizer):
    return tokenizer.decode(example.response_ids, skip_special_tokens=True)


def shows(demonstration, text, tokenizer):
    """Whether the teacher context has the text: the part of the hindsight prompt that the ordinary prompt lacks."""
    hindsight, ordinary = demonstration.hindsight.prompt_ids, demonstration.ordinary.prompt_ids
    return tokenizer.decode(hindsight).count(text) > tokenizer.decode(ordinary).count(text)


# -- demonstrations ----------------------------------------------------------------------------------------------------


def test_noise_is_executed_but_never_imitated(tokenizer, policy):
    noisy = collect(policy(action_noise=1.0, games=3))
    for example in (demonstration.ordinary for demonstration in noisy):
        assert example.response_ids[-1] == tokenizer.eos_token_id
        assert f"\n{text_of(example, tokenizer)}" in tokenizer.decode(example.prompt_ids)
    # The noise may be an action that the demonstrator could have planned as well.
    assert np.mean([each.planned for each in noisy]) < 0.4
    # Malformed actions are never planned.
    assert {each.planned for each in noisy if shows(each, "Nothing happens.", tokenizer)} == {False}


def test_hindsight_examples_show_the_outcome_and_answer_with_the_plan(tokenizer, policy):
    demonstrations = collect(policy(suboptimal_probability=0.4))
    examples = to_examples(demonstrations, replace(SETTINGS, hindsight_fraction=0.5))
    count = len(demonstrations)
    assert examples[:count] == [each.ordinary for each in demonstrations]
    by_example = {id(each.hindsight): each for each in demonstrations}
    hindsight = [by_example[id(example)] for example in examples[count:]]
    assert len(hindsight) == count
    for each in hindsight:
        verb, _, place = text_of(each.hindsight, tokenizer).partition(" to ")
        if verb == "go":
            assert shows(each, f"You arrive at {place}.", tokenizer) == each.planned
    assert sum(not each.planned for each in hindsight) == round(count / 2)


def test_tool_demonstrations_are_calls_of_the_actions(policy, monkeypatch):
    """Later prompts contain the calls of executed actions, half of which are noise; shared prefixes are computed once."""
    tokenizer = published_tokenizer("qwen3")
    writer = writer_of(tokenizer, "tools", tools=ADAPTER.tools)
    pupil = replace(
        policy(action_noise=0.5, max_prompt_tokens=100_000, games=1, episodes_per_game=2, prompt_weight=0.0),
        tokenizer=tokenizer,
        builder=writer,
        model=build_tiny_model(tokenizer, "nano"),
    )
    examples = [demonstration.ordinary for demonstration in collect(pupil)]
    verbs, disturbed = set(), 0
    for example, following in pairwise([*examples, examples[0]]):
        ids, response = example.prompt_ids, example.response_ids
        prompt = Prompt(ids, int(np.flatnonzero(ids == tokenizer.eos_token_id)[-1]), "none")
        read = writer.read(prompt, response)
        assert read.valid
        assert response[-1] == tokenizer.eos_token_id
        verbs.add(read.action.split()[0])
        if len(following.prompt_ids) > len(ids):
            before, after = np.split(following.prompt_ids, [len(ids)])
            assert before.tolist() == ids.tolist()
            disturbed += after[: len(response)].tolist() != response.tolist()
    assert verbs >= {"go", "take"}
    assert 0 < disturbed < len(examples)
    monkeypatch.delattr("trial_ray.warmstart.cloning.cloning_loss")
    monkeypatch.setattr("trial_ray.warmstart.cloning.WARMUP", 1)
    short = [Example(each.prompt_ids[:50], each.response_ids) for each in examples[:6]]
    losses = [loss for loss, _ in islice(updates(pupil, short), 6)]
    assert losses[-1] < 0.9 * losses[0]
    with pytest.raises(ConfigError):
        writer.encode_action(prompt, "help")
    with pytest.raises(ConfigError, match="tool_format"):
        load_policy(replace(SETTINGS, response_style="tools"), HOME)


def test_a_tiny_model_calls_tools_in_words_of_the_hermes_format():
    """Its tokenizer has words of tools and calls, which bytes would make several times as long."""
    settings = replace(SETTINGS, response_style="tools", tool_format="hermes", max_prompt_tokens=4000, games=1)
    pupil = load_policy(settings, HOME)
    responses = [demonstration.ordinary.response_ids for demonstration in collect(pupil)]
    assert all(pupil.tokenizer.decode(response).startswith("<tool_call>") for response in responses)
    assert max(map(len, responses)) < 50


@pytest.mark.parametrize("special", [False, True])
def test_response_continues_the_text_that_the_prompt_opened(special):
    tokenizer = published_tokenizer("qwen3_5_think", special)
    writer = writer_of(tokenizer)
    prompt = writer.write(shown("A room."), [])
    ids = writer.encode(prompt, response_text("look", "tagged"))
    assert tokenizer.decode(ids) == "\n</think>\n<action>look</action><|im_end|>"
    assert ids[1] == tokenizer.convert_tokens_to_ids("</think>")
    assert writer.read(prompt, ids).valid


# -- cloning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_weight", [0.0, 0.3])
def test_padding_and_shared_prefixes_do_not_change_the_loss(prompt_weight, tokenizer):
    """The loss of a ragged batch is the token-weighted mean over its rows, each of which is computed alone."""
    model = build_tiny_model(tokenizer, "nano")
    ids = np.arange(300, 320)
    rows = [Example(ids[:prompt], ids[:response]) for prompt, response in ((4, 2), (9, 3), (6, 5))]
    rows.append(Example(np.concatenate((ids[:9], ids[:3], ids[:2])), ids[:4]))
    parts = []
    for row in rows:
        tokens = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        nll = cross_entropy(model(tokens).logits[0, :-1].double(), tokens[0, 1:].long(), reduction="none")
        parts.append(nll.split([len(row.prompt_ids) - 1, len(row.response_ids)]))
    prompt, response = (torch.cat(part).mean() for part in zip(*parts, strict=True))
    for loss, _ in (cloning_loss(model, collate(rows), prompt_weight), shared_prefix_loss(model, rows, prompt_weight)):
        torch.testing.assert_close(loss.double(), response + prompt_weight * prompt, rtol=1e-5, atol=1e-5)


def test_conversation_batches_have_every_decision_once_an_epoch():
    conversations = [np.cumsum(np.arange(9) + first) for first in range(5)]
    # Turn by turn, so that the decisions of a conversation are far from each other.
    examples = [Example(ids[:end], ids[end : end + 1]) for end in range(2, 8) for ids in conversations]
    epoch = []
    drawn = conversation_batches(examples, 6, Renamer({}, (), 0.0), np.random.default_rng(0))
    while len(epoch) < len(examples):
        batch = next(drawn)
        epoch += [(*example.prompt_ids, *example.response_ids) for example in batch]
        assert len({int(example.prompt_ids[0]) for example in batch}) <= 2
    assert len(set(epoch)) == len(epoch) == len(examples)


@pytest.mark.parametrize(("optimizer", "compute_dtype"), [("muon", "float32"), ("adamw", "bfloat16")])
def test_cloning_learns_a_handful_of_games(optimizer, compute_dtype, policy, monkeypatch):
    pupil = policy(
        optimizer=optimizer,
        compute_dtype=compute_dtype,
        max_steps=40,
        learning_rate=2e-2,
        matrix_learning_rate=0.05,
        renaming_probability=0.0,
    )
    examples = to_examples(collect(policy(games=2)), SETTINGS)[:24]
    monkeypatch.setattr("trial_ray.warmstart.cloning.WARMUP", 5)
    assert cloning_loss(pupil.model, collate(examples), 0.0)[1] == 0.0
    losses = [loss for loss, _ in islice(updates(pupil, examples), 40)]
    assert losses[-1] < 0.5 * losses[0]
    assert {parameter.dtype for parameter in pupil.model.parameters()} == {torch.float32}
    assert cloning_loss(pupil.model, collate(examples), 0.0)[1] > 0.2


def test_renaming_exchanges_names_alike_in_prompt_and_response(tokenizer):
    table = Renamer(tokenizer, ADAPTER.warm_start.interchangeable, 1.0).table(np.random.default_rng(0))
    renamed = tokenizer.decode(table[ids_of(tokenizer, "put some mug on shelf\ngo to shelf 1\ntake mug 1 from desk 1")])
    put, some, mug, _, shelf, _, _, again, *_ = renamed.split()
    assert (put, some, again) == ("put", "some", shelf)
    assert (mug, shelf) != ("mug", "shelf")
    response = tokenizer.decode(table[ids_of(tokenizer, "take mug 1 from desk 1")])
    assert response.startswith(f"take {mug} 1 from ")
    assert renamed.endswith(response)
    assert sorted(table) == [*range(len(tokenizer))]


# -- held-out games ----------------------------------------------------------------------------------------------------


def test_end_tokens_end_responses_but_not_in_actions(tokenizer, policy):
    untrained = policy(seed=7)
    untrained.model.generation_config.eos_token_id = [*range(len(tokenizer))]
    with held_out_games(untrained, CHECKED) as games:
        assert {len(turn.response_ids) for trajectory in games.play() for turn in trajectory.turns} == {1}
    for style in ("plain", "tagged"):
        writer = writer_of(tokenizer, style)
        prompt = writer.write(shown("A room."), [])
        ids = writer.encode(prompt, response_text(f"open {tokenizer.eos_token} drawer", style))
        assert np.flatnonzero(ids == tokenizer.eos_token_id).tolist() == [len(ids) - 1]


def test_failed_games_are_not_counted_and_their_environments_replaced(policy, monkeypatch, caplog):
    plain, failing, resets = GuardedEnv.reset, {1, 2}, []

    def reset(self, task_id, seed):
        resets.append(task_id)
        if len(resets) in failing:
            self._call("reset", lambda: 1 / 0)
        return plain(self, task_id, seed)

    monkeypatch.setattr(GuardedEnv, "reset", reset)
    with held_out_games(policy(seed=7), CHECKED) as games:
        assert len(games.play()) == 1
        assert "2 of 3 held-out games failed" in caplog.text
        assert len(games.play()) == 3
        failing.update(range(99))
        with pytest.raises(InfrastructureError):
            games.play()


@pytest.mark.parametrize(("right", "target", "checks"), [(1.0, 0.35, [2, 4, 5]), (0.0, 0.35, [5]), (1.0, 0.0, [2])])
def test_checks_follow_the_updates_until_the_target(right, target, checks, demonstrated, monkeypatch, caplog):
    monkeypatch.setattr("trial_ray.warmstart.warmstart.MIN_RESPONSE_ACCURACY", 0.3)
    monkeypatch.setattr("trial_ray.warmstart.warmstart.updates", lambda *_: repeat((1.0, right)))
    settings = replace(SETTINGS, max_steps=5, check_every=2, target_success=target)
    demonstrated(settings)
    result = quiet_warm_start(settings)
    assert [point["step"] for point in result.curve] == checks
    assert result.steps == checks[-1]
    assert ("below the target of 35 %" in caplog.text) == (target > 0)


@pytest.mark.parametrize(
    ("won", "checks"),
    [
        ({50: 0.3, 59: 0.34, 64: 0.36}, [50, 59, 64]),
        ({50: 0.2, 100: 0.4}, [50, 100]),
        ({50: 0.1, 100: 0.05, 150: 0.97}, [50, 100, 150]),
    ],
)
def test_fast_learning_is_checked_early(won, checks, monkeypatch):
    """A warm start that would stop far above the target is checked before the next regular check; others are not."""
    steps = []

    def update(*_):
        for step in range(1, 801):
            steps.append(step)
            yield 1.0, 1.0

    monkeypatch.setattr("trial_ray.warmstart.warmstart.updates", update)
    monkeypatch.setattr(LocalGames, "play", lambda self: steps[-1])
    monkeypatch.setattr(
        "trial_ray.warmstart.warmstart.success_figures", lambda step: {"success_rate": won[step], "invalid_share": 0.0}
    )
    settings = replace(SETTINGS, max_steps=800, check_every=50)
    found, curve = module._clone(load_policy(settings, HOME), [], Mock())
    assert [point["step"] for point in curve] == checks
    assert found == checks[-1]


def test_checks_leave_the_random_numbers_of_training(policy):
    def state():
        return [*torch.get_rng_state().tolist(), *np.random.get_state()[1]]

    with held_out_games(policy(), CHECKED) as games:
        before = state()
        games.play()
    assert state() == before


def test_a_success_far_above_the_target_is_reported():
    result = module.WarmStartResult(Path(), 0.97, 64, (0.9, 1.0), 0.0, 100, [], False, 1.0, 0.35)
    assert result.overshot
    assert "far above the target of 35%" in str(result)
    assert not replace(result, success_rate=0.6).overshot


@pytest.mark.parametrize("weights_diverge", [False, True])
def test_diverged_model_is_not_kept(weights_diverge, demonstrated, own_cache, monkeypatch):
    demonstrated(SETTINGS)

    def diverging(policy, examples):
        if weights_diverge:
            next(policy.model.parameters()).data.fill_(torch.nan)
        return repeat((1.0 if weights_diverge else torch.nan, 0.0))

    monkeypatch.setattr("trial_ray.warmstart.warmstart.updates", diverging)
    with pytest.raises(TrainingDivergedError):
        quiet_warm_start(SETTINGS)
    assert list((own_cache / "warmstart").iterdir()) == []


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_same_settings_return_the_cached_model(first, own_cache, tmp_path, monkeypatch):
    assert first.interval[0] <= first.success_rate <= first.interval[1]
    assert [point["step"] for point in first.curve] == [2, 4]
    assert read(first.path / module.RECORD)["settings"]["games"] == SETTINGS.games
    assert read(first.path / "config.json")["architectures"] == ["Qwen3ForCausalLM"]
    shutil.copytree(first.path.parents[1], own_cache)
    second = quiet_warm_start(SETTINGS, out=tmp_path / "copy")
    assert second.cached
    assert second.success_rate == first.success_rate
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json"):
        assert (second.path / name).read_bytes() == (first.path / name).read_bytes()
    for taken in (second.path, second.path / "config.json"):
        with pytest.raises(UserInputError):
            quiet_warm_start(SETTINGS, out=taken)

    def interrupted(source, target):
        target.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copytree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quiet_warm_start(SETTINGS, out=tmp_path / "cut")
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "cache"}
    assert not quiet_warm_start(replace(SETTINGS, model_path=str(first.path), max_steps=2)).cached


def test_what_an_interrupted_warm_start_has_completed_is_kept(first, own_cache, monkeypatch):
    played, cloned, fail = [], [], Mock(side_effect=EnvironmentFaultError)

    def interrupting(events, number):
        events.append(1)
        if len(events) == number:
            raise KeyboardInterrupt

    def interrupted_updates(*args):
        for update in updates(*args):
            interrupting(cloned, 2)
            yield update

    def require_stop(error):
        with pytest.raises(error):
            quiet_warm_start(SETTINGS)

    monkeypatch.setattr(
        "trial_ray.warmstart.warmstart.collect",
        lambda policy, on_game: collect(policy, lambda number: interrupting(played, SETTINGS.games)),
    )
    require_stop(KeyboardInterrupt)
    assert [path for path in own_cache.rglob("*") if path.is_file()] == []
    monkeypatch.setattr("trial_ray.warmstart.warmstart.updates", interrupted_updates)
    require_stop(KeyboardInterrupt)
    assert [len(list((own_cache / kind).iterdir())) for kind in ("warmstart", "demonstrations")] == [0, 1]
    with monkeypatch.context() as patched:
        patched.setattr("trial_ray.warmstart.agreement.compare_with_expert", fail)
        require_stop(EnvironmentFaultError)
        assert len(played) == 2 * SETTINGS.games
    monkeypatch.setattr("trial_ray.warmstart.warmstart._clone", fail)
    result = quiet_warm_start(SETTINGS)
    assert result.cached
    assert result.steps == 4
    assert result.episodes == SETTINGS.evaluation_games
    assert read(result.path / module.RECORD)["agreement"]["games"] == SETTINGS.evaluation_games
    assert (result.path / "model.safetensors").read_bytes() == (first.path / "model.safetensors").read_bytes()
    monkeypatch.setattr("trial_ray.warmstart.agreement.compare_with_expert", fail)
    assert quiet_warm_start(SETTINGS).seconds == result.seconds


def test_first_of_two_builders_wins(own_cache):
    built = own_cache / "warmstart/key"

    def build(work):
        (work / "model").write_text("second")
        built.mkdir()
        (built / "model").write_text("first")

    assert get_or_build("warmstart", "key", build) == (built, False)
    assert (built / "model").read_text() == "first"
    assert [*built.parent.iterdir()] == [built]


def test_second_builder_waits_for_the_first(own_cache, monkeypatch):
    found, told = [], threading.Event()
    monkeypatch.setattr("trial_ray.files.logger.warning", lambda *_: told.set())
    second = threading.Thread(target=lambda: found.append(get_or_build("warmstart", "key", lambda _: told.set())))

    def build(work):
        second.start()
        assert told.wait(60)

    path, _ = get_or_build("warmstart", "key", build)
    second.join(60)
    assert found == [(path, True)]
    assert [*path.parent.iterdir()] == [path]


def test_cache_key_covers_settings_adapter_and_code():
    def key(settings=SETTINGS, spec=HOME.spec, **changes):
        return module.cache_key(settings, replace(HOME, spec=spec, adapter=replace(ADAPTER, **changes)))

    def registered(hint):
        def hinted() -> str:
            return hint

        return key(spec=replace(HOME.spec, kwargs={"hinted": hinted, "hint": hint}))

    settings = {"seed": 1, "hindsight_fraction": 0.5, "env_config": {"data": Path("games")}, "optimizer": "adamw"}
    specs = [{"vocabulary": ("mug",)}, {"interchangeable": ()}]
    specs += [{"demonstrator": partial(GameAgent, opening)} for opening in ("[", "<")]
    keys = [key(), key(max_turns=3), key(templates={}), registered("a"), registered("b")]
    keys += [key(replace(SETTINGS, **{name: value})) for name, value in settings.items()]
    keys += [key(warm_start=replace(ADAPTER.warm_start, **spec)) for spec in specs]
    assert len({*keys}) == len(keys)
    # A function counts by name and file, not by its address, which differs in each process.
    assert registered("a") in keys
    assert [pattern for pattern in module.CODE if not any(PACKAGE.glob(pattern))] == []


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_settings_out_of_range_are_refused():
    wrong = {"games": 0, "hindsight_fraction": 1.0, "optimizer": "sgd", "response_style": "conversation"}
    for setting, value in (wrong | {"env_config": {"generator_seed": 3}}).items():
        with pytest.raises(ConfigError, match=setting):
            WarmStartSettings(**{setting: value})


@pytest.mark.parametrize(
    ("changes", "error"), [({"model_path": "tests"}, CheckpointError), ({"device": "cuda"}, ConfigError)]
)
def test_missing_models_and_devices_are_refused(changes, error, own_cache, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(error):
        quiet_warm_start(replace(SETTINGS, **changes))


@pytest.mark.gpu
def test_gpu_clones_and_evaluates_as_the_cpu_does(own_cache):
    results = []
    for device in ("cpu", "cuda"):
        settings = replace(SETTINGS, device=device, evaluation_games=2)
        record = read(quiet_warm_start(settings).path / module.RECORD)
        results.append((record["steps"], record["examples"], record["agreement"]["games"]))
    assert results[0] == results[1]
