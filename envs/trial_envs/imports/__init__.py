"""Environments of other libraries, as Gymnasium text environments.

In reading order:

- ``seeded_env``: base class of environments whose tasks are seeds.
- ``random_state``: separate random states for libraries that draw from global generators.
- ``textarena``, ``gem``, ``reasoning_gym``, ``scienceworld``: one environment per library.
- ``openenv``, ``openenv_client``: an environment on an OpenEnv server, and the connection to the server.
- ``number_search``: a scripted policy for number-guessing games.
"""
