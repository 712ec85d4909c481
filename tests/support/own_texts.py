"""The experiment file of ``docs/environments.md`` with a prompt template and advice of its own."""

from pathlib import Path

from snippets import snippets

from trial_ray.experiments.experiment import load_experiment

(EXPERIMENT,) = snippets("environments.md", "own-texts")


def own_config(folder: Path):
    """The config that the file defines; the file is gone afterwards, as on another machine."""
    file = folder / "own_texts.py"
    file.write_text(EXPERIMENT)
    config = load_experiment(file).config
    file.unlink()
    return config
