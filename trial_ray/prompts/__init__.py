"""Prompts and responses: the text that a policy reads and writes, as token ids.

In reading order:

- ``writer``: the base class of prompt writers, decoding of responses, and an episode as chat messages.
- ``chat_template``: token ids of the text that a chat template writes around messages, and encoding of untrusted text.
- ``single_turn``: a separate prompt for every turn (styles ``"tagged"`` and ``"plain"``).
- ``conversation``: one conversation per episode, which keeps the sampled ids (style ``"conversation"``).
- ``tool_calls``: an environment's tools and their schemas, and parsing and checks of tool calls.
- ``tool_conversation``: one conversation per episode with tool calls (style ``"tools"``).
- ``hermes``: conversations with tool calls for chat templates that do not support tools (``tool_format="hermes"``).
- ``call_conversation``: prompts for the chat requests of an agent program, which calls the policy through a chat API.
- ``styles``: creates the prompt writer of a run.
- ``teacher_context``: text that the teacher sees in addition to a turn's prompt when it scores the response.
"""
