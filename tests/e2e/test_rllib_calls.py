"""Every call that RLlib's classes offer does what docs/rllib.md says of it; the calls in its lists are the test's parameters."""

import ast
import inspect
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ray.rllib.algorithms import Algorithm, AlgorithmConfig
from ray.rllib.core.learner import Learner, LearnerGroup
from ray.rllib.core.rl_module import RLModule
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.actor_manager import FaultAwareApply
from snippets import DOCS
from tiny_run import ChanceEnv, config_of, with_two_runners
from user_env import registered

from trial_ray import GRPO
from trial_ray.errors import CallbackError, CheckpointError, ConfigError, UnsupportedError

pytestmark = pytest.mark.e2e

PAGE = (DOCS / "rllib.md").read_text(encoding="utf-8")
ROWS = [
    (owner, name, answer.lower(), note)
    for owner, section in re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    for answer, items in re.findall(r"^(Works|Meaningless|Raises):\n\n(.*?)\n\n", section, re.MULTILINE | re.DOTALL)
    for names, note in re.findall(r"^- (`[^:]+`): (.*)$", items, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
]
MODULE = "default_policy"


@pytest.fixture(scope="module")
def run(algorithm_of, model_path, tmp_path_factory):
    """An algorithm that has trained an iteration, with two env runners."""
    config = with_two_runners(config_of(model_path))
    with registered(ChanceEnv):
        algo = algorithm_of(config)
        algo.train()
        runner = config.env_runner_cls(config=config, env_creator=None, worker_index=0)
        yield SimpleNamespace(
            algo=algo,
            config=config,
            folder=tmp_path_factory.mktemp("saved"),
            group=algo.learner_group,
            learner=algo.learner_group._learner,
            runner=runner,
            runners=algo.env_runner_group,
        )
        runner.stop()


def offered(cls):
    """Yield public methods and properties that are neither deprecated nor of RLlib's old API stack."""
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and not name.isupper() and inspect.isfunction(function):
            decorators = inspect.getsource(function).partition("def ")[0]
            origin = decorators + function.__code__.co_filename.rpartition("/")[2]
            if "deprecat" not in origin.lower() and "OldAPIStack" not in origin:
                yield name


@pytest.mark.parametrize("cls", [Algorithm, AlgorithmConfig, Learner, LearnerGroup, EnvRunner, EnvRunnerGroup])
def test_the_page_has_a_row_for_every_call(cls):
    told = [name for owner, name, *_ in ROWS if owner == cls.__name__]
    bases = {*cls.__mro__} - {FaultAwareApply}
    assert {name for base in bases for name in offered(base)} <= {*told}
    assert len({*told}) == len(told)


def weights_of(run):
    return run.group.get_weights()[MODULE]


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def module_is_the_learners(run, algo):
    module, learners = algo.get_module().lm, run.learner.policy_module.lm
    assert algo.get_module("another") is None
    assert {each.device.type for each in module.parameters()} == {"cpu"}
    return module is not learners and same(module.state_dict(), learners.state_dict())


def zeros(weights):
    return {MODULE: {name: 0 * value for name, value in weights.items()}}


def set_zeros(run, part):
    before = weights_of(run)
    part.set_weights(zeros(before))
    assert not any(value.any() for value in weights_of(run).values())
    part.set_weights({MODULE: before})
    return same(weights_of(run), before)


def restored(run, owner, restore):
    """The weights are back after others, in the engines too, for which a learner has no way of its own; an algorithm trains on."""
    before, sent = weights_of(run), run.algo.weights_checksum
    run.group.set_weights(zeros(before))
    assert run.algo.weights_checksum != sent
    restore()
    assert same(weights_of(run), before)
    if owner is run.learner:
        run.group.set_weights(run.group.get_weights())
    assert run.algo.weights_checksum == sent
    if owner is run.algo:
        run.algo.train()
    return True


def state_round_trip(run, owner):
    state = owner.get_state()
    return restored(run, owner, lambda: owner.set_state(state))


def saved(run, owner):
    folder = owner.save_to_path(f"{run.folder}/{type(owner).__name__}")
    return restored(run, owner, lambda: owner.restore_from_path(folder))


def steps_by_hand(run, learner):
    """A gradient of RLlib's own calls changes the weights."""
    before = weights_of(run)
    loss = sum(parameter.square().sum() for parameter in learner.get_parameters(learner.module[MODULE]))
    learner.apply_gradients(learner.postprocess_gradients(learner.compute_gradients({MODULE: loss})))
    changed = not same(weights_of(run), before)
    run.group.set_weights({MODULE: before})
    return changed


def everywhere(run, call):
    return run.runners.foreach_env_runner(call, local_env_runner=False)


def answers_later(run, runners):
    sent, found = runners.foreach_env_runner_async("ping", tag="ping"), []
    while len(found) < sent:
        found += runners.fetch_ready_async_reqs(tags="ping", timeout_seconds=60)
    return sorted(found) == [(1, "pong"), (2, "pong")]


CALLS = {
    "Algorithm": {
        "step": lambda run, part: part.step()["env_runners"]["num_episodes"] == 6,
        "get_default_policy_class": lambda run, part: GRPO.get_default_policy_class(run.config),
        "restore_env_runners": lambda run, part: part.restore_env_runners(run.runners) == [],
        "get_module": module_is_the_learners,
        "get_weights": lambda run, part: same(part.get_weights()[MODULE], weights_of(run)),
        "set_weights": set_zeros,
        "set_state": state_round_trip,
        "restore_from_path": saved,
        "save": lambda run, part: part.save(f"{run.folder}/trainable").checkpoint,
        "restore": lambda run, part: part.restore(part.save(f"{run.folder}/restored").checkpoint.path) is None,
        "validate_env": lambda run, part: part.validate_env(None, None),
    },
    "AlgorithmConfig": {
        "build_learner": lambda run, part: type(part.build_learner(spaces=run.algo.spaces)).__name__ == "GRPOLearner",
        "offline_data": lambda run, part: part.copy(copy_frozen=False).offline_data(input_="/data").validate(),
        "multi_agent": lambda run, part: part.copy(copy_frozen=False).multi_agent(policies_to_train=["a"]).validate(),
    },
    "Learner": {
        "apply_gradients": steps_by_hand,
        "set_state": state_round_trip,
        "restore_from_path": saved,
    },
    "LearnerGroup": {
        "set_weights": set_zeros,
        "get_state": lambda run, part: same(part.get_state()["learner"]["rl_module"][MODULE], weights_of(run)),
        "set_state": state_round_trip,
        "restore_from_path": saved,
        "foreach_learner": lambda run, part: [each.get() for each in part.foreach_learner(lambda each: each.iteration)],
    },
    "EnvRunner": {
        "assert_healthy": lambda run, part: everywhere(run, "assert_healthy") == [None, None],
        "get_spaces": lambda run, part: len(everywhere(run, "get_spaces")) == 2,
    },
    "EnvRunnerGroup": {
        "sync_env_runner_states": lambda run, part: part.sync_env_runner_states(config=run.algo.config),
        "sync_weights": lambda run, part: part.sync_weights(from_worker_or_learner_group=run.group, inference_only=True),
        "foreach_env_runner_async": answers_later,
        "add_workers": lambda run, part: part.add_workers(1),
        "probe_unhealthy_env_runners": lambda run, part: part.probe_unhealthy_env_runners() == [],
    },
}  # fmt: skip
"""How calls that need more than their name are made; of what works, those that do something of this package's own.

The others that work need only be there.
"""
OWNERS = {
    "Algorithm": "algo",
    "AlgorithmConfig": "config",
    "Learner": "learner",
    "LearnerGroup": "group",
    "EnvRunner": "runner",
    "EnvRunnerGroup": "runners",
}


@pytest.mark.parametrize(("owner", "name", "answer", "note"), ROWS, ids=[f"{row[0]}.{row[1]}" for row in ROWS])
def test_a_call_does_what_its_row_says(run, owner, name, answer, note):
    call, part = CALLS[owner].get(name), getattr(run, OWNERS[owner])

    def found():
        """The answer of a call that needs no more than its name, or the value of a property."""
        if call:
            return call(run, part)
        value = getattr(part, name)
        return value() if callable(value) else value

    if answer == "works":
        assert found() if call else hasattr(part, name)
    elif answer == "raises":
        with pytest.raises((UnsupportedError, ConfigError)) as raised:
            found()
        assert note.replace("`", "") in str(raised.value)
    else:
        told = re.search(r"`([^`]+)`", note)
        assert repr(found()) == repr(ast.literal_eval(told[1]))


def test_a_part_of_a_checkpoint_is_restored_alone_or_as_a_module(run):
    before, part = weights_of(run), f"learner_group/learner/rl_module/{MODULE}"
    folder = Path(run.algo.save_to_path(f"{run.folder}/parts")) / part
    assert restored(run, run.group, lambda: run.algo.restore_from_path(folder, component=part))
    assert same(RLModule.from_checkpoint(folder).get_state(), before)
    with pytest.raises(ConfigError, match=r"writes into a folder, but got 's3://bucket/parts'"):
        run.algo.save_to_path("s3://bucket/parts")


MISSING = f"""
algorithm_state.pkl
class_and_ctor_args.pkl
learner_group
learner_group/learner/state.pkl
learner_group/learner/rl_module/{MODULE}/hf
learner_group/learner/rl_module/{MODULE}/hf/config.json
learner_group/learner/optimizer.pt
""".split()


def test_an_incomplete_checkpoint_is_refused(run):
    whole = Path(run.algo.save_to_path(f"{run.folder}/whole"))
    for missing in MISSING:
        part = Path(shutil.copytree(whole, run.folder / "part"))
        shutil.rmtree(part / missing) if (part / missing).is_dir() else (part / missing).unlink()
        if missing != "class_and_ctor_args.pkl":
            with pytest.raises(CheckpointError):
                run.algo.restore_from_path(part)
        if missing in MISSING[:4]:  # before any actor starts
            with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
                GRPO.from_checkpoint(part)
        shutil.rmtree(part)
    for restore in (run.algo.restore_from_path, GRPO.from_checkpoint):
        with pytest.raises(CheckpointError, match="There is no folder"):
            restore(part)
    (whole / "learner_group/state.pkl").write_bytes(b"")
    for owner, path in ((run.group, whole / "learner_group"), (run.algo, whole)):
        with pytest.raises(CheckpointError, match="EOFError"):
            owner.restore_from_path(path)


def test_a_learner_group_is_updated_with_references_to_groups_alone(run):
    for wrong in ({}, {"episodes": []}):
        with pytest.raises(UnsupportedError, match="training_data=TrainingGroups"):
            run.group.update(**wrong)


def test_a_function_that_raises_is_told_and_ends_no_env_runner(run):
    def broken(runner):
        if runner.worker_index == 2:
            raise LookupError("no such thing")

    with pytest.raises(CallbackError, match=r"env runner 2: LookupError: no such thing") as raised:
        everywhere(run, broken)
    assert "in broken" in raised.value.__notes__[0]
    with pytest.raises(CallbackError, match="An env runner has no model"):
        everywhere(run, lambda runner: runner.module)
    assert everywhere(run, [lambda runner: "a", lambda runner: "b"]) == ["a", "b"]
    run.runners.foreach_env_runner_async(broken, tag="broken")
    run.runners.fetch_ready_async_reqs(tags="broken", timeout_seconds=60)
    run.algo.train()
    assert run.runners.healthy_env_runner_ids() == [1, 2], "an env runner that raised in an asynchronous call is back"
