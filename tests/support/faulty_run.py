"""Runs of a few tiny iterations on real actors, in which something is done to a process at a chosen moment."""

import contextlib
import io
import os
import signal
import threading

from fault_checks import lost_rows, written_metrics
from faulty_env import CountingEnv
from tiny_run import config_of, session_of

from trial_ray.runs.checkpoints import find_model, list_checkpoints


def tiny_config(model_path, *, num_learners=0, **recovery):
    """Seeded: two runs of it end with the same weights."""
    config = config_of(
        model_path, group_size=4, minibatch_rows=12, microbatch_rows=6, invalid_action_penalty=0.5, advantage_statistics="rows"
    )  # fmt: skip
    return (
        config.environment(CountingEnv.ENV_ID, env_config={"split": "train"})
        .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.25)
        .learners(num_learners=num_learners)
        .fault_tolerance(**recovery)
    )


STALL_S, ENDING = 5.0, "no progress for"


class FaultyRun:
    """A training session of three iterations, and the algorithms that it has built.

    Args:
        folder: of the run; must not exist.
        config: of the run.
    """

    def __init__(self, folder, config):
        self.console, self.ended = io.StringIO(), threading.Event()
        self.session = session_of(folder, config, 3, printed=self.console)
        self.folder, build = self.session.folder, self.session._build
        self.algorithms = []

        def noted():
            self.algorithms.append(build())
            return self.algorithms[-1]

        self.session._build = noted

    def run_with(self, *faults):
        """Run, and do one thing after the other; returns what was printed. No row is lost, and none is trained twice.

        Args:
            faults: which algorithm that the run builds, from 1, in which phase of which iteration, and the function that does
                something to the run then.
        """
        done = []

        def watch():
            for *moment, do in faults:
                while self._moment() != moment:
                    if self.ended.wait(0.002):
                        return
                done.append(do)
                do(self)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            self.session.run(contextlib.nullcontext())
        finally:
            self.ended.set()
            thread.join(60)
            print(self.console.getvalue())
            assert len(done) == len(faults), "the moment of a fault never came"
        lines = written_metrics(self.folder.path)
        assert [line["iteration"] for line in lines] == self.folder.recorded_iterations() == [1, 2, 3]
        assert sum(map(lost_rows, lines)) == 0
        assert self.folder.state() == "done"
        return self.console.getvalue()

    def _moment(self):
        """The number of algorithms, and the phase and the iteration of the last one."""
        number = len(self.algorithms)
        return number and [number, self.algorithms[-1].phase, self.algorithms[-1].iteration + 1]

    def weights(self):
        """The model of the newest checkpoint."""
        return (find_model(list_checkpoints(self.folder.checkpoints)[-1]) / "model.safetensors").read_bytes()


def pid(algorithm, kind):
    """Of the process of the first actor of a kind."""
    return next(each for each in algorithm.actors() if each.kind == kind).progress().pid


def kill(kind):
    """What kills an actor of a run."""
    return lambda run: os.kill(pid(run.algorithms[-1], kind), signal.SIGKILL)


def hang(kind):
    """What stops an actor of a run, whose watchdog is in a hurry until it has noticed: what is slow is not taken for a stall."""

    def do(run):
        os.kill(pid(run.algorithms[-1], kind), signal.SIGSTOP)
        watchdog, patience = run.session.watchdog, run.session.watchdog.timeout_s
        watchdog.timeout_s = STALL_S
        while ENDING not in run.console.getvalue() and not run.ended.wait(0.002):
            pass
        watchdog.timeout_s = patience

    return do
