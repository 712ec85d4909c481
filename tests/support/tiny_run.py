"""A run of seconds whose outcome is the same each time, and a driver of it in a process of its own."""

import multiprocessing
import os
import sys
import zlib
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import gymnasium
from gymnasium.spaces import Text


class ChanceEnv(gymnasium.Env):
    """Two turns; whether they win follows from what was said alone, so that an untrained policy wins half of its episodes.

    So large a share as ``failure_rate`` of the second turns fails, by the seed and what was said; the first ones, which a run
    checks, never do.
    """

    ENV_ID = "mine/Chance-v0"
    observation_space = action_space = Text(1000)

    def __init__(self, split="train", failure_rate=0.0):
        self.failure_rate = failure_rate

    def tasks(self, split=None):
        return [f"task {index}" for index in range(5)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.said = [options["task"]]
        self.seed = seed
        return "Say something.", self._info(won=False)

    def step(self, action):
        self.said.append(action)
        over = len(self.said) == 3
        said = "|".join(self.said).encode("utf-8", "surrogatepass")
        if over and zlib.crc32(said, self.seed or 0) / 2**32 < self.failure_rate:
            raise RuntimeError("failed at random")
        won = over and zlib.crc32(said) % 2 == 0
        return f"You said {action!r}.", float(won), over, False, self._info(won=won)

    def _info(self, won):
        return {
            "task": "say something",
            "task_id": self.said[0],
            "family": "chance",
            "admissible_actions": ["this", "that"],
            "won": won,
            "score": float(won),
        }


def with_small_actors(config):
    """``config`` with one env runner, one engine and a learner in the driver, none of which takes more than a share of a CPU."""
    return (
        config.engines(engine="transformers", num_cpus_per_engine=0.25)
        .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.25)
        .learners(num_learners=0, num_cpus_per_learner=0.25)
        .resources(num_cpus_for_main_process=0.25)
        .fault_tolerance(delay_between_env_runner_restarts_s=0)
        .debugging(seed=1)
    )


def games_config(model_path, max_turns, num_tasks, **training):
    """Return a config of TRIAL with small actors, generated ALFWorld games, prompts that hold them, and other games to evaluate."""
    from trial_ray.algorithms import TRIALConfig

    games = {"split": "generated", "difficulty": "tiny", "num_games": 64, "max_turns": max_turns}
    return (
        with_small_actors(TRIALConfig())
        .environment("trial/ALFWorld-v0", env_config=games)
        .rl_module(model_path=model_path)
        .training(tasks_per_iteration=2, minibatch_rows=12, microbatch_rows=6, ref_kl_coeff=0.0, **training)
        .env_runners(max_prompt_tokens=400, prompt_style="plain")
        .evaluation(
            evaluation_split="generated",
            evaluation_env_config={"generator_seed": 1},
            evaluation_num_tasks=num_tasks,
            evaluation_temperature=1.0,
        )
    )


def config_of(model_path, **training):
    """Of a run of seconds, exactly repeatable: seeded requests, decoded one at a time, one thread.

    The driver plays and learns, which leaves an engine as the only actor to start; so what is killed with the driver also writes
    trajectories.
    """
    from trial_ray.algorithms import GRPOConfig

    return (
        with_small_actors(GRPOConfig())
        .environment(ChanceEnv.ENV_ID, env_config={"split": "train"})
        .rl_module(model_path=model_path)
        .training(lr=1e-3, group_size=3, tasks_per_iteration=2, minibatch_rows=6, microbatch_rows=3, ref_kl_coeff=0.0)
        .training(**training)
        .env_runners(max_prompt_tokens=200, max_response_tokens=4, prompt_style="plain", seeded_sampling=True)
        .engines(engine_kwargs={"max_batch": 1, "num_threads": 1})
        .env_runners(num_env_runners=0, num_cpus_per_env_runner=1, sample_timeout_s=120.0)
    )


def with_two_runners(config):
    """Return ``config`` with two remote env runners and an evaluation set of two tasks."""
    return config.env_runners(num_env_runners=2, num_cpus_per_env_runner=0.1).evaluation(
        evaluation_split="train", evaluation_num_tasks=2
    )


def session_of(folder, config, iterations, resume=False, printed=None, **options):
    """A session with a checkpoint an iteration.

    Args:
        folder: of the run; without ``resume`` it must not exist.
        config: of the run.
        iterations: number of iterations, those before ``resume`` included.
        resume: whether the newest checkpoint of the folder is continued.
        printed: stream to which the session prints; by default the standard output.
        options: further fields of the session.
    """
    from rich.console import Console

    from trial_ray.runs.folder import RunFolder
    from trial_ray.runs.session import TrainingSession

    RunFolder(folder).configure(config)
    config.validate()
    run = RunFolder.reopen(folder) if resume else RunFolder.create(folder, config, Path(__file__), [])
    console = Console(file=printed, force_terminal=False, width=300)
    stop = {"training_iteration": iterations}
    return TrainingSession(config, stop, run, console, resume, checkpoint_every=1, **options)


def train(*arguments, **options):
    """Run the session of these arguments in this process, which is connected to Ray."""
    session_of(*arguments, **options).run(nullcontext())


def driver(**arguments):
    """A process of its own that joins the cluster and trains (arguments of :func:`_drive`), forked where all is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers", "tiny_run", "user_env"])
    process = context.Process(target=_drive, kwargs=arguments)
    with patch.dict(os.environ, RAY_AUTH_MODE="token"):  # read where Ray is imported
        process.start()
    return process


def _drive(address, log, folder, model_path, iterations, resume):
    """Train, and exit as the command would."""
    import ray
    from user_env import registered

    from trial_ray.cli import console
    from trial_ray.ray_internals import local_start

    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    with local_start():  # else Ray replaces the loopback address, at which alone the cluster listens
        ray.init(address=address, log_to_driver=False)
    try:
        with registered(ChanceEnv):
            train(folder, config_of(model_path), iterations, resume)
    except Exception as error:
        sys.exit(console.report(error, verbose=True))
    finally:
        ray.shutdown()
