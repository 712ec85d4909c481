"""Episodes of household games as a policy with reasoning plays them, recorded as ``evaluate --record`` does."""

import asyncio
import json
from contextlib import closing
from dataclasses import replace

from prompt_games import turn_of, writer_of

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.algorithms import GRPOConfig
from trial_ray.prompts.tool_conversation import call_message
from trial_ray.prompts.writer import MessageWriter
from trial_ray.rollout.episode import play_episode
from trial_ray.rollout.recording import write_episode
from trial_ray.runs.folder import RunFolder
from trial_ray.trajectory import Turn

GAMES = {"split": "generated", "difficulty": "tiny", "num_games": 3, "max_turns": 12}


def config_of(style):
    config = GRPOConfig().environment("trial/ALFWorld-v0", env_config=GAMES)
    config.env_runners(prompt_style=style, max_prompt_tokens=100_000, max_response_tokens=500)
    config.fix_date("2020-02-29")
    return config


class Scripted:
    """Plays the walkthrough with reasoning, with tools two actions a turn; turns have ids, and the texts of a chat API."""

    def __init__(self, env, writer, messages):
        self.env, self.writer, self.messages = env, writer, messages

    async def act(self, result, history, step):
        prompt, style = self.writer.write(result, history), self.writer.template.style
        at = sum(turn.num_steps for turn in history)
        actions = self.env.walkthrough()[at : at + 1 + (style == "tools")]
        action = "\n".join(actions)
        text = action if style == "plain" else f"<think>\nStep {step}.\n</think>\n\n<action>{action}</action>"
        if style == "tools":
            ids = self.writer.encode_message(call_message(*map(self.writer.tools.call_of, actions)))
        else:
            ids = self.writer.encode(prompt, text)
        new = self.messages.write(result, history)
        self.messages.answer({"role": "assistant", "content": text})
        turn = turn_of(self.writer, prompt, result, ids)
        assert turn.action == action
        assert turn.valid
        return turn if style == "tools" else replace(turn, response=text, messages=json.dumps(new))


def played(style, tokenizer, number=3):
    (entry,) = config_of(style).environment_entries()
    writer, trajectories = writer_of(tokenizer, style, tools=ADAPTER.tools), []
    for task in entry.tasks()[:number]:
        with closing(GuardedEnv(entry)) as env:
            player = Scripted(env, writer, MessageWriter(ADAPTER.template(style), 2))
            trajectories.append(asyncio.run(play_episode(env, task, player)))
    return trajectories


def recorded(folder, style, trajectories, keep_ids=False):
    """Write episodes as `evaluate --record` does; without ids, as a chat API plays them."""
    run = RunFolder.of_recording(folder, config_of(style), ["test"])
    no_ids = {name: getattr(Turn(), name) for name in ("prompt_ids", "response_ids", "logprobs")}
    for each in trajectories:
        turns = each.turns if keep_ids else [replace(turn, **no_ids) for turn in each.turns]
        write_episode(run.trajectories, replace(each, turns=turns))
    return folder
