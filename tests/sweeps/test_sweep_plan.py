"""Sweep files: what they may define, what is rejected before a trial starts, and what Ray Tune receives."""

import signal
from types import SimpleNamespace

import pytest
from rejections import rejected

from trial_ray import TRIALConfig, cli
from trial_ray.cli.sweep import remove_logs_unless_begun
from trial_ray.errors import ConfigError, MissingDependencyError, UserInputError
from trial_ray.files import examples_folder
from trial_ray.runs.metrics_file import check_metric, check_reported
from trial_ray.sweeps.callbacks import StopCriteria
from trial_ray.sweeps.plan import load_plan
from trial_ray.sweeps.run import EverySeed, Sweep, recorded_options

SWEEP = """
from ray import tune
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, PopulationBasedTraining
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch
from trial_ray.algorithms import TRIALConfig
config = (
    TRIALConfig()
    .environment("trial/ALFWorld-v0", env_config={"difficulty": tune.grid_search(["tiny", "small"])})
    .rl_module(model_path="some/model")
    .training(hindsight_coeff=tune.grid_search([0.01, COEFF]), hindsight_start_iteration=2)
)
stop = {"training_iteration": 2}
"""
DRAWN = """
config.environment(env_config={"difficulty": tune.choice(["tiny", "small"])})
config.training(hindsight_coeff=tune.loguniform(1e-3, 0.1)).debugging(seed=tune.grid_search([3, 4]))
"""
OPTUNA = "search_alg = OptunaSearch(seed=0)\n"
HYPERBAND = "scheduler = HyperBandScheduler()\n"
PBT = """
scheduler = PopulationBasedTraining(
    time_attr="training_iteration", perturbation_interval=3, hyperparam_mutations={"NAME": [1e-4, 1e-3]}
)
"""
EVALUATION = "evaluation/env_runners/success_rate"
REFUSED = {
    "mode = 'best'": "mode",
    "scheduler_ = None": "'scheduler'",
    "num_samples = 0": "num_samples",
    "scheduler = 'asha'": "ASHAScheduler",
    "search_alg = 'optuna'": "OptunaSearch",
    "metric = 'env_runners/succes_rate'": "'env_runners/success_rate'",
    f"metric = '{EVALUATION}'": "evaluation_split",
    "stop = {'training_iterations': 2}": "key of stop",
    "scheduler = ASHAScheduler(metric='x', mode='max')": "its own metric",
    PBT.replace("NAME", "lr") + OPTUNA: "population",
    "search_alg = BasicVariantGenerator()": "OptunaSearch",
    OPTUNA + "search_alg = ConcurrencyLimiter(search_alg, 2)": "ConcurrencyLimiter",
    f"{HYPERBAND}metric = '{EVALUATION}'\nconfig.evaluation(evaluation_interval=2)": "evaluation_interval=1",
    PBT.replace("NAME", "learning_rate"): "'learning_rate'",
    PBT.replace("NAME", "lr") + "config.debugging(seed=tune.grid_search([1, 2]))": "several seeds",
    OPTUNA: r"tune.choice\(\['tiny', 'small'\]\)",
    "config.training(lr=tune.sample_from(lambda spec: spec.config.gamma))": "lr cannot be drawn",
    "config.environment(env_config={'a.b': tune.grid_search([1])})": "'a.b'",
    "config.environment(env_config={'a': (1, [tune.choice([1])])})": "whole setting",
    DRAWN + OPTUNA + "config.training(lr=tune.randn(0, 1))": "OptunaSearch cannot search over lr",
}


@pytest.fixture
def load(tmp_path):
    def call(extra="", coefficient="0.1", *arguments, **options):
        file = tmp_path / "sweep.py"
        file.write_text(SWEEP.replace("COEFF", coefficient) + extra)
        return load_plan(file, *arguments, **options)

    return call


@pytest.fixture
def tune_config(tmp_path, monkeypatch):
    """Returns what a new sweep of a plan passes to Ray Tune."""
    monkeypatch.setattr("ray.tune.Tuner", lambda trainable, tune_config, **_: tune_config)
    return lambda plan, at_once: Sweep(plan, tmp_path / "out")._new(at_once)


def test_every_grid_value_is_checked(load):
    plan = load()
    assert plan.metric == "env_runners/success_rate"
    assert plan.mode == "max"
    assert plan.num_trials == 4
    assert plan.repeats == 1
    assert {config.env_config["difficulty"] for config in plan.configs} == {"tiny", "small"}
    assert load("num_samples = 3").repeats == 3
    for words, arguments in {
        "hindsight_coeff": {"coefficient": "-0.1"},
        "hindsight_start_iteration": {"iterations": 1},
        "searches over nothing": {"overrides": ["hindsight_coeff=0.1", "env_config.difficulty=tiny"]},
        "<hidden>@host": {"overrides": ["env_config.data=http://user:word@host"]},
    }.items():
        with pytest.raises(UserInputError, match=words):
            load(**arguments)


@pytest.mark.parametrize(("extra", "words"), REFUSED.items())
def test_unsuitable_sweep_is_rejected(load, extra, words):
    with pytest.raises(ConfigError, match=words):
        load(extra)


def test_files_may_define_helpers_and_the_examples_are_valid(load):
    load("import math\nGAMES = 3\n_size = 2\ndef helper(): pass\n")
    for path in (examples_folder() / "sweeps").glob("*.py"):
        for config in load_plan(path).configs:
            config.validate()


def test_draws_and_schedulers_decide_how_many_trials_start(load, tune_config):
    assert tune_config(load(DRAWN), 2).search_alg.max_concurrent == 2
    assert tune_config(load(), 2).max_concurrent_trials == 2
    # HyperBand waits for all trials of a bracket to start.
    assert tune_config(load(HYPERBAND), 1).max_concurrent_trials is None
    assert "lr" in load(PBT.replace("NAME", "lr")).spaces


def test_optuna_suggests_each_point_with_every_seed(load, tune_config):
    plan = load(DRAWN + OPTUNA + "num_samples = 2")
    assert plan.num_trials == 4
    assert plan.repeats == 2
    config = tune_config(plan, 2)
    searcher = config.search_alg
    assert config.num_samples == 4
    assert isinstance(searcher, EverySeed)
    assert searcher.set_search_properties("m", "max", plan.param_space.to_dict())
    first, second, third, fourth = suggested = [*map(searcher.suggest, "abcd")]
    assert [trial.pop("seed") for trial in suggested] == [3, 4, 3, 4]
    assert first == second != third == fourth
    assert first["env_config"]["difficulty"] in ("tiny", "small")


def test_missing_optuna_is_a_missing_dependency(load, monkeypatch):
    monkeypatch.setattr("ray.tune.search.optuna.optuna_search.ot", None)
    monkeypatch.setattr("trial_ray.sweeps.plan.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError):
        load(OPTUNA)


def test_metrics_are_checked_before_and_at_the_first_result(monkeypatch):
    misspelt = "learners/default_policy/trials/dense_loss", "metric", TRIALConfig()
    with pytest.raises(ConfigError, match="trial/dense_loss"):
        check_metric(*misspelt)
    monkeypatch.setattr("trial_ray.runs.metrics_file.method_of", lambda config: "mine.py")
    check_metric(*misspelt)  # a user's method may log any metric
    result = {"env_runners": {"success_rate": float("nan")}, "learners": {"default_policy": {"mine": {"loss": 1.0}}}}
    check_reported("env_runners/success_rate", "metric", result)
    check_reported(EVALUATION, "metric", result)  # a later iteration may report it
    with pytest.raises(ConfigError, match="'learners/default_policy/mine/loss'"):
        check_reported("learners/mine/loss", "metric", result)
    with pytest.raises(ConfigError, match="key of stop"):
        StopCriteria({"iterations": 2}, "env_runners/success_rate")("a", result)


@pytest.mark.parametrize(
    ("changed", "words"), [('mode = "min"\n', "mode was"), ("config.training(lr=0.5)\n", "lr was")]
)
def test_changed_file_does_not_continue_a_sweep(load, tmp_path, changed, words):
    folder = tmp_path / "out"
    Sweep(load(DRAWN, iterations=3, overrides=["group_size=4"], method="sdar"), folder).begin()
    (folder / "tuner.pkl").touch()

    def resume(extra):
        Sweep(load(extra, "0.1", *recorded_options(folder)), folder).require_folder(resume=True)

    resume(DRAWN)
    rejected(words, resume, DRAWN + changed)


def test_sweep_command_rejects_options_that_do_not_fit(tmp_path, capsys):
    sweep = "sweep sweeps/lambda_alpha"
    for options in (f"--resume {tmp_path} --set lr=1", f"--resume {tmp_path}", "--scale tiny"):
        assert cli.main(f"{sweep} {options}".split()) == 2
    assert cli.main(f"{sweep} --dry-run".split()) == 0
    assert "clamp_alpha" in capsys.readouterr().out


def test_sweep_that_fails_before_it_begins_leaves_no_log(load, tmp_path):
    folder = tmp_path / "out"
    (folder / "logs").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), remove_logs_unless_begun(Sweep(load(), folder)):
        raise KeyboardInterrupt
    assert not list(folder.iterdir())


@pytest.mark.parametrize("interrupted", [False, True])
def test_trial_that_hyperband_ended_is_done_unless_interrupted(interrupted, load, tmp_path, monkeypatch):
    metrics = {"done": False, "training_iteration": 1}

    def fit():
        if interrupted:
            signal.raise_signal(signal.SIGINT)
        return [SimpleNamespace(error=None, metrics=metrics, path="folder/trial", metrics_dataframe=None, config=None)]

    monkeypatch.setattr(Sweep, "_new", lambda *_: SimpleNamespace(fit=fit))
    result = Sweep(load(), tmp_path).fit(1)
    assert [trial.status for trial in result.trials] == ["unfinished" if interrupted else "done"]
    assert result.not_started == (3 if interrupted else 0)
