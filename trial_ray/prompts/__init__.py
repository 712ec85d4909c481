"""Prompts and responses: the text that a policy reads and writes, as token ids.

In reading order:

- ``writer``: the base class of prompt writers, and the error of a prompt that exceeds the limit.
- ``chat_template``: the text that a chat template writes around messages, as token ids.
- ``single_turn``: a separate prompt for every turn (styles ``"tagged"`` and ``"plain"``).
- ``conversation``: one conversation per episode, which keeps the sampled ids (style ``"conversation"``).
- ``tool_calls``: schemas of an environment's tools, and parsing of tool calls.
- ``tool_conversation``: one conversation per episode with tool calls (style ``"tools"``).
- ``responses``: decoding of responses.
- ``styles``: creates the prompt writer of a run.
- ``untrusted_text``: encodes text of environments without control tokens.
- ``teacher_context``: the second context of a turn, in which the teacher scores the response.
"""
