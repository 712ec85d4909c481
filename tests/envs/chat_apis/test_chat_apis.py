"""Clients of the Responses API and the Messages API ask a scripted model through chat completions."""

import json

import openai
import pytest

from trial_envs.chat_apis import messages_api, responses_api

anthropic = pytest.importorskip("anthropic")
httpx2 = pytest.importorskip("httpx2")

USER = {"role": "user", "content": "go"}
CALLS = [
    {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": number})}}
    for number in range(2)
]
ANSWERS = {
    "text": {"content": "yes"},
    "no-text": {"content": "", "reasoning_content": "hm"},
    "calls": {"content": None, "tool_calls": CALLS},
    "all": {"content": "I look.", "reasoning_content": "where?", "tool_calls": CALLS},
}


class Model:
    """Answers a client's requests with one message of ``ANSWERS``."""

    def __init__(self, api, name="text", reason="stop"):
        self.api, self.requests = api, []
        self.completion = {
            "id": "task/0",
            "model": "policy",
            "created": 1,
            "choices": [{"message": {"role": "assistant", **ANSWERS[name]}, "finish_reason": reason}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }

    def respond(self, request):
        body = json.loads(request.content)
        try:
            self.requests.append(self.api.chat_request(body))
        except ValueError as error:
            return httpx2.Response(400, json=self.api.error(400, str(error), "unsupported"))
        if not body.get("stream"):
            return httpx2.Response(200, json=self.api.answer(self.completion, body))
        lines = (
            f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in self.api.events(self.completion, body)
        )
        return httpx2.Response(200, text="".join(lines), headers={"content-type": "text/event-stream"})

    def ask(self, history, stream=False, **settings):
        """Return the client's object of an answer, and append the answer to the history."""
        transport = httpx2.Client(transport=httpx2.MockTransport(self.respond))
        fields = {"api_key": "-", "base_url": "http://policy", "http_client": transport}
        if self.api is responses_api:
            calls, settings = openai.OpenAI(**fields).responses, {"input": history, **settings}
        else:
            calls, settings = anthropic.Anthropic(**fields).messages, {"messages": history, "max_tokens": 9, **settings}
        if not stream:
            answer = calls.create(model="policy", **settings)
        else:
            with calls.stream(model="policy", **settings) as events:
                answer = events.get_final_response() if self.api is responses_api else events.get_final_message()
        history += answer.to_dict()["output"] if self.api is responses_api else [answer.to_param()]
        return answer


@pytest.mark.parametrize("api", [responses_api, messages_api], ids=["responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_history_has_the_messages_that_were_answered(api, name, stream):
    model, history, calls = Model(api, name), [USER], ANSWERS[name].get("tool_calls", ())
    model.ask(history, stream)
    if api is responses_api:
        history += [{"type": "function_call_output", "call_id": call["id"], "output": "wall"} for call in calls]
        history.append(USER)
    else:
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "wall"} for call in calls]
        history.append({"role": "user", "content": [*results, {"type": "text", "text": "go"}]})
    assert model.ask(history).usage.output_tokens == 2
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "wall"} for call in calls]
    repeated = [USER, {"role": "assistant", **ANSWERS[name]}, *results, USER]
    assert [request["messages"] for request in model.requests] == [[USER], repeated]


def test_two_responses_in_a_row_stay_two_messages():
    items = [
        {"role": "assistant", "content": "a"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]},
    ]
    messages = responses_api.chat_request({"input": [*items, {"role": "assistant", "content": "c"}]})["messages"]
    assert messages == [items[0], {"role": "assistant", "reasoning_content": "b", "content": "c"}]


def test_the_deltas_of_a_response_are_numbered_and_complete():
    """The client does not add them up, because the last event has the whole response."""
    data = [data for _, data in responses_api.events(Model(responses_api, "all").completion, {})]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    texts = ["where?", "I look.", *(call["function"]["arguments"] for call in CALLS)]
    assert [event["delta"] for event in data if "delta" in event] == texts
    done = [event for event in data if event["type"].endswith(("text.done", "arguments.done"))]
    assert [event.get("text", event.get("arguments")) for event in done] == texts
    begun = [event["item"] for event in data if event["type"].endswith("item.added")]
    assert not any(item.get("content") or item.get("arguments") for item in begun)


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("api", "body", "system", "settings", "result"),
    [
        (
            responses_api,
            {
                "input": [
                    {"role": "developer", "content": [{"type": "input_text", "text": text} for text in "ab"]},
                    {
                        "type": "function_call_output",
                        "call_id": "0",
                        "output": [{"type": "input_text", "text": "wall"}],
                    },
                    USER,
                ],
                "instructions": "Be good.",
                "max_output_tokens": 9,
                "include": ["message.output_text.logprobs"],
                "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
                "tool_choice": {"type": "function", "name": "look"},
                "parallel_tool_calls": False,
                "text": {"format": {"type": "text"}},
            },
            [{"role": "system", "content": text} for text in ("Be good.", "ab")],
            {"logprobs": True},
            "wall",
        ),
        (
            messages_api,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "0",
                                "is_error": True,
                                "content": [{"type": "text", "text": "wall"}],
                            },
                            {"type": "text", "text": "go"},
                        ],
                    }
                ],
                "system": [
                    {"type": "text", "text": text} for text in ("x-anthropic-billing-header: 1", "Be ", "good.")
                ],
                "max_tokens": 9,
                "stop_sequences": ["end"],
                "tools": [{"name": "look", "input_schema": SCHEMA}],
                "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            },
            [{"role": "system", "content": "Be good."}],
            {"stop": ["end"]},
            "Error: wall",
        ),
    ],
)
def test_a_request_keeps_its_tools_settings_and_texts(api, body, system, settings, result):
    assert api.chat_request({"model": "policy", "temperature": 0, **body}) == {
        "model": "policy",
        "messages": [*system, {"role": "tool", "tool_call_id": "0", "content": result}, USER],
        "max_tokens": 9,
        "temperature": 0,
        "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
        **settings,
    }


def test_a_truncated_answer_is_incomplete():
    assert Model(responses_api, reason="length").ask([USER]).status == "incomplete"
    assert Model(messages_api, reason="length").ask([USER]).stop_reason == "max_tokens"


def item(role, **part):
    return [{"role": role, "content": [part]}]


@pytest.mark.parametrize(
    ("api", "found", "body"),
    [
        (responses_api, "previous_response_id", {"previous_response_id": "resp_1"}),
        (responses_api, "json_schema", {"text": {"format": {"type": "json_schema"}}}),
        (responses_api, "web_search", {"tools": [{"type": "web_search"}]}),
        (responses_api, "input_image", {"input": item("user", type="input_image", image_url="http://x")}),
        (
            responses_api,
            "encrypted_content",
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        ),
        (responses_api, "call_id", {"input": [{"type": "function_call", "name": "look"}]}),
        (messages_api, "container", {"container": "c"}),
        (messages_api, "format", {"output_config": {"format": {"type": "json_schema"}}}),
        (messages_api, "web_search_20250305", {"tools": [{"type": "web_search_20250305"}]}),
        (messages_api, "document", {"messages": item("user", type="document")}),
        (messages_api, "assistant", {"messages": item("assistant", type="text", text="{")}),
    ],
)
def test_a_request_beyond_chat_completions_is_refused_by_name(api, found, body):
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as raised:
        Model(api).ask([USER], **body)
    assert found in raised.value.message
    code = raised.value.code if api is responses_api else raised.value.error_code
    assert raised.value.type == "invalid_request_error"
    assert code == "unsupported"
