"""Runs that the library of a tracking service logs, and what it keeps of them."""

from trial_ray.runs.trackers import TrackedRun, Trackers

SETTINGS = {"settings": {"lr": 0.5, "engine_kwargs": {"hf_token": "t0p-t0p-t0p", "max_prompt_tokens": 7}}}


def log_runs(service, folder, runs, group=None):
    """Log runs, each given by its key, its iterations and whether it is resumed; the service must warn of nothing."""
    warnings = []
    for key, iterations, resumed in runs:
        run = TrackedRun(f"run-{key}", key, SETTINGS, folder, group, resumed)
        trackers = Trackers([service], run, warnings.append)
        for iteration in iterations:
            trackers.log(iteration, {"env_runners/success_rate": 0.1 * iteration, "timestamp": 5})
        trackers.close("done" if resumed else "interrupted")
    assert not warnings, warnings


def kept_files(folder):
    """Return the content of every file in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
