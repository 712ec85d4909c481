"""``trial-ray evaluate``: plays an evaluation set or, with ``--hindsight``, measures a model's hindsight log-ratio."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.algorithms.methods import new_config, with_method
from trial_ray.cli.console import (
    ENV_ADAPTER,
    SET,
    Suggested,
    command,
    flag,
    group,
    option,
    output,
    positive,
    print_table,
    readable,
)
from trial_ray.errors import UserInputError
from trial_ray.evaluation.evaluation_sets import (
    NAMED_PROTOCOLS,
    SEED,
    SIZES,
    EvaluationSet,
    choose_evaluation_set,
    evaluation_set_names,
    find_protocol,
)
from trial_ray.files import Json, finite, make_folder, write_json
from trial_ray.progress import progress_bar
from trial_ray.runs.checkpoints import find_model, find_run
from trial_ray.runs.experiment import apply_overrides, override_dataclass
from trial_ray.runs.terminal import show

if TYPE_CHECKING:
    from trial_ray.adapters.registry import EnvironmentEntry
    from trial_ray.algorithms.grpo import GRPOConfig
    from trial_ray.evaluation.player import Known
    from trial_ray.trajectory import EpisodeResult, Trajectory

    Play = Callable[[Known, Callable[[EpisodeResult], None]], object]
    from trial_ray.adapters.adapter import EnvironmentAdapter

ORACLE = "oracle"
SCRIPTED = (ORACLE, "expert")
"""Players without a model: the environment's own solutions, and the scripted expert of the environment's adapter."""
RECORDED_EVALUATION = "evaluation.json"
"""File with an evaluation's results and its evaluation protocol, in the folder that ``--record`` names."""


def recorded_config(model: Path, adapters: Sequence[EnvironmentAdapter]) -> tuple[GRPOConfig | None, Json]:
    """Return the config of a model's run at the iteration of the model's checkpoint, and labels for tables.

    The labels are method, backbone and seed of the run, and the checkpoint's iteration. The result is ``(None, {})`` if the
    model is not in a run folder.
    """
    from trial_ray.runs.config_record import load_method, load_record, run_labels

    run_folder, iteration = find_run(model)
    if run_folder is None:
        return None, {}
    record = run_folder / "resolved_config.json"
    config = load_record(record, adapters, iteration=iteration)
    trained = {} if iteration is None else {"iteration": iteration}
    return config, {**run_labels(config), "method": load_method(record), **trained}


def checkpoint_config(
    checkpoint: str,
    env: str | None,
    split: str | None,
    overrides: list[str],
    adapters: Sequence[EnvironmentAdapter] = (),
) -> tuple[GRPOConfig, Json]:
    """Return the config for the evaluation of a checkpoint.

    If the checkpoint is in a run folder, the config has the settings of the run at the checkpoint's iteration. For a player in
    :data:`SCRIPTED`, the config has no model.

    Args:
        checkpoint: a run folder, a checkpoint, a model folder, or a name in :data:`SCRIPTED`.
        env: the environment's id, or ``None`` for the environment of the run.
        split: the environment's split, or ``None`` for the split of the run's evaluation set.
        overrides: ``key=value`` overrides of other settings.
        adapters: the user's environment adapters.

    Returns:
        The config, and the labels for tables as in :func:`recorded_config`.

    Raises:
        UserInputError: ``env`` is ``None``, but the checkpoint is not in a run with a single environment; or ``split`` is
            ``None``, but the checkpoint is not in a run with an evaluation set for ``env``.
    """
    from trial_ray.adapters.registry import find_spec

    # find_spec() imports MODULE if the id is MODULE:ID, so such an id must be from the user, not from a file.
    env = env and find_spec(env).id
    model = None if checkpoint in SCRIPTED else find_model(checkpoint)
    recorded, labels = recorded_config(model, adapters) if model else (None, {})
    # Use GRPO's config: the requirements of other methods matter only in training.
    config = with_method(recorded or new_config("grpo"), "grpo")
    evaluated, trained = config.evaluation_entries(), config.environment_entries()
    entries = evaluated or trained
    by_id = {entry.env_id: entry for entry in reversed(entries)}
    if env is None:
        if len(by_id) != 1:
            environments = f"its run plays {', '.join(sorted(by_id))}" if by_id else "it is not part of a run"
            raise UserInputError(f"Choose the environment of {checkpoint} with --env ID: {environments}.")
        (env,) = by_id
    several = sum(entry.env_id == env for entry in entries) > 1
    if several and not any(override.startswith("env_config") for override in overrides):
        raise UserInputError(
            f"The run of {checkpoint} plays {env} with several keyword arguments. Choose them with --set env_config={{...}}."
        )
    if split is None:
        if env not in by_id or not evaluated:
            raise UserInputError(
                f"Choose a split with --split NAME: {checkpoint} is not part of a run with an evaluation set for {env}."
            )
        split = by_id[env].split
    source = by_id.get(env) or next((entry for entry in trained if entry.env_id == env), None)
    own = [adapter for adapter in adapters if adapter.env_id == env] if recorded else adapters
    if source:  # The run plays this environment: evaluation_entries() are among environment_entries().
        # Do not call environment(): it would replace each setting of the run that equals GRPO's default by the adapter's default.
        config.env, config.environments, config.adapters = env, (), tuple(own)
    else:
        config.environment(env, adapter=own)
    config.env_config = {**(source.config if source else {}), "split": split}
    config.rl_module(model_path=str(model) if model else None, warm_start=None)
    config.evaluation(evaluation_split=split, evaluation_env_config={}, evaluation_seed=SEED)
    config.recording(trajectories_folder=None)
    config.training(teacher_context=None, teacher_model=None, teacher_sync_iterations=None)
    config = apply_overrides(config, overrides)
    config.env_config = {"split": split, **config.env_config}  # --set env_config={…} may have dropped the split.
    # The labels describe the run's model, so they do not apply to a model that --set names.
    return config, labels if model is None or config.model_path == str(model) else {}


_SIZES = "; ".join(f"{name}: {size or 'all'} tasks" for name, size in SIZES.items())


def _json_object(text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f'expected a JSON object such as \'{{"reasoning_effort": "low"}}\', got {text!r}')
    return value


def _number_or_name(text: str) -> int | str:
    return positive(text) if text.isdecimal() else text


@command(
    "success of a checkpoint, an endpoint, the oracle or the expert, by family",
    """examples:
  trial-ray evaluate oracle --env trial/ALFWorld-v0 --split valid_seen
  trial-ray evaluate runs/my-run --split valid_unseen --json unseen.json
  trial-ray evaluate runs/my-run --env trial/ALFWorld-v0 --protocol sdar
  trial-ray evaluate runs/my-run/checkpoints/000020 --env trial/ALFWorld-v0 --split generated --tasks 64
  trial-ray evaluate path/to/hf_model --env trial/ALFWorld-v0 --split valid_seen --set engine=transformers
  trial-ray evaluate --endpoint http://127.0.0.1:8000/v1 --model NAME --env trial/ALFWorld-v0 --split valid_seen
  trial-ray evaluate --endpoint https://HOST/v1 --model NAME --api-key-env OPENAI_API_KEY --env trial/ALFWorld-v0 --split valid_seen
  trial-ray evaluate models/start --hindsight --json hindsight.json

CHECKPOINT is a run folder (its newest checkpoint), a checkpoint, a Hugging Face model folder, the URI of one, a name on the model
hub, or package:NAME. `oracle` replays the environment's solutions, `expert` plays as the demonstrator of its adapter does. A
checkpoint inside a run folder is evaluated with the settings that the run had then (prompt, limits, engine); --set replaces them.
The game data are found through the environment's own rules, or with --set env_config.data=FOLDER.
With --json FILE or --record DIR, finished episodes are kept as they come: the same command continues an evaluation that was
interrupted.
--endpoint plays with a model behind an OpenAI-compatible chat API; a CHECKPOINT given too only provides the settings.
Responses are seeded by their tasks: results do not depend on the number of env runners and engines, up to rounding.

--hindsight measures instead whether the hindsight log-ratio (Eq. 4) of the model separates wasted from planned actions, in held-out
games of a warm start. Without such a signal TRIAL has nothing to learn from: measure it before a long run. A model of a run or
of `trial-ray sft --from expert` plays with the settings that made it; --set changes fields of
trial_ray.warmstart.WarmStartSettings.
""",
    option(
        "policy",
        "what to evaluate, see below",
        "CHECKPOINT|oracle|expert",
        readable(1),
        nargs="?",
        default=Path(ORACLE),
    ),
    option("--env", "environment, e.g. trial/ALFWorld-v0 (default: the environment of CHECKPOINT's run)", "ID"),
    option(
        "--split",
        "the environment's split, e.g. valid_seen (default: the split of the evaluation set of CHECKPOINT's run)",
        "NAME",
    ),
    option(
        "--tasks",
        f"N tasks of the split, always the same, or an evaluation set ({_SIZES}; the others are committed lists of 128 tasks of "
        "one split; default: full); with --hindsight N held-out games (default: 192)",
        "N|NAME",
        _number_or_name,
        choices=Suggested(evaluation_set_names()),
    ),
    option(
        "--protocol",
        f"split, tasks and settings of a published evaluation of --env ({', '.join(NAMED_PROTOCOLS)}); --split, --tasks and --set "
        "replace single ones",
        "NAME",
        choices=Suggested(NAMED_PROTOCOLS),
    ),
    option(
        "--rollouts",
        "play each task K times with other seeds; the table then has pass@1 to pass@K (default: 1)",
        "K",
        positive,
        default=1,
    ),
    option(
        "--json",
        "write every episode as JSON; continues an interrupted evaluation. With --hindsight write every turn, and a plot as .png",
        "FILE",
        Path,
    ),
    group(
        "the hindsight signal before training",
        flag("--hindsight", "measure whether hindsight separates wasted from planned actions, see below"),
        option(
            "--demonstrator",
            "let the demonstrator play, with probability P another action than the one it planned, and the model only score the "
            "turns: for a model that cannot play yet",
            "P",
            float,
        ),
    ),
    group(
        "a model behind an OpenAI-compatible chat API",
        option("--endpoint", "play with it, e.g. http://127.0.0.1:8000/v1", "URL"),
        option("--model", "name of the model at the endpoint", "NAME"),
        option("--api-key-env", "environment variable with the key, e.g. OPENAI_API_KEY (default: no key)", "VARIABLE"),
        option("--max-concurrency", "games at once (default: 8)", "N", positive, default=8),
        option("--request-timeout", "seconds for a request (default: 120)", "S", positive, default=120),
        option("--body", "fields added to each request; null removes a field", "JSON", _json_object, default={}),
    ),
    option(
        "--record",
        "record every episode with its prompts and responses in a new folder, which `inspect`, `export` and `sft` read; continues "
        "an interrupted evaluation",
        "DIR",
        Path,
    ),
    ENV_ADAPTER,
    SET,
)
def evaluate(args: Namespace) -> None:
    """Play the episodes of an evaluation that its result file does not contain, save them, and print a table of the results."""
    from trial_ray.adapters.registry import load_adapters
    from trial_ray.evaluation.player import ExpertPlayer, WalkthroughPlayer, evaluate_scripted, scripted_protocol
    from trial_ray.evaluation.results import EpisodeJournal, EvaluationResult, protocol_card
    from trial_ray.rollout.recording import write_episode
    from trial_ray.runs.folder import RunFolder

    if bool(args.endpoint) != bool(args.model):
        raise UserInputError("--endpoint URL and --model NAME belong together; give both or none.")
    if args.hindsight:
        if args.record:
            raise UserInputError(
                "--record keeps the episodes of an evaluation; --hindsight writes its turns with --json FILE."
            )
        measure_hindsight(args)
        return
    if args.demonstrator is not None:
        raise UserInputError("--demonstrator P plays the games of --hindsight; give --hindsight with it.")
    policy, adapters = str(args.policy), load_adapters(args.env_adapters)
    if args.protocol:
        named = find_protocol(args.protocol, args.env)
        show(f"protocol: {named.source}")
        args.split, args.tasks = args.split or named.split, args.tasks or named.tasks
        args.overrides = [*named.overrides, *args.overrides]
    config, labels = checkpoint_config(policy, args.env, args.split, args.overrides, adapters)
    (entry,) = config.environment_entries()
    evaluation_set = replace(choose_evaluation_set(entry, args.tasks or "full"), rollouts=args.rollouts)
    if args.rollouts > 1 and policy in SCRIPTED and not args.endpoint:
        raise UserInputError(f"The {policy} plays a task once, without sampling: leave out --rollouts.")
    recording = RunFolder.of_recording(args.record, config, sys.argv) if args.record else None
    record = partial(write_episode, recording.trajectories) if recording else lambda trajectory: None
    try:
        if args.endpoint:
            protocol, weights, play = _endpoint_player(args, config, evaluation_set, entry, record)
            name, labels = args.model, {"method": "endpoint", "backbone": args.model, "seed": None}
        elif policy in SCRIPTED:
            if config.model_path is not None:
                raise UserInputError(
                    f"The {policy} plays without a model. Name {config.model_path} in place of {policy}."
                )
            oracle = policy == ORACLE
            scripted: type[WalkthroughPlayer | ExpertPlayer] = WalkthroughPlayer if oracle else ExpertPlayer
            name = scripted.name
            protocol, weights = scripted_protocol(evaluation_set, entry), "" if oracle else policy
            play = partial(evaluate_scripted, scripted, evaluation_set, entry, record=record)
        else:
            name = policy
            protocol, weights, play = _checkpoint_player(config, evaluation_set, entry, args.verbose)
        file: Path | None = args.json or (recording.path / RECORDED_EVALUATION if recording else None)
        with EpisodeJournal(file, protocol, weights, lambda: recording is None or recording.is_unused) as journal:
            result = journal.result
            if result is not None:
                show(f"nothing was played: {file} has this evaluation")
            else:
                if journal.episodes:
                    show(f"continuing: {len(journal.episodes)} of {len(evaluation_set)} tasks are known")
                with progress_bar("tasks", len(evaluation_set)) as update:

                    def on_episode(episode: EpisodeResult) -> None:
                        journal.add(episode)
                        update(len(journal.episodes))

                    play(journal.episodes, on_episode)
                played = [episode for task in evaluation_set.task_ids for episode in journal.episodes[task]]
                result = EvaluationResult(protocol, played, name, weights, labels)
                journal.finish(result)
    except BaseException:
        if recording is not None and recording.is_unused:
            recording.remove()  # The folder has no episodes; without it, --record may name the same path again.
        raise
    output().print(result.table(title=f"{result.policy} · {result.protocol['env']} · {result.protocol['split']}"))
    for title, text in protocol_card(result).items():
        show(f"{title:<14}{text}")
    if recording is not None:
        recording.set_state("done")
        show(f"recorded: {recording.path}")
    if args.json:
        show(f"episodes: {args.json}")


def _endpoint_player(
    args: Namespace,
    config: GRPOConfig,
    evaluation_set: EvaluationSet,
    entry: EnvironmentEntry,
    record: Callable[[Trajectory], None],
) -> tuple[Json, str, Play]:
    """Connect to an endpoint; return the evaluation's protocol, the model's name, and the function that plays the tasks."""
    from trial_ray.evaluation.endpoint import ChatEndpoint, connect, endpoint_protocol, evaluate_endpoint

    config.check_evaluation()
    endpoint = ChatEndpoint(args.endpoint, args.model, args.api_key_env, args.request_timeout, args.body)
    endpoint = connect(endpoint, config, entry)
    if endpoint.uncontrolled:
        show(f"the server decides: {', '.join(endpoint.uncontrolled)} (recorded in the protocol, not compared)")
    protocol = endpoint_protocol(config, evaluation_set, entry, endpoint)
    play = partial(evaluate_endpoint, evaluation_set, entry, config, endpoint, args.max_concurrency, record=record)
    return protocol, f"{endpoint.model} at {endpoint.url}", play


def _checkpoint_player(
    config: GRPOConfig, evaluation_set: EvaluationSet, entry: EnvironmentEntry, verbose: bool
) -> tuple[Json, str, Play]:
    """Load a model; return the evaluation's protocol, the weights' checksum, and the function that plays the evaluation set."""
    from trial_ray.algorithms.startup import initial_policy
    from trial_ray.engines.requirements import require_engine
    from trial_ray.evaluation.player import Evaluator, play_evaluation_set, policy_protocol
    from trial_ray.runs.ray_session import ray_session

    config.validate()
    require_engine(config.engine, config.num_gpus_per_engine)
    config.rl_module(model_path=initial_policy(config), warm_start=None)  # --set may name a model on the hub.
    config.fix_date()
    evaluator = Evaluator(config)

    def play(known: Known, on_episode: Callable[[EpisodeResult], None]) -> None:
        with ray_session(verbose), evaluator.playing() as pool:
            recorded = config.trajectories_folder is not None
            play_evaluation_set(config, pool, evaluation_set, entry, known, on_episode, recorded=recorded)

    return policy_protocol(config, evaluation_set, entry), evaluator.weights, play


def measure_hindsight(args: Namespace) -> None:
    """Measure whether a model's hindsight log-ratio distinguishes planned from wasted actions, print the result and save it.

    An action is planned if the expert could have chosen it, and otherwise wasted.
    """
    from trial_ray.adapters.registry import load_adapters, make_entries
    from trial_ray.algorithms.startup import warm_start_settings
    from trial_ray.reports.plots import plot_agreement
    from trial_ray.warmstart.agreement import measure_agreement
    from trial_ray.warmstart.policy import recorded_settings

    if args.endpoint or args.split or args.protocol or isinstance(args.tasks, str) or str(args.policy) in SCRIPTED:
        raise UserInputError(
            "--hindsight plays held-out games of a warm start with a model: name a checkpoint or a model folder, give the number "
            "of games with --tasks N, and leave out --split, --protocol and --endpoint."
        )
    if args.json:
        make_folder(args.json.parent)
        if args.json.exists():
            raise UserInputError(f"{args.json} exists. Name another file, or delete this one to measure again.")
    adapters, model = load_adapters(args.env_adapters), find_model(args.policy)
    config, _ = recorded_config(model, adapters)
    if config is None:
        settings = recorded_settings(model)
    else:  # Take environment, prompts and limits from the run's config.
        settings = replace(warm_start_settings(config)[0], chat_template_date=config.chat_template_date)
    overrides = [f"env={args.env}", *args.overrides] if args.env else args.overrides
    # A model whose warm start ran on a GPU is also evaluated on the CPU, unless --set device=cuda is given.
    settings = override_dataclass(replace(settings, model_path=str(model), device="cpu"), overrides)
    if config is not None:  # Drop adapters of the run's other environments, which make_entries() would reject.
        adapters = tuple(adapter for adapter in adapters if adapter.env_id == settings.env)
    (entry,) = make_entries([(settings.env, settings.env_config, 1.0)], adapters)
    agreement = measure_agreement(settings, entry, args.tasks, args.demonstrator)
    figures = agreement.figures
    title = f"{figures['turns']} turns of {figures['games']} held-out games, {figures['won']} won"
    kinds = ((name, figures[name]) for name in ("planned", "wasted", "decisive", "routine"))
    rows = [(name, kind["turns"], f"{kind['gap']:+.3f}") for name, kind in kinds if kind["turns"]]
    print_table(title, ("turns", "number", "mean gap (nats per token)"), rows)
    show(str(agreement))
    if args.json:
        show(f"written: {write_json(args.json, finite(agreement.to_dict()))}")
        picture = args.json.with_suffix(".png")
        plot_agreement(agreement.to_dict(), picture)  # Plots need matplotlib, from the extra "reports".
        show(f"written: {picture}")
