"""A server of the text environments for OpenEnv clients: ``python -m trial_envs.openenv trial/ALFWorld-v0``.

In reading order:

- ``__main__``: the command.
- ``server``, ``admission``: the HTTP and WebSocket server, and its access limits.
- ``session``: the OpenEnv environment of a session.
- ``processes``, ``fork_server``: a process for every session, and the program that starts these processes.
"""
