"""``trial-ray evaluate CHECKPOINT|oracle`` or ``--endpoint URL``: play an evaluation set and print success by family."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.cli import console as terminal
from trial_ray.errors import UserInputError
from trial_ray.evaluation.panels import SEED, SIZES, panel_names

if TYPE_CHECKING:
    from rich.console import Console

    from trial_ray.algorithms.config import GRPOConfig
    from trial_ray.environments.adapter import EnvironmentAdapter
    from trial_ray.environments.registry import EnvironmentEntry
    from trial_ray.evaluation.panels import Panel
    from trial_ray.evaluation.results import EpisodeJournal, EvaluationResult
    from trial_ray.rollout.trajectory import EpisodeResult

ORACLE = "oracle"
HELP = "success of a checkpoint, an endpoint or the oracle, by family"
EPILOG = """examples:
  trial-ray evaluate oracle --env trial/ALFWorld-v0 --split valid_seen
  trial-ray evaluate runs/my-run --split valid_unseen --json unseen.json
  trial-ray evaluate runs/my-run/checkpoints/000020 --env trial/ALFWorld-v0 --split generated --episodes 64
  trial-ray evaluate path/to/hf_model --env trial/ALFWorld-v0 --split valid_seen --set engine=transformers
  trial-ray evaluate --endpoint http://127.0.0.1:8000/v1 --model NAME --env trial/ALFWorld-v0 --split valid_seen
  trial-ray evaluate --endpoint https://HOST/v1 --model NAME --api-key-env OPENAI_API_KEY --env trial/ALFWorld-v0 --split valid_seen

CHECKPOINT is a run folder (its newest checkpoint), a checkpoint, a Hugging Face model folder, the URI of one, or package:NAME. A
checkpoint inside a run folder is evaluated with the settings that the run had then (prompt, limits, engine); --set replaces them.
The game data are found through the environment's own rules, or with --set env_config.data=FOLDER.
With --json FILE, finished episodes are kept as they come: the same command continues an evaluation that was interrupted.
--endpoint plays with a model behind an OpenAI-compatible chat API; a CHECKPOINT beside it gives the settings alone.
Responses are sampled with seeds that follow from the tasks, so env runners and engines may be as many as you like.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "policy",
        type=terminal.readable(1, str),
        nargs="?",
        default=ORACLE,
        metavar="CHECKPOINT|oracle",
        help="what to evaluate, see below",
    )
    parser.add_argument(
        "--env", metavar="ID", help="environment, e.g. trial/ALFWorld-v0 (default: that of CHECKPOINT's run)"
    )
    parser.add_argument(
        "--split",
        metavar="NAME",
        help="the environment's split, e.g. valid_seen (default: that of the evaluation set of CHECKPOINT's run)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--episodes", type=terminal.positive, metavar="N", help="play N tasks of the split, always the same"
    )
    sizes = "; ".join(f"{name}: {size or 'all'} tasks" for name, size in SIZES.items())
    size.add_argument(
        "--panel",
        choices=panel_names(),
        default="full",
        help=f"{sizes} (default: full); the others are committed lists of 128 tasks of one split",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every episode as JSON; continue where it is cut"
    )
    _add_endpoint_arguments(parser.add_argument_group("a model behind an OpenAI-compatible chat API"))
    terminal.add_options(parser, "--env-adapter", "--set")


def _add_endpoint_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--endpoint", metavar="URL", help="play with it, e.g. http://127.0.0.1:8000/v1")
    group.add_argument("--model", metavar="NAME", help="the name that the endpoint knows the model by")
    group.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        help="environment variable with the key, e.g. OPENAI_API_KEY (default: no key)",
    )
    group.add_argument("--games", type=terminal.positive, default=8, metavar="N", help="games at once (default: 8)")
    group.add_argument(
        "--request-timeout",
        type=terminal.positive,
        default=120,
        metavar="S",
        help="seconds for a request (default: 120)",
    )
    group.add_argument(
        "--body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="fields added to each request; null leaves one out",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'expected a JSON object such as \'{{"reasoning_effort": "low"}}\'; found {text!r}'
        )
    return value


def run(args: argparse.Namespace) -> int:
    """Evaluate; see the module's docstring."""
    console = terminal.output()
    result = evaluate(args, console)
    console.print(result.table(title=f"{result.policy} · {result.protocol['env']} · {result.protocol['split']}"))
    if args.json:
        terminal.show(f"episodes: {args.json}")
    return terminal.DONE


def evaluate(args: argparse.Namespace, console: Console) -> EvaluationResult:
    """Play what is not known yet: replay walkthroughs, or load the model into the engines."""
    from trial_ray.algorithms.initial_policy import initial_policy
    from trial_ray.engines.pool import require_engine
    from trial_ray.environments.registry import load_adapters
    from trial_ray.evaluation.panels import choose_panel
    from trial_ray.evaluation.player import Evaluator, evaluate_oracle, oracle_protocol, policy_protocol
    from trial_ray.evaluation.results import EpisodeJournal
    from trial_ray.runs.ray_session import ray_session

    if bool(args.endpoint) != bool(args.model):
        raise UserInputError("--endpoint URL and --model NAME belong together; give both or none.")
    adapters = load_adapters(args.env_adapters)
    config, labels = checkpoint_config(str(args.policy), args.env, args.split, args.overrides, adapters)
    (entry,) = config.environment_entries()
    panel = choose_panel(entry, args.episodes or args.panel)
    if args.endpoint:
        return _evaluate_endpoint(args, console, config, entry, panel)
    if args.policy == ORACLE:
        with EpisodeJournal(args.json, oracle_protocol(panel, entry), weights="") as journal:
            if journal.result is not None:
                return journal.result
            with episode_bar(console, len(panel), journal) as on_episode:
                result = evaluate_oracle(panel, entry, journal.episodes, on_episode)
            journal.finish(result)
        return result
    config.validate()
    require_engine(config.engine, config.num_gpus_per_engine)
    config.rl_module(model_path=initial_policy(config), warm_start=None)  # --set may have named a model on the hub
    config.fix_date()
    evaluator = Evaluator(config)
    with EpisodeJournal(args.json, policy_protocol(config, panel, entry), evaluator.weights) as journal:
        if journal.result is not None:
            return journal.result
        bar = episode_bar(console, len(panel), journal)
        with ray_session(args.verbose), evaluator.playing() as player, bar as on_episode:
            result = player.play(panel, entry, known=journal.episodes, on_episode=on_episode)
        result.policy, result.weights, result.labels = str(args.policy), evaluator.weights, labels
        journal.finish(result)
    return result


def _evaluate_endpoint(
    args: argparse.Namespace, console: Console, config: GRPOConfig, entry: EnvironmentEntry, panel: Panel
) -> EvaluationResult:
    from trial_ray.evaluation.endpoint import ChatEndpoint, endpoint_protocol, evaluate_endpoint
    from trial_ray.evaluation.results import EpisodeJournal

    config.check_evaluation()
    endpoint = ChatEndpoint(args.endpoint, args.model, args.api_key_env, args.request_timeout, args.body)
    weights = f"{endpoint.model} at {endpoint.url}"
    with EpisodeJournal(args.json, endpoint_protocol(config, panel, entry, endpoint), weights) as journal:
        if journal.result is not None:
            return journal.result
        with episode_bar(console, len(panel), journal) as on_episode:
            result = evaluate_endpoint(panel, entry, config, endpoint, args.games, journal.episodes, on_episode)
        result.weights, result.labels = weights, {"method": "endpoint", "backbone": endpoint.model, "seed": None}
        journal.finish(result)
    return result


def recorded_config(model: Path, adapters: Sequence[EnvironmentAdapter]) -> tuple[GRPOConfig | None, dict[str, Any]]:
    """The config that the run in which a model lies had in its iteration, and what tables sort by: method, backbone and seed of
    the run, and the checkpoint's iteration; of a model outside of runs nothing."""
    from trial_ray.runs.checkpoints import checkpoint_iteration, find_run_folder
    from trial_ray.runs.config_record import load_method, load_record, run_labels

    if (run_folder := find_run_folder(model)) is None:
        return None, {}
    record, iteration = run_folder / "resolved_config.json", checkpoint_iteration(model, run_folder)
    config = load_record(record, adapters, iteration=iteration)
    trained = {} if iteration is None else {"iteration": iteration}
    return config, {**run_labels(config), "method": load_method(record), **trained}


def checkpoint_config(
    checkpoint: str,
    env: str | None,
    split: str | None,
    overrides: list[str],
    adapters: Sequence[EnvironmentAdapter] = (),
) -> tuple[GRPOConfig, dict[str, Any]]:
    """The config that plays a checkpoint's model, with the settings that the run which it lies in, if any, had in its iteration;
    for :data:`ORACLE` without a model.

    Args:
        checkpoint: a run folder, a checkpoint, a model's folder, or :data:`ORACLE`.
        env: the environment's id; ``None``: that of the run.
        split: the environment's split; ``None``: that of the run's evaluation set.
        overrides: ``key=value`` each, of other settings.
        adapters: those of the user's.

    Returns:
        The config, and what tables sort by, as :func:`recorded_config`.

    Raises:
        UserInputError: ``env`` is ``None``, but there is no run, or one of several environments; ``split`` is ``None``, but there
            is no run with an evaluation set in ``env``.
    """
    from trial_ray.algorithms.methods import new_config, with_method
    from trial_ray.environments.registry import find_spec
    from trial_ray.runs.checkpoints import find_model
    from trial_ray.runs.overrides import apply_overrides

    if env is not None:
        env = find_spec(env).id  # imports the module in front of it, which the run's record cannot ask for
    model = None if checkpoint == ORACLE else find_model(checkpoint)
    recorded, labels = recorded_config(model, adapters) if model else (None, {})
    config = with_method(recorded or new_config("grpo"), "grpo")  # nothing is trained, so no method needs anything
    evaluated = config.evaluation_entries()
    entries = evaluated or config.environment_entries()
    ids = sorted({entry.env_id for entry in entries})
    if env is None:
        if len(ids) != 1:
            found = f"its run plays {', '.join(ids)}" if ids else "it belongs to no run"
            raise UserInputError(f"Name the environment that {checkpoint} shall play with --env ID; {found}.")
        env = ids[0]
    played = next((entry for entry in entries if entry.env_id == env), None)
    if split is None:
        if played is None or not evaluated:
            raise UserInputError(
                f"Name the split that {checkpoint} shall play with --split NAME; it belongs to no run with an evaluation set in "
                f"{env}."
            )
        split = played.split
    config.environment(env, adapter=adapters)
    config.env_config = {**(played.config if played else {}), "split": split}
    config.rl_module(model_path=str(model) if model else None, warm_start=None)
    config.evaluation(evaluation_split=split, evaluation_env_config={}, evaluation_seed=SEED)
    config.recording(trajectories_folder=None)
    config.training(privileged_view=None, teacher_sync_iterations=None)
    config = apply_overrides(config, overrides)
    config.env_config = {"split": split, **config.env_config}  # --set env_config={…} replaces all of it
    return config, labels


@contextmanager
def episode_bar(console: Console, total: int, journal: EpisodeJournal) -> Iterator[Callable[[EpisodeResult], None]]:
    """A bar over the episodes on a terminal, a line every tenth of them elsewhere; yields what to call for each."""
    from rich.progress import Progress

    if journal.episodes:
        console.print(f"continuing: {len(journal.episodes)} of {total} episodes are known", highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def on_episode(episode: EpisodeResult) -> None:
            journal.add(episode)
            done = len(journal.episodes)
            text = f"{done} of {total} episodes, {sum(known.success for known in journal.episodes.values())} solved"
            progress.update(task, completed=done, description=text)
            if not console.is_terminal and done * 10 // total > (done - 1) * 10 // total:
                console.print(text, highlight=False)

        yield on_episode


EVALUATE = terminal.Command(HELP, EPILOG, add_arguments, run)
