"""Commands for warm starts: ``warmstart`` makes an initial model, ``judge`` tests if its hindsight log-ratio is informative."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

from trial_ray.cli.console import ENV_ADAPTER, SET, command, option, output, positive, show, table
from trial_ray.cli.evaluate import recorded_config


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


@command(
    "measure whether the hindsight log-ratio separates wasted from planned actions",
    """examples:
  trial-ray judge models/start
  trial-ray judge runs/my-run --games 64
  trial-ray judge path/to/hf_model --demonstrator 0.25
  trial-ray judge path/to/hf_model --set response_style=tagged --set history_window=2 --games 64 --out judgement

Run it before a long TRIAL run: if the log-ratio does not separate wasted from planned actions, TRIAL has no useful signal. A model
of a run or of `trial-ray warmstart` is judged with the settings that made it, which --set changes; give the settings of any
other model with --set (fields of trial_ray.warmstart.WarmStartSettings).
""",
    option(
        "model",
        "run folder (its newest checkpoint), checkpoint, folder of a causal LM in Hugging Face format, or package:NAME",
        "MODEL",
        Path,
    ),
    option("--games", "held-out games to play (default: 192)", "N", positive),
    option(
        "--demonstrator",
        "let the demonstrator play, with probability P another action than the one it planned, and the model only score the "
        "turns: for a model that cannot play yet",
        "P",
        float,
    ),
    option("--out", "write judgement.json, with every turn, and judgement.png", "DIR", Path),
    ENV_ADAPTER,
    SET,
)
def judge(args: Namespace) -> None:
    """Measure whether a model's hindsight log-ratio separates wasted from planned actions."""
    from trial_ray.adapters.registry import load_adapters, make_entries
    from trial_ray.algorithms.startup import warm_start_settings
    from trial_ray.files import finite, make_folder, write_json
    from trial_ray.reports.plots import plot_judgement
    from trial_ray.runs.checkpoints import find_model
    from trial_ray.runs.overrides import override_dataclass
    from trial_ray.warmstart.judgement import judge_model
    from trial_ray.warmstart.policy import recorded_settings

    if args.out:
        make_folder(args.out)
    adapters, model = load_adapters(args.env_adapters), find_model(args.model)
    # Environment, prompts and limits of the run that the model lies in, else those of its warm start.
    config, _ = recorded_config(model, adapters)
    if config is None:
        settings = recorded_settings(model)
    else:
        settings = replace(warm_start_settings(config)[0], chat_template_date=config.chat_template_date)
    # A model that a GPU cloned is judged on a CPU too, unless --set device=cuda asks for one.
    settings = override_dataclass(replace(settings, model_path=str(model), device="cpu"), args.overrides)
    if config is not None:  # whose adapters may be of several environments
        adapters = tuple(each for each in adapters if each.env_id == settings.env)
    (entry,) = make_entries([(settings.env, settings.env_config, 1.0)], adapters)
    judgement = judge_model(settings, entry, args.games, args.demonstrator)
    found = judgement.figures
    title = f"{found['turns']} turns of {found['games']} held-out games, {found['won']} won"
    kinds = ((name, found[name]) for name in ("planned", "wasted", "decisive", "routine"))
    rows = [(name, of["turns"], f"{of['gap']:+.3f}") for name, of in kinds if of["turns"]]
    output().print(table(title, ("turns", "number", "mean gap (nats per token)"), rows))
    show(str(judgement))
    if args.out:
        data = {**found, "of_turns": list(map(asdict, judgement.turns))}
        path = write_json(args.out / "judgement.json", finite(data))
        show(f"written: {path}")
        plot_judgement(data, args.out / "judgement.png")  # needs the extra reports
        show(f"written: {args.out / 'judgement.png'}")
