"""The policy answers agents of other libraries: the OpenAI Agents SDK, Anthropic's client, and a program in JavaScript."""

import asyncio
import os
import shutil

import pytest
from programs import CALL, USER, asks, decoded, episode, places, require_extends

from trial_envs.program import local_endpoint
from trial_ray.rollout.groups import RolloutCounts

THOUGHT = "<think>\nsecret\n</think>\n\n"


@pytest.fixture(scope="module")
def agents():
    library = pytest.importorskip("agents")
    library.set_tracing_disabled(True)
    return library


def require_counts(played, number, branches):
    """Require success in so many calls, each answered by one turn, and that this many of them continue no answer."""
    assert played.success
    assert played.ended == "terminated"
    assert played.error is None
    assert len(played.turns) == number
    assert played.calls == {"received": number, "answered": number, "cancelled": 0, "refused": 0}
    assert RolloutCounts.of([played]).metrics()["num_branches"] == branches
    for turn in played.turns:
        if turn.call.answered:
            require_extends(turn, played.turns[turn.call.parent])


@pytest.mark.parametrize("kind", ["ChatCompletions", "Responses"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_of_the_agents_sdk_calls_its_tools(agents, kind, streamed):
    """Its second answer has two calls at once, and a temperature, which the run replaces."""
    guesses = []

    @agents.function_tool
    def guess(number: int) -> str:
        """Guess the number."""
        guesses.append(number)
        return "higher" if number < 5 else "found"

    async def run(task, chat):
        agent = agents.Agent(
            name="Guesser",
            instructions="Guess.",
            tools=[guess],
            model=getattr(agents, f"OpenAI{kind}Model")(model="policy", openai_client=chat),
            model_settings=agents.ModelSettings(temperature=0.3, max_tokens=400),
        )
        if streamed:
            result = agents.Runner.run_streamed(agent, "Which number?")
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, "Which number?")
        return float(result.final_output == "It is 5.")

    played = episode(run, [THOUGHT + CALL.format(2), f"{CALL.format(3)}\n{CALL.format(5)}", "It is 5."])
    assert played.success
    assert guesses[0] == 2
    assert sorted(guesses[1:]) == [3, 5]
    if kind == "Responses":  # The SDK sends reasoning back in this API alone.
        require_counts(played, 3, 1)
        assert "secret" in decoded(played)[2]
    else:
        assert played.calls["answered"] == 3
        assert [place[0] for place in places(played)] == [None, 0, 1]


def test_agents_with_other_tools_hand_over(agents):
    @agents.function_tool
    def look() -> str:
        """Look."""
        return "a number"

    async def run(task, chat):
        model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=chat)
        second = agents.Agent(name="Second", instructions="Two.", model=model, tools=[look])
        first = agents.Agent(name="First", instructions="One.", model=model, handoffs=[second])
        result = await agents.Runner.run(first, "Go.")
        return float(result.last_agent.name == "Second" and result.final_output == "done")

    over, looks = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("transfer_to_second", "look")
    )
    played = episode(run, [over, looks, "done"])
    require_counts(played, 3, 2)
    offered = [[tool["function"]["name"] for tool in turn.call.tools] for turn in played.turns]
    assert offered == [["transfer_to_second"], ["look"], ["look"]]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_harness_of_anthropics_client_keeps_thinking_and_tools(streamed):
    anthropic = pytest.importorskip("anthropic")

    async def run(task, chat):
        async with local_endpoint(chat) as variables:
            client = anthropic.AsyncAnthropic(
                base_url=variables["ANTHROPIC_BASE_URL"], api_key=variables["ANTHROPIC_API_KEY"]
            )
            schema = {"type": "object", "properties": {"number": {"type": "integer"}}}
            settings = {
                "model": "policy",
                "max_tokens": 400,
                "system": "Guess.",
                "tools": [{"name": "guess", "description": "Guess.", "input_schema": schema}],
            }
            messages = [USER]
            for _ in range(2):
                if streamed:
                    async with client.messages.stream(messages=messages, **settings) as stream:
                        answer = await stream.get_final_message()
                else:
                    answer = await client.messages.create(messages=messages, **settings)
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": "higher"}
                    for block in answer.content
                    if block.type == "tool_use"
                ]
                messages += [{"role": "assistant", "content": answer.content}, asks(results)]
        return float(answer.content[-1].text == "five")

    played = episode(run, [f"{THOUGHT}{CALL.format(2)}\n{CALL.format(3)}", "five"])
    require_counts(played, 2, 1)


def test_a_client_that_retries_after_its_time_out_costs_one_turn(monkeypatch):
    """The first answer never comes, so the client gives up by itself, as its defaults have it."""
    openai = pytest.importorskip("openai")
    monkeypatch.setattr("trial_ray.rollout.episode.GIVEN_UP_POLL_S", 0.01)

    async def never():
        await asyncio.Event().wait()

    async def run(task, chat):
        async with local_endpoint(chat) as variables:
            client = openai.AsyncOpenAI(
                base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"], timeout=0.5
            )
            answer = await client.chat.completions.create(model="m", messages=[USER])
        return float(answer.choices[0].message.content == "yes")

    played = episode(run, [never, never, "yes"])
    assert played.success
    assert len(played.turns) == 1
    assert played.calls == {"received": 3, "answered": 1, "cancelled": 2, "refused": 0}


JAVASCRIPT = """
const url = process.env.OPENAI_BASE_URL + "/chat/completions";
const headers = {"Content-Type": "application/json", Authorization: "Bearer " + process.env.OPENAI_API_KEY};
const messages = [{role: "user", content: "Say a."}];
for (let n = 0; n < 2; n++) {
  const answer = await fetch(url, {method: "POST", headers, body: JSON.stringify({model: "m", messages})});
  messages.push((await answer.json()).choices[0].message, {role: "user", content: "Again."});
}
process.exit(messages[3].content === "b" ? 0 : 1);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_an_agent_in_javascript_is_trained():
    async def run(task, chat):
        async with local_endpoint(chat) as variables:
            command = ("node", "--input-type=module", "-e", JAVASCRIPT)
            agent = await asyncio.create_subprocess_exec(*command, env={**os.environ, **variables})
            return float(await agent.wait() == 0)

    played = episode(run, ["a", "b"], style="conversation")
    require_counts(played, 2, 1)
