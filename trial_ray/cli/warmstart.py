"""``trial-ray warmstart``: clone an exploring oracle into a causal LM, to start reinforcement learning from."""

from __future__ import annotations

import argparse
from pathlib import Path

from trial_ray.cli import console as terminal

HELP = "clone an exploring oracle into a model, to train from"
EPILOG = """examples:
  trial-ray warmstart                                          the tiny default model, on generated games
  trial-ray warmstart --out models/start --set games=1000
  trial-ray warmstart --model path/to/hf_model --set optimizer=adamw --set learning_rate=1e-5 --set response_style=tagged

The result is cached: the same settings return at once. Settings are the fields of
trial_ray.warmstart.WarmStartSettings.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--model", metavar="PATH", help="Hugging Face model folder (default: a tiny model from scratch)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of weights, data order and sampling")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also copy the model into this new folder")
    terminal.add_options(parser, "--env-adapter", "--set")


def run(args: argparse.Namespace) -> int:
    """Clone."""
    from trial_ray.environments.registry import load_adapters
    from trial_ray.runs.overrides import override_dataclass
    from trial_ray.warmstart import WarmStartSettings, warm_start

    settings = override_dataclass(WarmStartSettings(model_path=args.model, seed=args.seed), args.overrides)
    result = warm_start(settings, load_adapters(args.env_adapters), out=args.out, progress=True)
    terminal.show(f"model: {result.path}")
    return terminal.DONE
