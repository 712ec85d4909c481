"""The learner's passes on the quickstart's rows: tokens forwarded, speed against a plain loop, and whether both agree.

    python benchmarks/bench_update.py --json benchmarks/results/update.json

Rows are those of the quickstart's first iteration (``rollouts.py``). A minibatch has a slice of each of eight shards, as in
published runs on eight devices, and so has parts of all tasks; in a second case, minibatches are taken in task order. The plain
loop (``plain_loop.py``) has the batch size that is fastest on this machine. For SmolLM2-135M, the same prompts and responses are
tokenised with its tokenizer and chat template. Its passes are 300 times as much work, so only whole trajectories of one game are
used, up to ``--smollm2-rows`` rows: as many as a minibatch has of one shard. The note has the share of distinct tokens in these
rows and in the quickstart's minibatches. Times are medians of rounds in which learner and plain loop run in turn. The optimizer's
step, which is the same for both, is not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from learners import BenchLearner, Gradient, Update, counted_tokens, distinct_prefixes, input_ids, relative_difference
from measure import Measure, interleaved, report_parser, seconds_note, seconds_of, speedup, write_report
from plain_loop import PlainLoop
from rollouts import quickstart_config, quickstart_groups
from transformers import AutoModelForCausalLM, AutoTokenizer

from trial_ray.adapters.guarded import StepResult
from trial_ray.learner.rows import scored_turn
from trial_ray.learner.update_plan import plan_update
from trial_ray.models.folders import prepare_smollm2
from trial_ray.models.layout import score_views
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn

MOST_TOKENS = 1.1
"""Maximum number of forwarded input tokens for each token on a distinct prefix."""


@dataclass(frozen=True)
class Case:
    """A model with its rows.

    Attributes:
        name: name of the case in the table.
        model_path: folder of the policy.
        groups: groups to train on.
        least_speedup: target of the speedup against the plain loop.
        largest_gap: maximum difference of the log-probabilities to the plain loop's, in nats.
        budgets: numbers of tokens per batch of the plain loop, of which the fastest is chosen.
        rounds: number of measured rounds.
        training: settings that replace the quickstart's.
        note: note about the rows.
    """

    name: str
    model_path: str
    groups: list[TrajectoryGroup]
    least_speedup: float
    largest_gap: float
    budgets: tuple[int, ...]
    rounds: int
    training: dict[str, Any]
    note: str = ""


def measure(case: Case) -> tuple[list[Measure], dict[str, Any]]:
    config = quickstart_config().rl_module(model_path=case.model_path).training(**case.training)
    learner = BenchLearner(config)
    first = learner.update(case.groups, keep_gradients=True)  # warms up too
    measures = [*tokens_forwarded(case, config, learner, first)]
    budget, loop = fastest_loop(case, config, first)
    measures += agreement(case, first, loop)
    contestants = {"learner": lambda: learner.update(case.groups).seconds, "plain loop": loop.update}
    times = interleaved(contestants, case.rounds, warm_up=False)
    note = f"{seconds_note(times)}; {len(first.rows)} rows, plain batches of {budget:,} tokens{case.note}"
    measures.append(
        Measure(
            f"{case.name}: forward and backward against a plain loop",
            speedup(times, "learner", "plain loop"),
            target=case.least_speedup,
            note=note,
        )
    )
    sequences = [np.concatenate([turn.prompt_ids, turn.response_ids]) for turn in first.rows.turns]
    details = {
        "rows": len(first.rows),
        "tokens": sum(map(len, sequences)),
        "minibatches": len(first.plan.steps),
        "plain_loop_tokens_per_batch": budget,
        "seconds": times,
        "threads": torch.get_num_threads(),
    }
    return measures, details


def tokens_forwarded(case: Case, config: Any, learner: BenchLearner, update: Update) -> list[Measure]:
    table, rows = update.rows, range(len(update.rows))
    views = {"ordinary": table.sequences(rows), "hindsight": table.sequences(rows, hindsight=True)}
    with counted_tokens(learner.lm) as count:
        score_views(learner.lm, views, max_tokens=config.max_tokens_per_forward)
    both, ordinary = (input_ids(table, rows, two_views=each) for each in (True, False))
    scored, distinct, plain = count(), distinct_prefixes(both), sum(map(len, both))
    minibatches = [np.concatenate([each.rows for each in step]) for step in update.plan.steps]
    train_plain = sum(map(len, ordinary))
    train_distinct = sum(distinct_prefixes([ordinary[row] for row in step]) for step in minibatches)
    return [
        Measure(
            f"{case.name}: tokens forwarded / distinct, scoring both views",
            scored / distinct,
            "x",
            MOST_TOKENS,
            "lower",
            note=f"{plain:,} tokens in rows, {distinct:,} distinct, {scored:,} forwarded",
        ),
        Measure(
            f"{case.name}: tokens forwarded / distinct, training",
            update.tokens / train_distinct,
            "x",
            MOST_TOKENS,
            "lower",
            note=f"{train_plain:,} in rows, {train_distinct:,} distinct within minibatches, {update.tokens:,} forwarded",
        ),
    ]


def fastest_loop(case: Case, config: Any, update: Update) -> tuple[int, PlainLoop]:
    # Load the weights into a separate model with transformers' causal SDPA, without the learner's changes.
    lm = AutoModelForCausalLM.from_pretrained(case.model_path, dtype=torch.float32)
    loops = {budget: PlainLoop(lm, update.rows, update.plan, budget, config.temperature) for budget in case.budgets}
    if len(loops) == 1:
        return next(iter(loops.items()))
    # Run each loop twice, because the first run warms up, and compare the faster runs.
    times = {budget: min(loop.update() for _ in range(2)) for budget, loop in loops.items()}
    budget = min(times, key=times.__getitem__)
    return budget, loops[budget]


def agreement(case: Case, update: Update, loop: PlainLoop) -> list[Measure]:
    gap = float((loop.logprobs() - update.rows.logprobs).abs().max())
    expected: list[Gradient] = []
    names = dict(loop.lm.named_parameters())
    loop.update(lambda: expected.append({name: each.grad.clone() for name, each in names.items()}))
    pairs = zip(update.gradients, expected, strict=True)
    difference = max(relative_difference(found, plain) for found, plain in pairs)
    tokens = int(update.rows.lengths.sum())
    return [
        Measure(
            f"{case.name}: largest difference of log-probabilities",
            gap,
            "nats",
            case.largest_gap,
            "lower",
            note=f"old log-probabilities of {tokens:,} response tokens against the plain loop's, float32",
        ),
        Measure(
            f"{case.name}: difference of gradients, relative",
            difference,
            "",
            5e-5,
            "lower",
            note=f"norm of the difference over the norm, the worst of {len(expected)} minibatches",
        ),
    ]


def with_tokenizer_of(folder: Path, model_path: str, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Return groups of the quickstart's model with their prompts and responses in the token ids of the model in ``folder``."""
    old = AutoTokenizer.from_pretrained(model_path)
    new = AutoTokenizer.from_pretrained(folder)
    template = SimpleNamespace(render=lambda context: context.observation)
    builder = PromptBuilder(new, template, max_prompt_tokens=4096, history_window=0)

    def converted(turn: Turn) -> Turn:
        # A prompt of the tiny model is one user message between two special tokens.
        message = old.decode(turn.prompt_ids[1 : turn.insert_at])
        prompt = builder.write(StepResult(message, "", "", (), won=False, score=0.0), ())
        text = old.decode(turn.response_ids, skip_special_tokens=True)
        ids = [*new.encode(text, add_special_tokens=False), new.eos_token_id]
        return replace(
            turn,
            prompt_ids=prompt.ids,
            insert_at=prompt.insert_at,
            response_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
        )

    return [
        TrajectoryGroup(
            group.task_id,
            [replace(each, turns=[converted(turn) for turn in each.turns]) for each in group.trajectories],
        )
        for group in groups
    ]


def one_game(groups: Sequence[TrajectoryGroup], most_rows: int) -> TrajectoryGroup:
    """Return whole trajectories of one game, won and lost ones, with at most ``most_rows`` turns in total."""
    for group in groups:
        chosen: list[Trajectory] = []
        for trajectory in group.completed:
            if sum(len(each.turns) for each in chosen) + len(trajectory.turns) <= most_rows:
                chosen.append(trajectory)
        if len({trajectory.success for trajectory in chosen}) > 1:
            return TrajectoryGroup(group.task_id, chosen)
    raise SystemExit(f"No game has won and lost trajectories within {most_rows} rows; raise --smollm2-rows.")


def distinct_share(groups: Sequence[TrajectoryGroup], config: Any) -> float:
    """Return the share of distinct tokens in the rows of an update's minibatches."""
    played = [trajectory for group in groups for trajectory in group.completed]
    rows = [scored_turn(turn).inputs for trajectory in played for turn in trajectory.turns]
    lengths = iter(map(len, rows))
    tokens = [[next(lengths) for _ in trajectory.turns] for trajectory in played]
    plan = plan_update(tokens, config, 1)
    steps = [[rows[row] for each in step for row in each.rows] for step in plan.steps]
    return sum(distinct_prefixes(step) for step in steps) / sum(map(sum, tokens))


def cases(names: Sequence[str], smollm2_rows: int) -> list[Case]:
    model_path, groups = quickstart_groups()
    found = []
    if "quickstart" in names:
        budgets = (1024, 2048, 4096, 8192)
        found.append(Case("quickstart", model_path, groups, 1.3, 1e-5, budgets, rounds=5, training={}))
        found.append(
            replace(
                found[-1], name="quickstart, minibatches of whole tasks", budgets=(4096,), training={"batch_shards": 1}
            )
        )
    if "smollm2" in names:
        folder = prepare_smollm2()
        groups = with_tokenizer_of(folder, model_path, groups)
        game, config = [one_game(groups, smollm2_rows)], quickstart_config()
        shares = distinct_share(game, config), distinct_share(groups, config)
        note = f"; distinct are {shares[0]:.2f} of the tokens here, {shares[1]:.2f} in the quickstart's minibatches"
        training = {"max_logprob_diff": 1e9}  # the rows have no log-probabilities of this model
        found.append(Case("SmolLM2-135M", str(folder), game, 1.8, 5e-5, (2048,), 3, training, note))
    return found


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=["quickstart", "smollm2"])
    parser.add_argument("--smollm2-rows", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    measures: list[Measure] = []
    details: dict[str, Any] = {}

    def run() -> None:
        for case in cases(args.cases, args.smollm2_rows):
            found, details[case.name] = measure(case)
            measures.extend(found)

    details["whole_seconds"] = seconds_of(run)
    write_report(args.json, measures, details)


if __name__ == "__main__":
    main()
