"""Programs that call a chat model, as text environments. A call is a chat request, which the policy answers.

In reading order:

- ``calls``: the calls of an episode, and the earlier calls that they continue.
- ``gateway``: answers a program's requests to any of the chat APIs.
- ``local_endpoint``: an HTTP server for requests of agents in other processes.
- ``env``: the Gymnasium environment.
- ``tool_program``: environments that define tools, such as TRL's, as programs.
"""

from trial_envs.program.calls import ChatCall
from trial_envs.program.env import ProgramEnv, answer_action, refusal_action
from trial_envs.program.local_endpoint import local_endpoint
from trial_envs.program.tool_program import tool_program, tool_schema

__all__ = ["ChatCall", "ProgramEnv", "answer_action", "local_endpoint", "refusal_action", "tool_program", "tool_schema"]
