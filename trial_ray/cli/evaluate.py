"""``trial-ray evaluate CHECKPOINT|oracle`` or ``--endpoint URL``: play an evaluation set and print success by family."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.cli.console import ENV_ADAPTER, SET, command, one_of, option, output, positive, readable, show
from trial_ray.errors import UserInputError
from trial_ray.evaluation.evaluation_sets import SEED, SIZES, evaluation_set_names

if TYPE_CHECKING:
    from trial_ray.adapters.adapter import EnvironmentAdapter
    from trial_ray.adapters.registry import EnvironmentEntry
    from trial_ray.algorithms.config import GRPOConfig
    from trial_ray.evaluation.evaluation_sets import EvaluationSet
    from trial_ray.evaluation.results import EpisodeJournal, EvaluationResult
    from trial_ray.trajectory import EpisodeResult

    Play = Callable[[dict[str, EpisodeResult], Callable[[EpisodeResult], None]], EvaluationResult]

ORACLE = "oracle"
_SIZES = "; ".join(f"{name}: {size or 'all'} tasks" for name, size in SIZES.items())


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f'expected a JSON object such as \'{{"reasoning_effort": "low"}}\', got {text!r}')
    return value


def _endpoint_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("a model behind an OpenAI-compatible chat API")
    for add in (
        option("--endpoint", "play with it, e.g. http://127.0.0.1:8000/v1", "URL"),
        option("--model", "name of the model at the endpoint", "NAME"),
        option("--api-key-env", "environment variable with the key, e.g. OPENAI_API_KEY (default: no key)", "VARIABLE"),
        option("--max-concurrency", "games at once (default: 8)", "N", positive, default=8),
        option("--request-timeout", "seconds for a request (default: 120)", "S", positive, default=120),
        option("--body", "fields added to each request; null removes a field", "JSON", _json_object, default={}),
    ):
        add(group)


@command(
    "success of a checkpoint, an endpoint or the oracle, by family",
    """examples:
  trial-ray evaluate oracle --env trial/ALFWorld-v0 --split valid_seen
  trial-ray evaluate runs/my-run --split valid_unseen --json unseen.json
  trial-ray evaluate runs/my-run/checkpoints/000020 --env trial/ALFWorld-v0 --split generated --episodes 64
  trial-ray evaluate path/to/hf_model --env trial/ALFWorld-v0 --split valid_seen --set engine=transformers
  trial-ray evaluate --endpoint http://127.0.0.1:8000/v1 --model NAME --env trial/ALFWorld-v0 --split valid_seen
  trial-ray evaluate --endpoint https://HOST/v1 --model NAME --api-key-env OPENAI_API_KEY --env trial/ALFWorld-v0 --split valid_seen

CHECKPOINT is a run folder (its newest checkpoint), a checkpoint, a Hugging Face model folder, the URI of one, a name on the model
hub, or package:NAME. A checkpoint inside a run folder is evaluated with the settings that the run had then (prompt, limits,
engine); --set replaces them.
The game data are found through the environment's own rules, or with --set env_config.data=FOLDER.
With --json FILE, finished episodes are kept as they come: the same command continues an evaluation that was interrupted.
--endpoint plays with a model behind an OpenAI-compatible chat API; a CHECKPOINT given too only provides the settings.
Responses are seeded by their tasks: results do not depend on the number of env runners and engines, up to rounding.
""",
    option("policy", "what to evaluate, see below", "CHECKPOINT|oracle", readable(1), nargs="?", default=Path(ORACLE)),
    option("--env", "environment, e.g. trial/ALFWorld-v0 (default: the environment of CHECKPOINT's run)", "ID"),
    option(
        "--split",
        "the environment's split, e.g. valid_seen (default: the split of the evaluation set of CHECKPOINT's run)",
        "NAME",
    ),
    one_of(
        option("--episodes", "play N tasks of the split, always the same", "N", positive),
        option(
            "--panel",
            f"{_SIZES} (default: full); the others are committed lists of 128 tasks of one split",
            choices=evaluation_set_names(),
            default="full",
        ),
    ),
    option("--json", "write every episode as JSON; continues an interrupted evaluation", "FILE", Path),
    _endpoint_arguments,
    ENV_ADAPTER,
    SET,
)
def evaluate(args: Namespace) -> None:
    """Play the episodes that are not in the result file yet, save them, and print the table."""
    from trial_ray.adapters.registry import load_adapters
    from trial_ray.evaluation.endpoint import ChatEndpoint, endpoint_protocol, evaluate_endpoint
    from trial_ray.evaluation.endpoint_server import connect
    from trial_ray.evaluation.evaluation_sets import choose_evaluation_set
    from trial_ray.evaluation.player import evaluate_oracle, oracle_protocol
    from trial_ray.evaluation.results import EpisodeJournal

    if bool(args.endpoint) != bool(args.model):
        raise UserInputError("--endpoint URL and --model NAME belong together; give both or none.")
    policy, adapters = str(args.policy), load_adapters(args.env_adapters)
    config, labels = checkpoint_config(policy, args.env, args.split, args.overrides, adapters)
    (entry,) = config.environment_entries()
    evaluation_set = choose_evaluation_set(entry, args.episodes or args.panel)
    if args.endpoint:
        config.check_evaluation()
        given = ChatEndpoint(args.endpoint, args.model, args.api_key_env, args.request_timeout, args.body)
        endpoint = connect(given, config, entry)
        if endpoint.uncontrolled:
            show(f"the server decides: {', '.join(endpoint.uncontrolled)} (recorded in the protocol, not compared)")
        labels = {"method": "endpoint", "backbone": endpoint.model, "seed": None}
        protocol, weights = (
            endpoint_protocol(config, evaluation_set, entry, endpoint),
            f"{endpoint.model} at {endpoint.url}",
        )
        play: Play = partial(evaluate_endpoint, evaluation_set, entry, config, endpoint, args.max_concurrency)
    elif policy == ORACLE:
        if config.model_path is not None:
            raise UserInputError(f"The oracle plays without a model. Name {config.model_path} in place of {ORACLE}.")
        protocol, weights, play = (
            oracle_protocol(evaluation_set, entry),
            "",
            partial(evaluate_oracle, evaluation_set, entry),
        )
    else:
        protocol, weights, play = _checkpoint_player(config, evaluation_set, entry, policy, args.verbose)
    with EpisodeJournal(args.json, protocol, weights) as journal:
        result = journal.result
        if result is not None:
            show(f"nothing was played: {args.json} has this evaluation")
        else:
            with _episode_bar(len(evaluation_set), journal) as on_episode:
                result = play(journal.episodes, on_episode)
            result.weights, result.labels = weights, labels
            journal.finish(result)
    output().print(result.table(title=f"{result.policy} · {result.protocol['env']} · {result.protocol['split']}"))
    if args.json:
        show(f"episodes: {args.json}")


def _checkpoint_player(
    config: GRPOConfig, evaluation_set: EvaluationSet, entry: EnvironmentEntry, policy: str, verbose: bool
) -> tuple[dict[str, Any], str, Play]:
    """Load a model; return the protocol, the checksum of the weights, and the function that plays the evaluation set."""
    from trial_ray.algorithms.startup import initial_policy
    from trial_ray.engines.requirements import require_engine
    from trial_ray.evaluation.player import Evaluator, policy_protocol
    from trial_ray.runs.ray_session import ray_session

    config.validate()
    require_engine(config.engine, config.num_gpus_per_engine)
    config.rl_module(model_path=initial_policy(config), warm_start=None)  # --set may have named a model on the hub
    config.fix_date()
    evaluator = Evaluator(config)

    def play(known: dict[str, EpisodeResult], on_episode: Callable[[EpisodeResult], None]) -> EvaluationResult:
        with ray_session(verbose), evaluator.playing() as player:
            result = player.play(evaluation_set, entry, known=known, on_episode=on_episode)
        result.policy = policy
        return result

    return policy_protocol(config, evaluation_set, entry), evaluator.weights, play


def recorded_config(model: Path, adapters: Sequence[EnvironmentAdapter]) -> tuple[GRPOConfig | None, dict[str, Any]]:
    """Return the recorded config of a model's run at the model's iteration, and the labels for tables: method, backbone and seed
    of the run, and the checkpoint's iteration; ``(None, {})`` if the model is not in a run folder."""
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
    """Return the config for the evaluation of a checkpoint.

    If the checkpoint is in a run folder, the config has the settings of the run at the checkpoint's iteration. For
    :data:`ORACLE` it has no model.

    Args:
        checkpoint: a run folder, a checkpoint, a model folder, or :data:`ORACLE`.
        env: the environment's id; ``None``: the environment of the run.
        split: the environment's split; ``None``: the split of the run's evaluation set.
        overrides: ``key=value`` overrides of other settings.
        adapters: the user's environment adapters.

    Returns:
        The config, and the labels for tables as in :func:`recorded_config`.

    Raises:
        UserInputError: ``env`` is ``None``, but the checkpoint is not in a run with a single environment; or ``split`` is
            ``None``, but the checkpoint is not in a run with an evaluation set for ``env``.
    """
    from trial_ray.adapters.registry import find_spec
    from trial_ray.algorithms.methods import new_config, with_method
    from trial_ray.runs.checkpoints import find_model
    from trial_ray.runs.overrides import apply_overrides

    env = env and find_spec(env).id  # imports the module in front of it, which the run's record cannot ask for
    model = None if checkpoint == ORACLE else find_model(checkpoint)
    recorded, labels = recorded_config(model, adapters) if model else (None, {})
    config = with_method(recorded or new_config("grpo"), "grpo")  # nothing is trained, so no method needs anything
    sets = config.evaluation_entries()
    entries = sets or config.environment_entries()
    known = {entry.env_id: entry for entry in reversed(entries)}
    if env is None:
        if len(known) != 1:
            found = f"its run plays {', '.join(sorted(known))}" if known else "it is not part of a run"
            raise UserInputError(f"Choose the environment of {checkpoint} with --env ID: {found}.")
        (env,) = known
    if sum(entry.env_id == env for entry in entries) > 1 and not any(
        each.startswith("env_config") for each in overrides
    ):
        raise UserInputError(
            f"The run of {checkpoint} plays {env} with several keyword arguments. Choose them with --set env_config={{...}}."
        )
    played = known.get(env)
    if split is None:
        if played is None or not sets:
            raise UserInputError(
                f"Choose a split with --split NAME: {checkpoint} is not part of a run with an evaluation set for {env}."
            )
        split = played.split
    trained = {entry.env_id: entry for entry in reversed(config.environment_entries())} if recorded else {}
    own = [adapter for adapter in adapters if adapter.env_id == env] if recorded else adapters
    if env in trained:
        # environment() would replace settings of the run that equal the class's by the adapter's defaults.
        config.env, config.environments, config.adapters = env, (), tuple(own)
    else:
        config.environment(env, adapter=own)
    source = played or trained.get(env)
    config.env_config = {**(source.config if source else {}), "split": split}
    config.rl_module(model_path=str(model) if model else None, warm_start=None)
    config.evaluation(evaluation_split=split, evaluation_env_config={}, evaluation_seed=SEED)
    config.recording(trajectories_folder=None)
    config.training(teacher_context=None, teacher_sync_iterations=None)
    config = apply_overrides(config, overrides)
    config.env_config = {"split": split, **config.env_config}  # --set env_config={…} replaces all of it
    # Another model than the run's is no method's result.
    return config, labels if model is None or config.model_path == str(model) else {}


@contextmanager
def _episode_bar(total: int, journal: EpisodeJournal) -> Iterator[Callable[[EpisodeResult], None]]:
    """Show a progress bar on a terminal, else a line for every tenth of the episodes; yield the function to call per episode."""
    from rich.progress import Progress

    console = output()
    if journal.episodes:
        show(f"continuing: {len(journal.episodes)} of {total} episodes are known")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def on_episode(episode: EpisodeResult) -> None:
            journal.add(episode)
            done = len(journal.episodes)
            text = f"{done} of {total} episodes"  # not how many are won: these end first
            progress.update(task, completed=done, description=text)
            if not console.is_terminal and done * 10 // total > (done - 1) * 10 // total:
                show(text)

        yield on_episode
