"""ALFWorld's household text games, on an engine that is faster than the ``alfworld`` package's and gives the same results.

In reading order:

- ``env``: the Gymnasium environment; ``tool_env``: a version of it with one tool per command.
- ``games``, ``game``, ``families``: the sources of games, a game, and the families of tasks.
- ``engine``: the engine; ``grammar``: its texts; ``translation``, ``library``: the input and the library of Fast Downward, the
  planner that the engine uses.
- ``packed``: ALFWorld's official games in a single compressed file; ``importing``: checks and copies the official games.
- ``export``: writes generated games to disk.
- ``generator``, ``difficulty``, ``furnishing``, ``household``, ``tasks``, ``problem``, ``walkthrough``: generated games.
- ``oracle``: scripted policies.
"""
