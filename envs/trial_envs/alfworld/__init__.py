"""ALFWorld: household text games on the engine of the ``alfworld`` package.

In reading order:

- ``env``: the Gymnasium environment; ``tool_env``: the same with one tool per command.
- ``games``, ``game``, ``families``: the sources of games, a game, and the families of tasks.
- ``engine``, ``grammar``, ``translation``, ``library``: the engine, and its parts: texts, planner input, planner library.
- ``packed``, ``importing``, ``export``: the packed release, the import of the official games, and their layout on disk.
- ``generator``, ``difficulty``, ``furnishing``, ``household``, ``tasks``, ``problem``, ``walkthrough``: generated games.
- ``oracle``: scripted policies.
"""
