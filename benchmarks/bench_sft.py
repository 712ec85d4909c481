"""An epoch of supervised fine-tuning against one of TRL's ``SFTTrainer`` on the same conversations, model, updates and threads.

    python benchmarks/bench_sft.py --json benchmarks/results/sft.json

The data are 64 conversations of 10 turns with random actions in generated ALFWorld games, four conversations per update; the model
is the quickstart's. Times are those of whole epochs, optimizer included. TRL runs in a separate environment as in
``bench_trl.py``. TRL forwards a conversation as one sequence in which the responses have labels, padded to the longest of its
batch; packing needs FlashAttention, which does not run on CPUs. TRL runs with the fastest of several values of
``per_device_train_batch_size``, with batches of similar lengths (``train_sampling_strategy``), and without gradient checkpointing,
its default.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from bench_trl import PYTHON, TRL
from learners import build_learner, counted_tokens, distinct_prefixes
from measure import Measure, interleaved, report_parser, seconds_note, seconds_of, speedup, write_report

from trial_ray import GRPOConfig
from trial_ray.adapters.guarded import GuardedEnv, StepResult
from trial_ray.algorithms.startup import policy_folder
from trial_ray.learner.rows import scored_turn
from trial_ray.models.folders import ALFWORLD_TINY
from trial_ray.models.loading import load_tokenizer
from trial_ray.prompts.styles import prompt_writer
from trial_ray.prompts.writer import PromptWriter
from trial_ray.rollout.episode import History, play_episode
from trial_ray.sft.training import SFTSettings, held_out_scores, learner_config
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn

TURNS = 10
PER_UPDATE = 4
"""Number of conversations per update."""
BATCH_SIZES = (1, 2, 4)
ROUNDS = 3
UNLABELLED = -100


class RandomPlayer:
    """Takes random actions, with a sentence of reasoning.

    Args:
        writer: writes the conversation.
        seed: seed of the actions.
    """

    def __init__(self, writer: PromptWriter, seed: int) -> None:
        self._writer, self._random = writer, np.random.default_rng(seed)

    async def act(self, result: StepResult, history: History, step: int) -> Turn:
        prompt = self._writer.write(result, history)
        action = str(self._random.choice(result.admissible_actions))
        text = f"<think>\nThis is step {step}, and I try this: {action}.\n</think>\n\n<action>{action}</action>"
        return Turn(prompt.ids, self._writer.encode(prompt, text), insert_at=prompt.insert_at, action=action)


def sft_config(model_path: str) -> GRPOConfig:
    games = {"split": "generated", "difficulty": "tiny", "num_games": 256, "max_turns": TURNS}
    config = GRPOConfig().environment("trial/ALFWorld-v0", env_config=games).rl_module(model_path=model_path)
    return config.env_runners(prompt_style="conversation", max_prompt_tokens=4000, max_response_tokens=200)


def conversations(config: GRPOConfig, number: int) -> list[Trajectory]:
    """Return conversations of exactly ``TURNS`` turns; games that random actions win are left out."""
    (entry,) = config.environment_entries()
    writer, kept = prompt_writer(load_tokenizer(config.model_path), config, entry.adapter), []
    with closing(GuardedEnv(entry)) as env:
        for seed, task in enumerate(entry.tasks()):
            if len(kept) == number:
                break
            trajectory = asyncio.run(play_episode(env, task, RandomPlayer(writer, seed)))
            kept += [trajectory] if len(trajectory.turns) == TURNS else []
    return kept


def labelled(trajectory: Trajectory) -> tuple[list[int], list[int]]:
    """Return a conversation as one sequence of ids, and its labels, which are the ids of responses and ``UNLABELLED`` elsewhere."""
    last = trajectory.turns[-1]
    ids = np.concatenate([last.prompt_ids, last.response_ids])
    labels = np.full(len(ids), UNLABELLED)
    for turn in trajectory.turns:
        end = len(turn.prompt_ids) + len(turn.response_ids)
        labels[len(turn.prompt_ids) : end] = ids[len(turn.prompt_ids) : end]
    return ids.tolist(), labels.tolist()


def compare(python: Path, model_path: str, number: int) -> tuple[list[Measure], dict[str, Any]]:
    config = sft_config(model_path)
    episodes = conversations(config, number)
    updates = [episodes[start : start + PER_UPDATE] for start in range(0, number, PER_UPDATE)]
    settings = SFTSettings(batch_rows=PER_UPDATE * TURNS)
    learner = build_learner(learner_config(config, settings, len(updates)))
    rows = [labelled(each) for each in episodes]
    distinct = sum(
        distinct_prefixes([scored_turn(turn).inputs for each in update for turn in each.turns]) for update in updates
    )

    def epoch() -> None:
        for episodes in updates:
            learner.update(episodes=[TrajectoryGroup(each.task_id, [each]) for each in episodes])

    with TRL(python, "sft", (PER_UPDATE, rows), model_path) as trl:
        ours, theirs = held_out_scores(learner, episodes)[0], trl.ask("loss 1")["loss"]
        with counted_tokens(learner.policy_module.lm) as count:
            epoch()
        runs = {size: trl.ask(f"run {size}") for size in BATCH_SIZES}
        best = min(runs, key=lambda size: runs[size]["seconds"])
        contestants = {
            "fine-tuning": lambda: seconds_of(epoch),
            "TRL": lambda: trl.seconds(best),
        }
        times = interleaved(contestants, ROUNDS)
    lengths = [len(ids) for ids, _ in rows]
    note = f"{number} conversations of {min(lengths)} to {max(lengths)} tokens, {distinct:,} distinct in their updates"
    measures = [
        Measure(
            "fine-tuning: an epoch against TRL's SFTTrainer",
            speedup(times, "fine-tuning", "TRL"),
            target=1.0,
            note=f"{seconds_note(times)}; per_device_train_batch_size {best}, float32, {trl.threads} threads",
        ),
        Measure("fine-tuning: tokens forwarded / distinct", count() / distinct, target=1.05, better="lower", note=note),
        Measure("fine-tuning: TRL's tokens forwarded / distinct", runs[best]["tokens"] / distinct),
        Measure(
            "fine-tuning: difference of losses to TRL's",
            abs(ours - theirs),
            "nats",
            1e-5,
            "lower",
            note=f"mean of all response tokens before training, {ours:.4f} nats",
        ),
    ]
    return measures, {"batch_sizes": runs, "seconds": times, "threads": trl.threads}


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--python", type=Path, default=PYTHON, help="of the environment with TRL")
    parser.add_argument("--model", default=ALFWORLD_TINY, help="folder of the model")
    parser.add_argument("--conversations", type=int, default=64)
    args = parser.parse_args()
    write_report(args.json, *compare(args.python, policy_folder(args.model), args.conversations))


if __name__ == "__main__":
    main()
