"""Programs that call a chat model, as text environments. In reading order:

- ``calls``: the calls of an episode, and the earlier calls that they continue
- ``gateway``: the policy as the server of a chat API
- ``local_endpoint``: the same over HTTP, for agents in other processes
- ``env``: the environment
- ``tool_program``: environments with tools of their own, as programs
"""

from trial_envs.program.calls import ChatCall
from trial_envs.program.env import ProgramEnv, answer_action, refusal_action
from trial_envs.program.local_endpoint import local_endpoint
from trial_envs.program.tool_program import tool_program, tool_schema

__all__ = ["ChatCall", "ProgramEnv", "answer_action", "local_endpoint", "refusal_action", "tool_program", "tool_schema"]
