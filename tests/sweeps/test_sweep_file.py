"""What a sweep file may define, and what is refused before a trial starts."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from trial_ray import cli
from trial_ray.algorithms.methods import new_config
from trial_ray.errors import CheckpointError, ConfigError, MissingDependencyError, UserInputError
from trial_ray.files import examples_folder
from trial_ray.runs.metrics_file import check_metric, check_reported
from trial_ray.sweeps import plan
from trial_ray.sweeps.plan import SweepFile
from trial_ray.sweeps.tuner import EverySeed, Sweep, recorded_options

SWEEP = """
from ray import tune
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
OPTUNA = "from ray.tune.search.optuna import OptunaSearch\nsearch_alg = OptunaSearch(seed=0)\n"
PBT = """
from ray.tune.schedulers import PopulationBasedTraining
scheduler = PopulationBasedTraining(
    time_attr="training_iteration", perturbation_interval=3, hyperparam_mutations={"NAME": [1e-4, 1e-3]}
)
"""


@pytest.fixture
def load(tmp_path):
    def call(extra="", coefficient="0.1", iterations=None, overrides=()):
        file = tmp_path / "sweep.py"
        file.write_text(SWEEP.replace("COEFF", coefficient) + extra)
        return SweepFile.load(file, iterations, list(overrides))

    return call


def test_every_value_of_a_grid_is_checked_before_anything_starts(load):
    found = load()
    assert (found.metric, found.mode, found.num_trials) == ("env_runners/success_rate", "max", 4)
    with pytest.raises(ConfigError, match=r"hindsight_coeff is -0\.1"):
        load(coefficient="-0.1")
    with pytest.raises(ConfigError, match="hindsight_start_iteration is 2, but training ends after iteration 1"):
        load(iterations=1)
    with pytest.raises(UserInputError, match="searches over nothing"):
        load(overrides=["hindsight_coeff=0.1", "env_config.difficulty=tiny"])


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("mode = 'best'", "mode = 'best'"),
        ("scheduler_ = None", "Did you mean 'scheduler'"),
        ("size = 3", "Call it _size if"),
        ("num_samples = 0", "at least 1"),
        ("scheduler = 'asha'", r"expected one of Ray Tune's, such as ASHAScheduler"),
        ("search_alg = 'optuna'", r"such as OptunaSearch"),
        ("metric = 'env_runners/succes_rate'", "Did you mean 'env_runners/success_rate'"),
        ("metric = 'evaluation/env_runners/success_rate'", "there is no evaluation while training"),
        ("stop = {'training_iterations': 2}", "a key of stop is 'training_iterations'"),
        (
            "from ray.tune.schedulers import ASHAScheduler\nscheduler = ASHAScheduler(metric='x', mode='max')",
            "its own metric",
        ),
        (
            "from ray.tune.schedulers import ASHAScheduler\nscheduler = ASHAScheduler(mode='max')",
            "its own metric or mode",
        ),
        (PBT.replace("NAME", "lr") + OPTUNA, "gives a population a search_alg"),
        (
            "from ray.tune.search import BasicVariantGenerator\nsearch_alg = BasicVariantGenerator()",
            "such as OptunaSearch",
        ),
        (
            OPTUNA + "from ray.tune.search import ConcurrencyLimiter\nsearch_alg = ConcurrencyLimiter(search_alg, 2)",
            "wraps search_alg in ConcurrencyLimiter",
        ),
        (
            "from ray.tune.schedulers import HyperBandScheduler\nscheduler = HyperBandScheduler()\n"
            "metric = 'evaluation/env_runners/success_rate'\nconfig.evaluation(evaluation_interval=2)",
            "reported in every iteration",
        ),
        (PBT.replace("NAME", "learning_rate"), "'learning_rate', which is not a setting"),
        (PBT.replace("NAME", "lr") + "config.debugging(seed=tune.grid_search([1, 2]))", "Leave seed out"),
        (OPTUNA, r"env_config.difficulty is a tune.grid_search.*tune.choice\(\['tiny', 'small'\]\)"),
        ("config.training(lr=tune.sample_from(lambda spec: spec.config.gamma))", "lr cannot be drawn .*other settings"),
        ("config.environment(env_config={'a.b': tune.grid_search([1])})", "key 'a.b'.* without a dot"),
        ("config.environment(env_config={'a': (1, [tune.choice([1])])})", r"inside \[.*choose all"),
        (DRAWN + OPTUNA + "config.training(lr=tune.randn(0, 1))", "OptunaSearch cannot search over lr"),
    ],
)
def test_what_a_sweep_would_ignore_or_fail_at_is_refused(load, extra, words):
    with pytest.raises(ConfigError, match=words):
        load(extra)


def test_constants_helpers_and_imports_are_the_files_own(load):
    load("import math\nGAMES = 3\n_size = 2\ndef helper(): pass\nclass Thing: pass\n")


@pytest.mark.parametrize("path", sorted((examples_folder() / "sweeps").glob("*.py")), ids=lambda path: path.stem)
def test_every_sweep_of_the_examples_can_be_read(path):
    for config in SweepFile.load(path).configs():
        config.validate()


def test_draws_with_several_seeds_start_as_many_trials_as_there_is_room_for(load, tmp_path):
    found = load(DRAWN)
    assert Sweep(found, tmp_path / "out")._search_alg(2).max_concurrent == 2


def test_a_sweep_that_could_not_begin_leaves_no_log(tmp_path):
    from trial_ray.cli.train import logs_removed_unless_begun

    (tmp_path / "logs").mkdir()
    with pytest.raises(KeyboardInterrupt), logs_removed_unless_begun(tmp_path):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_secret_in_an_override_is_refused(load):
    with pytest.raises(ConfigError, match=r"env_config.data=http://<hidden>@host .*\$\{NAME\}"):
        load(overrides=["env_config.data=http://user:word@host"])


def test_trials_that_wait_for_others_all_start(load, tmp_path, monkeypatch):
    """HyperBand compares nothing while trials that it paused keep others from the start."""
    made = {}
    monkeypatch.setattr("ray.tune.Tuner", lambda trainable, tune_config, **_: made.update(vars(tune_config)))
    Sweep(load("from ray.tune.schedulers import HyperBandScheduler\nscheduler = HyperBandScheduler()"), tmp_path)._new(
        1
    )
    assert made["max_concurrent_trials"] is None


def test_what_a_population_changes_is_part_of_the_search(load):
    assert "lr" in load(PBT.replace("NAME", "lr")).searched


def test_optuna_is_given_the_drawn_values_and_every_suggestion_all_seeds(load, tmp_path):
    found = load(DRAWN + OPTUNA + "num_samples = 2")
    assert (found.seeds, found.num_trials) == ([3, 4], 4)
    searcher = Sweep(found, tmp_path / "out")._search_alg(2)
    assert isinstance(searcher, EverySeed)
    assert searcher.set_search_properties("m", "max", found.config.copy(copy_frozen=False).debugging(seed=3).to_dict())
    drawn = [searcher.suggest(f"t{index}") for index in range(4)]
    assert [each.pop("seed") for each in drawn] == [3, 4, 3, 4]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert 1e-3 <= drawn[0]["hindsight_coeff"] <= 0.1
    assert drawn[0]["env_config"]["difficulty"] in ("tiny", "small")


def test_a_missing_optuna_is_told_with_its_extra(load, monkeypatch):
    monkeypatch.setattr("ray.tune.search.optuna.optuna_search.ot", None)
    monkeypatch.setattr(plan, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*'optuna=="):
        load(OPTUNA)


def test_a_name_that_no_result_holds_is_told_with_its_neighbours():
    result = {"env_runners": {"success_rate": float("nan")}, "learners": {"default_policy": {"mine": {"loss": 1.0}}}}
    check_reported("env_runners/success_rate", "metric", result)  # not finite, but reported
    check_reported("evaluation/env_runners/success_rate", "metric", result)  # of a later iteration
    with pytest.raises(ConfigError, match="Did you mean 'learners/default_policy/mine/loss'"):
        check_reported("learners/mine/loss", "metric", result)


def test_metrics_of_a_users_own_method_are_left_to_its_first_result(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="dense_loss"):
        check_metric("learners/default_policy/trials/dense_loss", "metric", new_config("trial"))
    monkeypatch.setattr("trial_ray.runs.metrics_file.method_of", lambda config: "mine.py")
    check_metric("learners/default_policy/trials/dense_loss", "metric", new_config("trial"))


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ('mode = "min"\n', "mode was 'max', and is 'min' now"),
        ("config.training(lr=0.5)\n", r"config\.lr was .* 0\.5 now"),
    ],
)
def test_a_sweep_is_not_continued_with_another_file(load, tmp_path, changed, found):
    folder = tmp_path / "out"
    Sweep(load(DRAWN, iterations=3, overrides=["group_size=4"]), folder).begin()
    (folder / "tuner.pkl").touch()
    options = recorded_options(folder)
    Sweep(load(DRAWN, "0.1", *options), folder).require_folder(resume=True)
    with pytest.raises(CheckpointError, match=found):
        Sweep(load(DRAWN + changed, "0.1", *options), folder).require_folder(resume=True)


def test_a_sweep_continues_as_it_was_started(tmp_path, capsys):
    arguments = ["sweep", "sweeps/lambda_alpha", "--resume", str(tmp_path)]
    assert cli.main([*arguments, "--set", "lr=1", "--iterations", "3"]) == 2
    assert "leave out --iterations and --set" in capsys.readouterr().err
    assert cli.main(arguments) == 2
    assert "has no sweep to continue" in capsys.readouterr().err


@pytest.mark.parametrize(("interrupted", "status"), [(False, "done"), (True, "unfinished")])
def test_a_trial_that_was_ended_while_it_paused_is_done(interrupted, status, load, tmp_path, monkeypatch):
    """As HyperBand ends trials."""
    paused = SimpleNamespace(
        error=None,
        metrics={"done": False, "training_iteration": 1},
        path="folder/trial",
        metrics_dataframe=None,
        config=None,
    )

    def fit():
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        return [paused]

    monkeypatch.setattr(Sweep, "_new", lambda *_: SimpleNamespace(fit=fit))
    (trial,) = Sweep(load(), tmp_path, (), ()).fit(1).trials
    assert trial.status == status
