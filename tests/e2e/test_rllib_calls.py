"""Every call that RLlib's classes offer does what docs/rllib.md says of it; the calls in its lists are the test's parameters."""

from __future__ import annotations

import ast
import inspect
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.checkpoints import Checkpointable
from ray.tune.trainable.trainable import Trainable
from tiny_run import ChanceEnv, config_of
from user_env import registered

from trial_ray.algorithms import GRPO, GRPOConfig
from trial_ray.errors import CallbackError, ConfigError, UnsupportedError

pytestmark = pytest.mark.e2e

PAGE = (Path(__file__).parents[2] / "docs" / "rllib.md").read_text(encoding="utf-8")
ROWS = [
    (owner, name, answer.lower(), note)
    for owner, section in re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    for answer, items in re.findall(r"^(Works|Meaningless|Raises):\n\n(.*?)\n\n", section, re.MULTILINE | re.DOTALL)
    for names, note in re.findall(r"^- (`[^:]+`): (.*)$", items, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
]
CLASSES = {
    "Algorithm": (Algorithm, Checkpointable, Trainable),
    "AlgorithmConfig": (AlgorithmConfig,),
    "Learner": (Learner, Checkpointable),
    "LearnerGroup": (LearnerGroup, Checkpointable),
    "EnvRunner": (EnvRunner,),
    "EnvRunnerGroup": (EnvRunnerGroup,),
}
MODULE = "default_policy"


def offered(classes: tuple[type, ...]) -> set[str]:
    """Names of public methods and properties; not those that RLlib has deprecated or keeps for its old API stack."""
    found = set()
    for cls in classes:
        for name, value in vars(cls).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if name.startswith("_") or name.isupper() or not inspect.isfunction(function):
                continue
            decorators = inspect.getsource(function).partition("def ")[0]
            deprecated = "Deprecated" in decorators or function.__code__.co_filename.endswith("deprecation.py")
            if not deprecated and "OldAPIStack" not in decorators:
                found.add(name)
    return found


def test_the_page_has_a_row_for_every_call():
    for owner, classes in CLASSES.items():
        told = {name for of, name, *_ in ROWS if of == owner}
        assert offered(classes) <= told, f"{owner}: {sorted(offered(classes) - told)}"
    assert len({row[:2] for row in ROWS}) == len(ROWS)


@contextmanager
def names_called(learner):
    """Collects which of the learner's methods an update calls."""
    called = set()

    def noting(name, method):
        def call(*args, **kwargs):
            called.add(name)
            return method(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in offered(CLASSES["Learner"]):
            if inspect.ismethod(method := getattr(learner, name, None)):
                patch.setattr(learner, name, noting(name, method))
        yield called


@pytest.fixture(scope="module")
def run(algorithm_of, model_path, tmp_path_factory):
    """An algorithm that has trained an iteration, with two env runners."""
    config = (
        config_of(model_path)
        .environment(ChanceEnv.ENV_ID, env_config={"split": "train"})
        .env_runners(num_env_runners=2, num_cpus_per_env_runner=0.1)
        .evaluation(evaluation_split="train", evaluation_num_tasks=2)
    )
    with registered(ChanceEnv):
        algo = algorithm_of(config)
        with names_called(algo.learner_group._learner) as called:
            result = algo.train()
        made = SimpleNamespace(algo=algo, config=config, result=result, folder=tmp_path_factory.mktemp("saved"))
        made.called = called
        made.group, made.runners = algo.learner_group, algo.env_runner_group
        made.learner = made.group._learner
        made.runner = config.env_runner_cls(config=config, env_creator=None, worker_index=0)
        yield made
        made.runner.stop()


def weights_of(run):
    return run.group.get_weights()[MODULE]


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def module_is_the_learners(run):
    module = run.algo.get_module()
    states = module.lm.state_dict(), run.learner.policy_module.lm.state_dict()
    assert run.algo.get_module("another") is None
    return module.lm is not run.learner.policy_module.lm and all(
        torch.equal(each, states[1][name]) and each.device.type == "cpu" for name, each in states[0].items()
    )


def set_zeros(run, setter):
    before = weights_of(run)
    setter({MODULE: {name: 0 * value for name, value in before.items()}})
    assert not any(value.any() for value in weights_of(run).values())
    setter({MODULE: before})
    return same(weights_of(run), before)


def state_round_trip(run, owner):
    state, before = owner.get_state(), weights_of(run)
    run.algo.train()
    owner.set_state(state)
    return goes_on(run, owner, before)


def goes_on(run, owner, before):
    """The weights are back, and those of the engines too, for which a learner has no way of its own."""
    if restored := same(weights_of(run), before):
        if owner is run.learner:
            run.group.set_weights(run.group.get_weights())
        run.algo.train()
    return restored


def saved(run, owner, name):
    """The owner's state in a folder, restored after another iteration."""
    before = weights_of(run)
    owner.save_to_path(str(run.folder / name))
    run.algo.train()
    owner.restore_from_path(str(run.folder / name))
    return goes_on(run, owner, before)


def section(name, **settings):
    """A config's section sets its settings and gives the config back."""

    def call(run):
        config = GRPOConfig()
        return getattr(config, name)(**settings) is config and all(
            getattr(config, key) == value for key, value in settings.items()
        )

    return call


def config(call):
    return lambda run: call(run.config.copy(copy_frozen=False))


def learner(call):
    return lambda run: call(run.learner)


def in_update(name):
    return lambda run: name in run.called


def beside_update(name):
    return lambda run: name not in run.called and callable(getattr(run.learner, name))


def optimizer_and_parameters(run):
    """The optimizer that RLlib's calls find has the policy's parameters."""
    learner = run.learner
    ((_, optimizer),) = learner.get_optimizers_for_module(MODULE)
    parameters = learner.get_parameters(learner.module[MODULE])
    by_reference = {learner.get_param_ref(each): each for each in parameters}
    assert len(learner.filter_param_dict_for_optimizer(by_reference, optimizer)) == len(parameters)
    return learner.get_optimizer(MODULE) is optimizer


def steps_by_hand(run):
    """A gradient of RLlib's own calls changes the weights."""
    before, module = weights_of(run), run.learner.module[MODULE]
    loss = sum(parameter.square().sum() for parameter in run.learner.get_parameters(module))
    gradients = run.learner.postprocess_gradients(run.learner.compute_gradients({MODULE: loss}))
    run.learner.apply_gradients(gradients)
    changed = not same(weights_of(run), before)
    run.group.set_weights({MODULE: before})
    return changed


def everywhere(run, call, **options):
    return run.runners.foreach_env_runner(call, local_env_runner=False, **options)


def answers_later(run):
    sent, found = run.runners.foreach_env_runner_async("ping", tag="ping"), []
    while len(found) < sent:
        found += run.runners.fetch_ready_async_reqs(tags="ping", timeout_seconds=60)
    return sorted(found) == [(1, "pong"), (2, "pong")]


CALLS = {
    "Algorithm": {
        "setup": lambda run: run.algo.engine_pool.handles,
        "step": lambda run: run.algo.step()["env_runners"]["num_episodes"] == 6,
        "training_step": lambda run: run.algo.training_step() is None,
        "train": lambda run: run.algo.train()["env_runners"]["num_episodes"] == 6,
        "train_buffered": lambda run: len(run.algo.train_buffered(0.0)) == 1,
        "evaluate": lambda run: run.algo.evaluate()["env_runners"]["num_episodes"] == 2,
        "get_default_config": lambda run: isinstance(GRPO.get_default_config(), GRPOConfig),
        "get_default_policy_class": lambda run: GRPO.get_default_policy_class(run.config),
        "restore_env_runners": lambda run: run.algo.restore_env_runners(run.runners) == [],
        "get_module": module_is_the_learners,
        "get_weights": lambda run: same(run.algo.get_weights()[MODULE], weights_of(run)),
        "set_weights": lambda run: set_zeros(run, run.algo.set_weights),
        "get_state": lambda run: run.algo.get_state()["training_iteration"] == run.algo.iteration,
        "set_state": lambda run: state_round_trip(run, run.algo),
        "save_to_path": lambda run: saved(run, run.algo, "algorithm"),
        "restore_from_path": lambda run: saved(run, run.algo, "again"),
        "save_checkpoint": lambda run: run.algo.save_checkpoint(str(run.folder / "tune")) is None,
        "load_checkpoint": lambda run: run.algo.load_checkpoint(str(run.folder / "tune")) is None,
        "save": lambda run: run.algo.save(str(run.folder / "trainable")).checkpoint,
        "restore": lambda run: run.algo.restore(str(run.folder / "trainable")) is None,
        "get_metadata": lambda run: run.algo.get_metadata()["class_and_ctor_args_file"],
        "get_checkpointable_components": lambda run: "learner_group" in dict(run.algo.get_checkpointable_components()),
        "get_ctor_args_and_kwargs": lambda run: run.algo.get_ctor_args_and_kwargs()[0],
        "log_result": lambda run: run.algo.log_result({"training_iteration": 1}) is None,
        "default_resource_request": lambda run: len(GRPO.default_resource_request(run.config).bundles) == 4,
        "resource_help": lambda run: "num_env_runners" in GRPO.resource_help(run.config),
        "get_auto_filled_metrics": lambda run: run.algo.get_auto_filled_metrics()["config"]["group_size"] == 3,
        "merge_algorithm_configs": lambda run: Algorithm.merge_algorithm_configs({"lr": 1}, {"lr": 2})["lr"] == 2,
        "validate_env": lambda run: run.algo.validate_env(None, None),
        "env_runner": lambda run: run.algo.env_runner is None,
        "eval_env_runner": lambda run: run.algo.eval_env_runner,
        "get_config": lambda run: run.algo.get_config()["group_size"] == 3,
        "iteration": lambda run: run.algo.iteration >= 1,
        "training_iteration": lambda run: run.algo.training_iteration == run.algo.iteration,
        "logdir": lambda run: Path(run.algo.logdir).is_dir(),
        "trial_name": lambda run: run.algo.trial_name == "default",
        "trial_id": lambda run: run.algo.trial_id == "default",
        "trial_resources": lambda run: run.algo.trial_resources in (None, "default"),
        "is_actor": lambda run: run.algo.is_actor() is False,
        "get_current_ip_pid": lambda run: run.algo.get_current_ip_pid()[1] > 0,
    },
    "AlgorithmConfig": {
        "from_dict": lambda run: GRPOConfig.from_dict({"group_size": 4}).group_size == 4,
        "overrides": lambda run: GRPOConfig.overrides(lr=2.0) == {"lr": 2.0},
        "to_dict": config(lambda config: config.to_dict()["group_size"] == 3),
        "update_from_dict": config(lambda config: config.update_from_dict({"group_size": 5}).group_size == 5),
        "get_state": config(lambda config: config.get_state()["class"] is GRPOConfig),
        "from_state": config(lambda config: GRPOConfig.from_state(config.get_state()).group_size == 3),
        "serialize": config(lambda config: config.serialize()["group_size"] == 3),
        "copy": config(lambda config: config.copy().group_size == 3),
        "freeze": config(lambda config: config.freeze() or config._is_frozen),
        "validate": config(lambda config: config.validate() is None),
        "build_algo": lambda run: run.algo.config.group_size == 3,
        "build_learner_group": lambda run: type(run.group).__name__ == "PolicyLearnerGroup",
        "build_learner": lambda run: type(run.config.build_learner(spaces=run.algo.spaces)).__name__ == "GRPOLearner",
        "get_config_for_module": config(lambda config: config.get_config_for_module(MODULE).group_size == 3),
        "python_environment": section("python_environment", extra_python_environs_for_worker={"A": "1"}),
        "resources": section("resources", num_cpus_for_main_process=2),
        "framework": section("framework"),
        "api_stack": section("api_stack"),
        "environment": section("environment", env_config={"split": "train"}),
        "env_runners": section("env_runners", num_env_runners=3),
        "learners": section("learners", num_learners=2),
        "training": section("training", lr=0.5),
        "callbacks": section("callbacks"),
        "evaluation": section("evaluation", evaluation_interval=3),
        "reporting": section("reporting", log_gradients=True),
        "checkpointing": section("checkpointing"),
        "debugging": section("debugging", seed=3),
        "fault_tolerance": section("fault_tolerance", max_num_env_runner_restarts=3),
        "rl_module": section("rl_module", model_path="m"),
        "experimental": section("experimental"),
        "offline_data": config(lambda config: config.offline_data(input_="/data").validate()),
        "multi_agent": config(lambda config: config.multi_agent(policies_to_train=["a"]).validate()),
        "is_multi_agent": config(lambda config: config.is_multi_agent),
        "is_online": config(lambda config: config.is_online),
        "is_offline": config(lambda config: config.is_offline),
        "is_atari": config(lambda config: config.is_atari),
        "learner_class": config(lambda config: config.learner_class.__name__ == "GRPOLearner"),
        "model_config": config(lambda config: config.model_config["model_path"]),
        "rl_module_spec": config(lambda config: config.rl_module_spec.module_class.__name__ == "CausalLMModule"),
        "train_batch_size_per_learner": config(lambda config: config.train_batch_size_per_learner),
        "total_train_batch_size": config(lambda config: config.total_train_batch_size),
        "get_rollout_fragment_length": config(lambda config: config.get_rollout_fragment_length()),
        "get_evaluation_config_object": config(lambda config: config.get_evaluation_config_object().in_evaluation),
        "build_env_to_module_connector": lambda run: run.config.build_env_to_module_connector(spaces=run.algo.spaces),
        "build_module_to_env_connector": lambda run: run.config.build_module_to_env_connector(spaces=run.algo.spaces),
        "build_learner_connector": lambda run: isinstance(
            run.config.build_learner_connector(*run.algo.spaces[MODULE]), ConnectorV2
        ),
        "get_torch_compile_worker_config": config(lambda config: config.get_torch_compile_worker_config()),
        "get_default_rl_module_spec": config(lambda config: config.get_default_rl_module_spec().module_class),
        "get_default_learner_class": config(lambda config: config.get_default_learner_class()),
        "get_rl_module_spec": lambda run: run.config.get_rl_module_spec(spaces=run.algo.spaces).model_config,
        "get_multi_rl_module_spec": lambda run: run.config.get_multi_rl_module_spec(spaces=run.algo.spaces)[MODULE],
        "get": config(lambda config: config.get("group_size") == 3),
        "pop": config(lambda config: config.pop("group_size") == 3),
        "keys": config(lambda config: "group_size" in config.keys()),  # noqa: SIM118
        "values": config(lambda config: 3 in list(config.values())),
        "items": config(lambda config: ("group_size", 3) in list(config.items())),
    },
    "Learner": {
        **{
            name: in_update(name)
            for name in (
                "after_gradient_based_update",
                "before_gradient_based_update",
                "update",
            )
        },
        **dict.fromkeys(
            ("apply_gradients", "compute_gradients", "postprocess_gradients", "postprocess_gradients_for_module"),
            steps_by_hand,
        ),
        **{name: beside_update(name) for name in ("compute_loss_for_module", "compute_losses")},
        "apply": learner(lambda learner: learner.apply(lambda each: each is learner)),
        "build": learner(lambda learner: learner.method),
        "configure_optimizers": optimizer_and_parameters,
        "configure_optimizers_for_module": optimizer_and_parameters,
        "register_optimizer": optimizer_and_parameters,
        "get_optimizer": optimizer_and_parameters,
        "get_optimizers_for_module": optimizer_and_parameters,
        "get_param_ref": optimizer_and_parameters,
        "get_parameters": optimizer_and_parameters,
        "filter_param_dict_for_optimizer": optimizer_and_parameters,
        "device": learner(lambda learner: torch.device(learner.device).type == "cpu"),
        "distributed": learner(lambda learner: learner.distributed is False),
        "module": learner(lambda learner: learner.module[MODULE]),
        "node": learner(lambda learner: learner.node),
        "rl_module_is_compatible": learner(lambda learner: learner.rl_module_is_compatible(learner.module[MODULE])),
        "rl_module_required_apis": learner(lambda learner: learner.rl_module_required_apis() == []),
        "should_module_be_updated": learner(lambda learner: learner.should_module_be_updated(MODULE)),
        "get_state": lambda run: same(run.learner.get_state()["rl_module"][MODULE], weights_of(run)),
        "set_state": lambda run: state_round_trip(run, run.learner),
        "save_to_path": lambda run: saved(run, run.learner, "learner"),
        "restore_from_path": lambda run: saved(run, run.learner, "learner again"),
        "get_metadata": learner(lambda learner: learner.get_metadata()["class_and_ctor_args_file"]),
        "get_ctor_args_and_kwargs": learner(lambda learner: learner.get_ctor_args_and_kwargs()[1]),
        "get_checkpointable_components": learner(lambda learner: learner.get_checkpointable_components()),
    },
    "LearnerGroup": {
        "get_stats": lambda run: isinstance(run.group.get_stats(), dict),
        "is_remote": lambda run: run.group.is_remote is False,
        "is_local": lambda run: run.group.is_local,
        "update": lambda run: run.result["learners"][MODULE]["num_module_steps_trained"] > 0,
        "get_weights": lambda run: len(weights_of(run)) > 3,
        "set_weights": lambda run: set_zeros(run, run.group.set_weights),
        "get_state": lambda run: same(run.group.get_state()["learner"]["rl_module"][MODULE], weights_of(run)),
        "set_state": lambda run: state_round_trip(run, run.group),
        "save_to_path": lambda run: saved(run, run.group, "group"),
        "restore_from_path": lambda run: saved(run, run.group, "group again"),
        "get_metadata": lambda run: run.group.get_metadata()["class_and_ctor_args_file"],
        "get_ctor_args_and_kwargs": lambda run: run.group.get_ctor_args_and_kwargs()[1],
        "get_checkpointable_components": lambda run: run.group.get_checkpointable_components(),
        "foreach_learner": lambda run: [each.get() for each in run.group.foreach_learner(lambda each: each.iteration)],
    },
    "EnvRunner": {
        "assert_healthy": lambda run: everywhere(run, "assert_healthy") == [None, None],
        "get_spaces": lambda run: len(everywhere(run, "get_spaces")) == 2,
        "get_metrics": lambda run: run.runner.get_metrics(),
        "stop": lambda run: run.runner.stop() is None,
    },
    "EnvRunnerGroup": {
        "get_spaces": lambda run: run.runners.get_spaces(),
        "local_env_runner": lambda run: run.runners.local_env_runner is None,
        "healthy_env_runner_ids": lambda run: run.runners.healthy_env_runner_ids() == [1, 2],
        "healthy_worker_ids": lambda run: run.runners.healthy_worker_ids() == [1, 2],
        "num_remote_env_runners": lambda run: run.runners.num_remote_env_runners() == 2,
        "num_remote_workers": lambda run: run.runners.num_remote_workers() == 2,
        "num_healthy_remote_env_runners": lambda run: run.runners.num_healthy_remote_env_runners() == 2,
        "num_healthy_remote_workers": lambda run: run.runners.num_healthy_remote_workers() == 2,
        "num_healthy_env_runners": lambda run: run.runners.num_healthy_env_runners() == 2,
        "num_healthy_workers": lambda run: run.runners.num_healthy_workers() == 2,
        "num_in_flight_async_reqs": lambda run: run.runners.num_in_flight_async_reqs() >= 0,
        "num_remote_worker_restarts": lambda run: run.runners.num_remote_worker_restarts() == 0,
        "num_env_runners_dropped_lifetime": lambda run: run.runners.num_env_runners_dropped_lifetime() == 0,
        "get_merged_env_runner_state": lambda run: run.runners.get_merged_env_runner_state(
            config=run.algo.config,
            rl_module_state={"weights_seq_no": 1},
            env_to_module=run.algo.env_to_module_connector,
            module_to_env=run.algo.module_to_env_connector,
        )["weights_seq_no"],
        "sync_env_runner_states": lambda run: run.runners.sync_env_runner_states(config=run.algo.config),
        "sync_weights": lambda run: run.runners.sync_weights(
            from_worker_or_learner_group=run.group, inference_only=True
        ),
        "foreach_env_runner": lambda run: everywhere(run, lambda runner: runner.worker_index) == [1, 2],
        "foreach_env_runner_async": answers_later,
        "fetch_ready_async_reqs": answers_later,
        "foreach_env_runner_async_fetch_ready": lambda run: isinstance(
            run.runners.foreach_env_runner_async_fetch_ready("ping", tag="both"), list
        ),
        "add_workers": lambda run: run.runners.add_workers(1),
        "probe_unhealthy_env_runners": lambda run: run.runners.probe_unhealthy_env_runners() == [],
    },
}
ELSEWHERE = {
    "Algorithm": ("from_checkpoint", "stop", "cleanup", "reset", "reset_config"),
    "Learner": ("from_checkpoint", "shutdown"),
    "LearnerGroup": ("from_checkpoint", "shutdown"),
    "EnvRunnerGroup": ("stop",),
}
"""What ends or begins an algorithm; other tests of this folder do so."""
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
    called = getattr(run, OWNERS[owner])
    if name in ELSEWHERE.get(owner, ()):
        assert answer == "works"
        assert callable(getattr(called, name))
        return
    call = CALLS[owner].get(name) or (lambda run: getattr(called, name)())
    if answer == "raises":
        with pytest.raises((UnsupportedError, ConfigError)) as raised:
            call(run)
        assert note.replace("`", "") in str(raised.value)
    elif answer == "meaningless":
        told = re.search(r"`([^`]+)`", note)
        assert repr(call(run)) == repr(ast.literal_eval(told[1]))
    else:
        assert call(run), "it answers as a call in CALLS"


def test_a_function_that_raises_is_told_and_ends_no_env_runner(run):
    def broken(runner):
        if runner.worker_index == 2:
            raise LookupError("no such thing")
        return runner.worker_index

    for _ in range(2):
        with pytest.raises(CallbackError, match=r"raised on env runner 2: LookupError: no such thing") as raised:
            everywhere(run, broken)
        assert "in broken" in raised.value.__notes__[0]
    with pytest.raises(CallbackError, match="An env runner holds no model"):
        everywhere(run, lambda runner: runner.module)
    assert everywhere(run, lambda runner: runner.worker_index) == [1, 2]
    assert everywhere(run, [lambda runner: "a", lambda runner: "b"]) == ["a", "b"]
    run.runners.foreach_env_runner_async(broken, tag="broken")
    run.runners.fetch_ready_async_reqs(tags="broken", timeout_seconds=60)
    run.algo.train()
    assert run.runners.healthy_env_runner_ids() == [1, 2], "an env runner that raised in an asynchronous call is back"
