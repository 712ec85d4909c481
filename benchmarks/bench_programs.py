"""An episode of an agent program over HTTP against the same episode of an environment, with the same policy and prompts.

    python benchmarks/bench_programs.py --json benchmarks/results/programs.json

Both conversations have 10 turns with the same texts, and the quickstart's policy samples 64 tokens in every turn. The environment
writes its messages itself. The program sends them to the policy with the ``openai`` client, once in the process of the env runner
and once over HTTP to ``local_endpoint``, as an agent in another process does. The client for HTTP loads no certificates; by
default, each new client loads those of the system, which takes 25 ms more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium
from measure import Measure, interleaved, report_parser, seconds_note, seconds_of, speedup, write_report
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from trial_envs.program import ProgramEnv, local_endpoint
from trial_ray import EnvironmentAdapter, GRPOConfig
from trial_ray.adapters import program_adapter
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.adapters.templates import GENERIC, PromptContext
from trial_ray.algorithms.startup import policy_folder
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.transformers import LocalEngine
from trial_ray.models.folders import ALFWORLD_TINY
from trial_ray.models.loading import load_causal_lm, load_tokenizer
from trial_ray.prompts.styles import prompt_writer
from trial_ray.rollout.episode import PolicyPlayer, play_episode
from trial_ray.trajectory import Trajectory

TURNS, RESPONSE_TOKENS, ROUNDS = 10, 64, 5
TASK = "put the mug on the desk"
TEMPLATE = GENERIC["conversation"]


def observation(turn: int) -> str:
    return f"You arrive at drawer {turn}. On the drawer {turn}, you see a mug {turn}, a pen {turn} and a book {turn}."


class Drawers(gymnasium.Env):
    """An environment whose observations do not depend on the actions."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.turn = 0
        return observation(0), {"task": TASK, "won": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return observation(self.turn), 0.0, self.turn == TURNS, False, {"task": TASK, "won": False}


async def run(task: str, chat: AsyncOpenAI) -> float:
    messages: list[Any] = [{"role": "system", "content": TEMPLATE.system(TASK)}]
    for turn in range(TURNS):
        shown = TEMPLATE.render(PromptContext(TASK, observation(turn), (), (), turn + 1))
        messages.append({"role": "user", "content": shown})
        answer = await chat.chat.completions.create(model="policy", messages=messages)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return 0.0


async def run_over_http(task: str, chat: AsyncOpenAI) -> float:
    async with local_endpoint(chat) as variables:
        base_url, key = variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]
        # A URL with http:// needs no certificates.
        http_client = DefaultAsyncHttpxClient(verify=False)
        async with AsyncOpenAI(base_url=base_url, api_key=key, http_client=http_client) as client:
            return await run(task, client)


def program(name: str, function: Callable[..., Any]) -> EnvironmentAdapter:
    kwargs = {"run": function, "tasks": {"train": ["drawers"]}, "max_turns": TURNS + 1}
    gymnasium.register(f"bench/{name}-v0", entry_point=ProgramEnv, kwargs=kwargs)
    return program_adapter(f"bench/{name}-v0", own_process=False)


def compare(model_path: str) -> tuple[list[Measure], dict[str, Any]]:
    gymnasium.register("bench/Drawers-v0", entry_point=Drawers)
    adapters = {
        "environment": EnvironmentAdapter("bench/Drawers-v0"),
        "program": program("Program", run),
        "program over HTTP without certificates": program("Endpoint", run_over_http),
    }
    tokenizer = load_tokenizer(model_path)
    # No token ends a response, so that all responses have the same length.
    engine = LocalEngine(load_causal_lm(model_path, "float32").eval(), frozenset())
    played: dict[str, Trajectory] = {}

    def player(name: str, adapter: EnvironmentAdapter) -> Callable[[], float]:
        config = GRPOConfig().environment(adapter.env_id, adapter=adapter).rl_module(model_path=model_path)
        config.env_runners(prompt_style="conversation", max_prompt_tokens=3000, max_response_tokens=RESPONSE_TOKENS)
        (entry,) = config.environment_entries()
        writer = prompt_writer(tokenizer, config, adapter)

        def episode() -> None:
            with closing(GuardedEnv(entry)) as env:
                policy = PolicyPlayer(writer, SamplingParams(RESPONSE_TOKENS), engine.generate, seed=0)
                played[name] = asyncio.run(play_episode(env, str(next(iter(entry.tasks()), "0")), policy))

        return lambda: seconds_of(episode)

    times = interleaved({name: player(name, adapter) for name, adapter in adapters.items()}, ROUNDS)
    lengths = {name: [len(turn.prompt_ids) for turn in trajectory.turns] for name, trajectory in played.items()}
    measures = [
        Measure(
            f"{name}: an episode of {TURNS} calls against {TURNS} steps of an environment",
            1 / speedup(times, name, "environment"),
            "x",
            1.10,
            "lower",
            note=f"{seconds_note(times)}; prompts of {lengths[name][0]} to {lengths[name][-1]} tokens, {RESPONSE_TOKENS} sampled",
        )
        for name in adapters
        if name != "environment"
    ]
    return measures, {"seconds": times, "prompt_tokens": lengths}


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--model", default=ALFWORLD_TINY, help="folder of the model")
    args = parser.parse_args()
    write_report(args.json, *compare(policy_folder(args.model)))


if __name__ == "__main__":
    main()
