"""Environments of other libraries, as Gymnasium text environments.

In reading order:

- ``seeded_env``: their base class; ``random_state``: random numbers of libraries that draw from global generators.
- ``textarena``, ``gem``, ``reasoning_gym``, ``scienceworld``: an environment per library.
- ``openenv``, ``openenv_client``: an environment on a server of OpenEnv, and the connection to it.
- ``number_search``: a scripted policy for number games.
"""
