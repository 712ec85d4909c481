"""Programs that call a chat model, played with scripted responses of the policy."""

import asyncio
from contextlib import closing

import numpy as np
from chat_tokenizers import chat_tokenizer
from gymnasium.envs.registration import EnvSpec
from prompt_games import DATE

from trial_envs.program import ProgramEnv
from trial_ray.adapters import EnvironmentEntry, program_adapter
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.prompts.call_conversation import CallWriter
from trial_ray.prompts.chat_template import TemplateOptions
from trial_ray.rollout.episode import PolicyPlayer, play_episode

SYSTEM, USER = ({"role": role, "content": role} for role in ("system", "user"))


def asks(text):
    return {"role": "user", "content": text}


async def ask(chat, messages, **settings):
    """Call the policy and append its answer to the messages."""
    completion = await chat.chat.completions.create(model="policy", messages=messages, **settings)
    messages.append(completion.choices[0].message.model_dump(exclude_none=True))
    return completion.choices[0]


def episode(
    run,
    texts,
    name="qwen3",
    style="tools",
    task="5",
    limit=4096,
    sampled=None,
    shortens=False,
    turns=20,
    max_turns=None,
    **settings,
):
    """Play an episode of a program with these texts as the policy's responses, in the order of the calls.

    The environment's limit is ``turns`` and the adapter's is ``max_turns``; ``settings`` are the player's.
    """
    adapter = program_adapter("test/Program-v0", max_turns=max_turns)
    kwargs = {"run": run, "tasks": {"train": [task]}, "max_turns": turns}
    entry = EnvironmentEntry(EnvSpec(adapter.env_id, entry_point=ProgramEnv, kwargs=kwargs), adapter)
    tokenizer, answers = chat_tokenizer(name), iter(texts)

    async def generate(prompt_ids, params):
        if sampled is not None:
            sampled.append(params)
        text = next(answers)
        if not isinstance(text, str):
            return await text()
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id][: params.max_tokens]
        reason = "stop" if ids[-1] == tokenizer.eos_token_id else "length"
        return Response(np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), 0, reason)

    options = TemplateOptions({}, DATE)
    writer = CallWriter(tokenizer, adapter.template(style), limit, 2, options, shortens=shortens)
    player = PolicyPlayer(writer, SamplingParams(max_tokens=512), generate, **settings)
    with closing(GuardedEnv(entry)) as env:
        return asyncio.run(play_episode(env, task, player))


def decoded(trajectory, name="qwen3"):
    return [chat_tokenizer(name).decode(turn.prompt_ids) for turn in trajectory.turns]


def places(trajectory):
    return [(turn.call.parent, turn.call.num_known, turn.call.answered) for turn in trajectory.turns]


def require_extends(turn, parent, length=None):
    """Require that a prompt begins with the ids of an earlier prompt, and of the response if no length is given."""
    known = np.concatenate([parent.prompt_ids, parent.response_ids])[:length]
    assert np.array_equal(turn.prompt_ids[: len(known)], known)


CALL = '<tool_call>\n{{"name": "guess", "arguments": {{"number": {}}}}}\n</tool_call>'
