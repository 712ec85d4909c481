"""The ALFWorld engine against the stock ``AlfredDemangler(PddlEnv)`` on the same games, in one run.

    python benchmarks/bench_alfworld.py --data FOLDER --golden FILE --json benchmarks/results/alfworld.json

Both engines play every game with the same random commands; each answer is compared and timed, so speed ratios and agreement
are from the same steps. Times are those of the process's own CPU (a busy machine distorts the wall clock), the
games are in memory, and the stock engine has loaded the game before its ``reset`` is timed. Further parts: recorded
episodes, walkthroughs, memory over 1,000 episodes of 500 games, four processes and four threads at once, and how
generated games compare with official ones. Without the official games, packed or as a tree (``--data``, else
``ALFWORLD_DATA``, else ``TRIAL_TEST_DATA``), generated games of the official size are used; without recorded episodes
(``--golden``, else ``TRIAL_TEST_DATA``), none are compared. The run takes about 15 minutes.
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from measure import (
    THIRD_PARTY,
    Measure,
    equal_percent,
    games_config,
    new_processes,
    official_games,
    read_lines,
    report_parser,
    write_report,
)

from trial_envs.alfworld.engine import AlfredEngine
from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.alfworld.families import FAMILIES
from trial_envs.alfworld.game import Game
from trial_envs.alfworld.games import open_official
from trial_envs.alfworld.generator import generate, task_ids

EVALUATION = ("valid_seen", "valid_unseen")
FIELDS = ("observation", "admissible_commands", "score", "done")
ODD_TEXT = ("", "sing a song", "go to the moon", "TAKE", "look ")


def spread(data: str | None, count: int, splits: tuple[str, ...]) -> list[Game]:
    """Return games at equal distances in the splits' lists, or generated ones of the official size without data."""
    if data is None:
        return [generate(task) for task in task_ids("official", 9, count, FAMILIES)]
    source = open_official(data)
    tasks = [(split, task) for split in splits for task in source.tasks(split)]
    chosen = [tasks[i * len(tasks) // count] for i in range(count)]
    return [source.game(split, task) for split, task in chosen]


# ---- side by side ----


def make_stock() -> Any:
    with tempfile.TemporaryDirectory() as folder:  # importing alfworld creates a data folder, by default in the home
        os.environ.setdefault("ALFWORLD_DATA", folder)
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.core import EnvInfos
        from textworld.envs.pddl import PddlEnv
    return AlfredDemangler(PddlEnv(EnvInfos(won=True, admissible_commands=True)), shuffle=False)


def clock(times: list[float], function: Callable, *args: Any) -> Any:
    start = time.process_time()
    result = function(*args)
    times.append(time.process_time() - start)
    return result


def side_by_side(games: list[Game], steps: int) -> dict[str, Any]:
    """Play ``steps`` random commands of every game in both engines, compare the answers and time the calls."""
    ours, stock = AlfredEngine(), make_stock()
    ours.load(games[0].text)  # parses the grammar, which later games of a process reuse
    times: dict[str, list[float]] = defaultdict(list)
    comparisons: list[tuple[str, bool]] = []
    for index, game in enumerate(games):
        rng = random.Random(index)
        text = {"pddl_domain": game.text.domain, "pddl_problem": game.text.problem, "grammar": game.text.grammar}
        clock(times["first load, stock"], stock.load, text)
        clock(times["first load"], ours.load, game.text)
        expected, done, score = clock(times["reset, stock"], stock.reset), False, 0
        state = clock(times["reset"], ours.reset)
        for _ in range(steps):
            command = rng.choice((*expected.admissible_commands, ODD_TEXT[rng.randrange(len(ODD_TEXT))]))
            expected, score, done = clock(times["step, stock"], stock.step, command)
            state = clock(times["step"], ours.step, command)
            found = (state.feedback, list(state.admissible_commands), float(state.won), state.won)
            wanted = (expected.feedback, expected.admissible_commands, float(score), done)
            comparisons += [(field, a == b) for field, a, b in zip(FIELDS, found, wanted, strict=True)]
    clock_switching(games, ours, times)
    ours.close()
    return {
        "games": len(games),
        "steps_compared": len(comparisons) // len(FIELDS),
        "equal_percent": equal_percent(comparisons),
        **rates(times),
    }


def clock_switching(games: list[Game], ours: AlfredEngine, times: dict[str, list[float]]) -> None:
    """Time resets to another game whose translation is cached, as an environment's reset does."""
    for game in games[-16:] * 3:

        def switch(text=game.text) -> None:
            ours.load(text)
            ours.reset()

        clock(times["switch"], switch)


def rates(times: dict[str, list[float]]) -> dict[str, Any]:
    mean = {name: statistics.mean(values) for name, values in times.items()}
    return {
        "ms_mean": {name: 1e3 * value for name, value in mean.items()},
        "ms_median": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "steps_per_second": {"ours": 1 / mean["step"], "stock": 1 / mean["step, stock"]},
        "resets_per_second": {"ours": 1 / mean["reset"], "stock": 1 / mean["reset, stock"]},
        "ours_over_stock": {
            "steps_per_second": mean["step, stock"] / mean["step"],
            "resets_per_second": mean["reset, stock"] / mean["reset"],
            "resets_per_second, another cached game": mean["reset, stock"] / mean["switch"],
            "first_loads_per_second": mean["first load, stock"] / mean["first load"],
        },
    }


# ---- recordings and walkthroughs ----


def golden_agreement(golden: Path, data: str) -> dict[str, Any]:
    """Replay the recorded episodes in the environment and return the share of equal answers by field."""
    episodes = read_lines(golden)
    comparisons: list[tuple[str, bool]] = []
    for split in sorted({episode["split"] for episode in episodes}):
        env = ALFWorldEnv(split, data=data)
        for episode in (e for e in episodes if e["split"] == split):
            for recorded, answered in zip(episode["steps"], replay(env, episode), strict=True):
                comparisons += [(field, value == recorded[field]) for field, value in answered.items()]
        env.close()
    answers = sum(len(episode["steps"]) for episode in episodes)
    return {"episodes": len(episodes), "answers": answers, "equal_percent": equal_percent(comparisons)}


def replay(env: ALFWorldEnv, episode: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in episode["steps"]:
        ended = False
        if step["action"] is None:
            observation, info = env.reset(options={"task": f"{episode['name']}/{episode['trial']}"})
        else:
            observation, _, terminated, truncated, info = env.step(step["action"])
            ended = terminated or truncated
        yield {
            "observation": observation,
            "admissible_commands": info["admissible_actions"],
            "score": None if step["score"] is None else type(step["score"])(info["score"]),
            "done": None if step["done"] is None else ended,
            "won": None if step["won"] is None else info["won"],
        }


def walkthroughs(data: str, train_games: int, processes: int) -> dict[str, dict[str, int]]:
    """Count the games that their walkthroughs win: all evaluation games, and some of the training games."""
    source = open_official(data)
    jobs = {split: list(source.tasks(split)) for split in EVALUATION}
    train = source.tasks("train")
    jobs["train"] = [train[i * len(train) // train_games] for i in range(train_games)]
    result = {}
    with new_processes(processes) as pool:
        for split, tasks in jobs.items():
            parts = [tasks[i::processes] for i in range(processes)]
            won = sum(pool.map(count_wins, [data] * processes, [split] * processes, parts))
            result[split] = {"games": len(tasks), "won": won}
    return result


def count_wins(data: str, split: str, tasks: list[str]) -> int:
    env = ALFWorldEnv(split, data=data)
    won = 0
    for task in tasks:
        env.reset(options={"task": task})
        ended = [env.step(command)[2] for command in env.walkthrough]
        won += ended == [False] * (len(ended) - 1) + [True]
    env.close()
    return won


# ---- memory, processes, threads ----


def memory_growth(data: str | None, episodes: int) -> dict[str, float]:
    """Return resident memory after episode 100 and at the end; two episodes a game, every tenth in a new environment."""
    settings = games_config(data, "train", episodes)
    env = ALFWorldEnv(**settings)
    tasks = list(env.tasks())
    # In the order by family and room, the first games are the smallest; a process's memory depends on its largest game.
    random.Random(0).shuffle(tasks)
    process, after_100 = psutil.Process(), 0
    for episode in range(episodes):
        if episode % 10 == 9:
            env.close()
            env = ALFWorldEnv(**settings)
        env.reset(options={"task": tasks[episode // 2 % len(tasks)]})
        for command in env.walkthrough:
            env.step(command)
        if episode == 99:
            after_100 = process.memory_info().rss
    at_end = process.memory_info().rss
    env.close()
    return {
        "episodes": episodes,
        "mb_after_100": after_100 / 2**20,
        "mb_at_end": at_end / 2**20,
        "growth_percent": 100 * (at_end - after_100) / after_100,
    }


def play_digest() -> str:
    """Return a digest of every answer of some random episodes."""
    digest, engine = hashlib.sha256(), AlfredEngine()
    for index, task in enumerate(task_ids("medium", 77, 12, FAMILIES)):
        rng = random.Random(index)
        engine.load(generate(task).text)
        state = engine.reset()
        for _ in range(40):
            state = engine.step(rng.choice(state.admissible_commands))
            digest.update(repr(state).encode())
    engine.close()
    return digest.hexdigest()


def side_by_side_players() -> dict[str, bool]:
    """Return whether four processes, and four threads, get the answers that a single process gets."""
    alone = play_digest()

    def all_equal(pool: Executor) -> bool:
        with pool:
            players = [pool.submit(play_digest) for _ in range(4)]
            return [player.result(600) for player in players] == [alone] * 4

    return {
        "four_processes_equal": all_equal(new_processes(4)),
        "four_threads_equal": all_equal(ThreadPoolExecutor(4)),
    }


# ---- generated games beside official ones ----


def describe(games: list[Game]) -> dict[str, dict[str, float]]:
    """Return mean, minimum and maximum of the sizes of games."""
    engine = AlfredEngine()
    seen: dict[str, list[int]] = defaultdict(list)
    for game in games:
        engine.load(game.text)
        state = engine.reset()
        problem = game.text.problem
        seen["receptacles"].append(sum(c.startswith("go to ") for c in state.admissible_commands))
        seen["objects"].append(problem.count("(objectType "))
        seen["walkthrough"].append(len(game.walkthrough))
        seen["first observation, characters"].append(len(state.feedback))
        for command in game.walkthrough:
            seen["admissible commands"].append(len(state.admissible_commands))
            state = engine.step(command)
    engine.close()
    return {
        name: {"mean": statistics.mean(values), "least": min(values), "most": max(values)}
        for name, values in seen.items()
    }


# ---- report ----


def equality(reference: str, compared: dict[str, Any], note: str) -> Measure:
    return Measure(
        f"ALFWorld: answers equal to {reference}", min(compared["equal_percent"].values()), "%", 100, note=note
    )


def measures(result: dict[str, Any]) -> list[Measure]:
    """Return the measures for the table of all benchmarks."""
    speed, memory = result["side_by_side"], result["memory"]
    ratio, rate = speed["ours_over_stock"]["steps_per_second"], speed["steps_per_second"]
    steps = f"{speed['steps_compared']:,} random commands in {speed['games']} games"
    found = [
        equality("the published engine's", speed, steps),
        Measure("ALFWorld: steps a second against it", ratio, note=f"{rate['ours']:,.0f} against {rate['stock']:,.1f}"),
        Measure(
            "ALFWorld: growth of memory", memory["growth_percent"], "%", note=f"episode 100 to {memory['episodes']}"
        ),
    ]
    if "golden" in result:
        golden = result["golden"]
        found.append(equality("recorded ones", golden, f"{golden['answers']:,} recorded answers"))
    if "walkthroughs" in result:
        won = [count["won"] / count["games"] for count in result["walkthroughs"].values()]
        found.append(Measure("ALFWorld: games won by their walkthroughs", 100 * min(won), "%", 100, note="worst split"))
    return found


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--data", default=official_games(), help="folder of the official games")
    recorded = THIRD_PARTY / "golden" / "alfworld_episodes.jsonl.xz"
    parser.add_argument(
        "--golden", type=Path, default=recorded if recorded.is_file() else None, help="recorded episodes"
    )
    parser.add_argument("--games", type=int, default=40, help="games played by both engines, 50 steps each")
    parser.add_argument("--episodes", type=int, default=1000, help="episodes of the memory measurement")
    parser.add_argument("--train-games", type=int, default=300, help="training games replayed by their walkthroughs")
    args = parser.parse_args()

    official = spread(args.data, args.games, (*EVALUATION, "train"))
    result: dict[str, Any] = {"games": "official" if args.data else "generated, official size"}
    result["side_by_side"] = side_by_side(official, 50)
    if args.data and args.golden:
        result["golden"] = golden_agreement(args.golden, args.data)
    if args.data:
        result["walkthroughs"] = walkthroughs(args.data, args.train_games, 2)
    with new_processes(1) as pool:
        result["memory"] = pool.submit(memory_growth, args.data, args.episodes).result()
    result["players"] = side_by_side_players()
    result["sizes"] = {"official": describe(official)} if args.data else {}
    result["sizes"]["generated"] = describe([generate(t) for t in task_ids("official", 9, args.games, FAMILIES)])
    write_report(args.json, measures(result), result)


if __name__ == "__main__":
    main()
