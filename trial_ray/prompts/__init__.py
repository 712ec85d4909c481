"""Prompts and responses: the text that a policy reads and writes, as token ids.

In reading order:

- ``writer``: the base class of prompt writers, and decoding of responses.
- ``chat_template``: the text that a chat template writes around messages, as token ids, and text without control tokens.
- ``single_turn``: a separate prompt for every turn (styles ``"tagged"`` and ``"plain"``).
- ``conversation``: one conversation per episode, which keeps the sampled ids (style ``"conversation"``).
- ``tool_schemas``: schemas of tools, and the check of arguments against them.
- ``tool_calls``: an environment's tools, and parsing of tool calls.
- ``tool_conversation``: one conversation per episode with tool calls (style ``"tools"``).
- ``hermes``: the same for chat templates without tools (``tool_format="hermes"``).
- ``styles``: creates the prompt writer of a run.
- ``teacher_context``: the second context of a turn, in which the teacher scores the response.
"""
