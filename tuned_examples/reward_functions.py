"""User-defined rewards: a penalty for length, or a judge model behind an endpoint with OpenAI's chat completions.

    trial-ray train tuned_examples/reward_functions.py
    JUDGE_URL=http://127.0.0.1:8000/v1 JUDGE_MODEL=... JUDGE_KEY=... trial-ray train tuned_examples/reward_functions.py

docs/environments.md describes the argument of a reward function and the logging of its parts.
"""

import os

from trial_ray import GRPOConfig
from trial_ray.models.folders import ALFWORLD_TINY


def concise(episode):
    """Return success and the negative number of response tokens; ``reward_weights`` sets the penalty per token."""
    tokens = sum(len(turn.response_ids) for turn in episode.turns)
    return {"solved": float(episode.success), "length": -float(tokens)}


async def judged(episode):
    """Return success and the mark, in [0, 1], that a judge model behind an endpoint gives."""
    from openai import AsyncOpenAI  # from the package extra "endpoint"

    said = [f"{turn.observation}\n> {text}" for turn, text in zip(episode.turns, episode.responses, strict=True)]
    question = "\n".join(
        [f"Task: {episode.task}", *said, "Rate the player from 0 to 10. Answer with the number alone."]
    )
    async with AsyncOpenAI(base_url=os.environ["JUDGE_URL"], api_key=os.environ["JUDGE_KEY"]) as judge:
        answer = await judge.chat.completions.create(
            model=os.environ["JUDGE_MODEL"], temperature=0.0, messages=[{"role": "user", "content": question}]
        )
    return {"solved": float(episode.success), "judge": float(answer.choices[0].message.content) / 10}


GAMES = {"split": "generated", "num_games": 64, "difficulty": "tiny", "max_turns": 8}
JUDGED = "JUDGE_URL" in os.environ

config = (
    GRPOConfig()
    .environment("trial/ALFWorld-v0", env_config=GAMES)
    .rl_module(model_path=ALFWORLD_TINY)
    .training(reward=judged if JUDGED else concise, reward_weights={"judge": 0.5} if JUDGED else {"length": 0.01})
    .training(lr=3e-4, group_size=4, tasks_per_iteration=4, minibatch_rows=64, microbatch_rows=64, ref_kl_coeff=0.0)
    .env_runners(max_prompt_tokens=512, max_response_tokens=16, prompt_style="plain", num_cpus_per_env_runner=0.5)
    .engines(engine="transformers", num_cpus_per_engine=0.5)
    .learners(num_learners=0, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.5)
    .debugging(seed=0)
)
stop = {"training_iteration": 5}
