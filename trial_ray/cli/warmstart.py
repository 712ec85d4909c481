"""``trial-ray warmstart``: clones an expert into a model, from which training starts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trial_ray.cli.console import ENV_ADAPTER, SET, command, option, show


@command(
    "clone an expert into a model, to train from",
    """examples:
  trial-ray warmstart                                          the tiny default model, on generated games
  trial-ray warmstart --out models/start --set games=1000
  trial-ray warmstart --model path/to/hf_model --set optimizer=adamw --set learning_rate=1e-5 --set response_style=tagged

The result is cached: the same settings return at once. Settings are the fields of
trial_ray.warmstart.WarmStartSettings.
""",
    option("--model", "Hugging Face model folder (default: a tiny model from scratch)", "PATH"),
    option("--seed", "seed of weights, data order and sampling", "S", int, default=0),
    option("--out", "also copy the model into this new folder", "DIR", Path),
    ENV_ADAPTER,
    SET,
)
def warmstart(args: Namespace) -> None:
    """Train a causal LM by cloning an expert, as the initial policy for reinforcement learning."""
    from trial_ray.adapters.registry import load_adapters
    from trial_ray.runs.overrides import override_dataclass
    from trial_ray.warmstart import WarmStartSettings, warm_start

    settings = override_dataclass(WarmStartSettings(model_path=args.model, seed=args.seed), args.overrides)
    show(f"model: {warm_start(settings, load_adapters(args.env_adapters), out=args.out).path}")
