"""Load, reset and step of the ALFWorld engine against the stock ``PddlEnv`` on the same games, in one run (medians, ms).

    python benchmarks/bench_alfworld.py --json benchmarks/results/alfworld.json [--data FOLDER]

With ``--data`` (the official games, packed or as a tree) official games are measured too. Leaves out: memory.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path

from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.core import EnvInfos
from textworld.envs.pddl import PddlEnv

from trial_envs.alfworld.engine import AlfredEngine
from trial_envs.alfworld.games import open_official
from trial_envs.alfworld.generator import generate, task_ids

STEPS, STOCK_GAMES, STOCK_STEPS = 40, 3, 15


def game_sets(data: Path | None) -> dict[str, list]:
    sets = {
        f"generated {level}": [generate(task) for task in task_ids(level, 9, 8)]
        for level in ("tiny", "medium", "official")
    }
    if data is not None:
        source = open_official(str(data))
        sets["official valid_seen"] = [source.game("valid_seen", task) for task in source.tasks("valid_seen")[::20]]
    return sets


def clock(times: list[float], function, *args):
    start = time.perf_counter()
    result = function(*args)
    times.append((time.perf_counter() - start) * 1e3)
    return result


def measure(games: list, ours: AlfredEngine, stock) -> dict[str, float]:
    times: dict[str, list[float]] = defaultdict(list)
    rng = random.Random(0)
    for index, game in enumerate(games):
        clock(times["load"], ours.load, game.text)
        state = clock(times["reset"], ours.reset)
        for _ in range(STEPS):
            state = clock(times["step"], ours.step, rng.choice(state.admissible_commands))
        if index < STOCK_GAMES:
            text = {"pddl_domain": game.text.domain, "pddl_problem": game.text.problem, "grammar": game.text.grammar}
            clock(times["stock_load"], stock.load, text)
            stock_state = clock(times["stock_reset"], stock.reset)
            for _ in range(STOCK_STEPS):
                command = rng.choice(stock_state.admissible_commands)
                stock_state, _, _ = clock(times["stock_step"], stock.step, command)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return medians | {f"{name}_ratio": medians[f"stock_{name}"] / medians[name] for name in ("load", "reset", "step")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ours = AlfredEngine()
    stock = AlfredDemangler(PddlEnv(EnvInfos(won=True, admissible_commands=True)), shuffle=False)
    sets = game_sets(args.data)
    measure(sets["generated tiny"][:1], ours, stock)  # parses the grammar once
    result = {name: measure(games, ours, stock) for name, games in sets.items()}
    ours.close()

    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
