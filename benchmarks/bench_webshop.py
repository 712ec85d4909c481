"""WebShop: latencies, memory, agreement with the published engine's recorded answers, and a shop of 100,000 products.

    python benchmarks/bench_webshop.py --json benchmarks/results/webshop.json [--data FOLDER] [--golden FOLDER]

``--data`` is the 1,000-product set, ``--golden`` the recorded answers; both default to those below ``TRIAL_TEST_DATA``.
The published engine itself is not run, because it needs Java (its authors report 22 to 24 ms per step).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measure import THIRD_PARTY, Measure, equal_percent, new_processes, read_lines, report_parser, write_report

from trial_envs.webshop.env import WebShopEnv
from trial_envs.webshop.reward import purchase_reward
from trial_envs.webshop.session import Session

EPISODES, LARGE, LARGE_GOALS = 1000, 100_000, 2000


def memory_mb() -> dict[str, float]:
    """Return the resident memory of this process, and its part without pages of mapped files."""
    fields = Path("/proc/self/status").read_text().split()
    return {
        name: int(fields[fields.index(f"{key}:") + 1]) / 1024 for name, key in (("all", "VmRSS"), ("own", "RssAnon"))
    }


def clock(times: list[float], function, *args, **kwargs):
    start = time.perf_counter()
    result = function(*args, **kwargs)
    times.append((time.perf_counter() - start) * 1e3)
    return result


def summary(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=20)
    return {"mean_ms": statistics.mean(times), "p50_ms": cuts[9], "p95_ms": cuts[18], "count": len(times)}


def compare_episodes(shop, episodes: list[dict]) -> Iterator[tuple[str, bool]]:
    """Replay recorded episodes; yield a field of an answer, and whether it is equal."""
    for episode in episodes:
        session = Session(shop, shop.goal(episode["goal_index"]))
        for step in episode["steps"]:
            if step["action"] is not None:
                session.act(step["action"])
            page, bought = session.page, session.purchase
            offered = {"has_search_bar": page.has_search_bar, "clickables": list(page.targets)}
            yield "observation", page.text == step["observation"]
            yield "available actions", offered == step["available_actions"]
            yield "page", page.name == step["page"]
            yield "reward", (bought.reward.reward if bought else 0) == (step["reward"] or 0)
            yield "done", (bought is not None) == bool(step["done"])
        if recorded := episode["purchase"]:
            bought = session.purchase
            yield "purchased product", bool(bought) and bought.asin == recorded["purchased_asin"]
            yield "purchase price", bool(bought) and bought.price == recorded["price"]
            yield "purchase options", bool(bought) and bought.options == recorded["options"]
            for name, value in recorded["reward_info"].items():
                yield f"purchase {name}", bool(bought) and bought.reward.parts().get(name) == value


def compare_rewards(shop, records: list[dict]) -> Iterator[tuple[str, bool]]:
    """Rate recorded purchases; yield a part of the reward, and whether it is equal."""
    for record in records:
        goal = shop.goal(record["goal_index"])
        product = shop.product(shop.position(record["purchased_asin"]))
        nouns = shop.product(shop.position(goal.asin)).title_nouns
        found = purchase_reward(product, record["price"], record["options"], goal, nouns)
        for name, value in {"reward": record["reward"], **record["reward_info"]}.items():
            yield name, {"reward": found.reward, **found.parts()}.get(name) == value


def compare_search(shop, records: list[dict]) -> Iterator[tuple[str, bool]]:
    """Search for recorded queries; yield a number of best results, and whether they are equal."""
    for record in records:
        found = [shop.listing(position).asin for position in shop.search(record["query"]).tolist()]
        for top in (10, 50):
            yield f"exact top-{top}", found[:top] == record["asins"][:top]


def measure_play(env: WebShopEnv, episodes: int) -> dict:
    """Play walkthroughs with pages of results and sub-pages, and measure times and memory."""
    times: dict[str, list[float]] = {"reset": [], "step": [], "search step": []}
    memory: dict[int, dict[str, float]] = {}
    tasks = env.tasks()
    for number in range(1, episodes + 1):
        clock(times["reset"], env.reset, options={"task": tasks[number * 7 % len(tasks)]})
        search, *rest = env.walkthrough
        clock(times["search step"], env.step, f"search[{env.goal.instruction}]")
        detour = ["click[next >]", "click[< prev]", search, *rest[:-1], "click[description]", "click[< prev]", rest[-1]]
        for action in detour[: env.max_turns - 1]:
            *_, terminated, truncated, _ = clock(times["step"], env.step, action)
            if terminated or truncated:
                break
        if number in (1, 100, episodes):
            memory[number] = memory_mb()
    steps = times["step"] + times["search step"]
    growth = 100 * (memory[episodes]["own"] / memory[min(100, episodes)]["own"] - 1)
    return {
        "reset": summary(times["reset"]),
        "step": summary(steps),
        "search_step": summary(times["search step"]),
        "memory_mb_by_episode": memory,
        "own_memory_growth_percent_from_100": growth,
    }


def measure_shop(**setting) -> dict:
    start = time.perf_counter()
    env = WebShopEnv(**setting)
    opened = time.perf_counter() - start
    folder, shop = env.catalogue.folder, env.catalogue
    result = {
        "open_s": opened,
        "index_mb": sum(path.stat().st_size for path in folder.iterdir()) / 1e6,
        "memory_mb_after_open": memory_mb(),
    }
    queries: list[float] = []
    for number in range(min(300, shop.num_goals)):
        clock(queries, shop.search, shop.goal(number).instruction)
    result["search"] = summary(queries)
    episodes = EPISODES if shop.num_products <= 10_000 else 200
    result |= measure_play(env, episodes)
    env.close()
    return result


def in_a_process(**setting) -> dict:
    """Measure in a new process, whose memory is that of this shop alone."""
    with new_processes(1) as pool:
        return pool.submit(measure_shop, **setting).result(3600)


def measures(result: dict) -> list[Measure]:
    """Return the measures for the table of all benchmarks."""
    found = [
        Measure(f"WebShop: {name} equal to recorded ones", min(values.values()), "%", 100, note="the worst field")
        for name, values in result["agreement_percent"].items()
    ]
    for name, shop in result["shops"].items():
        search = f"search p95 {shop['search']['p95_ms']:.2f} ms, index {shop['index_mb']:.0f} MB"
        found.append(Measure(f"WebShop, {name}: a step", shop["step"]["mean_ms"], "ms", note=search))
    return found


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--data", type=Path, default=THIRD_PARTY / "data" / "webshop_1k")
    parser.add_argument("--golden", type=Path, default=THIRD_PARTY / "golden")
    parser.add_argument("--products", type=int, default=LARGE, help="size of the large generated shop")
    args = parser.parse_args()
    result: dict = {"agreement_percent": {}, "shops": {}}
    with tempfile.TemporaryDirectory(prefix="bench_webshop-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        if args.data.is_dir():
            env = WebShopEnv("all", data=args.data)
            for kind, compare in (
                ("episodes", compare_episodes),
                ("rewards", compare_rewards),
                ("search", compare_search),
            ):
                path = args.golden / f"webshop_{kind}.jsonl.xz"
                if path.is_file():
                    result["agreement_percent"][kind] = equal_percent(compare(env.catalogue, read_lines(path)))
            env.close()
            result["shops"]["1,000 products"] = in_a_process(split="all", data=str(args.data))
        large = {"split": "generated", "num_products": args.products, "num_games": LARGE_GOALS}
        built = in_a_process(**large)["open_s"]  # the first process builds the index, the second finds it
        result["shops"][f"{args.products:,} generated products"] = in_a_process(**large) | {"build_s": built}
    write_report(args.json, measures(result), result)


if __name__ == "__main__":
    main()
