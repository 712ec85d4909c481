"""Questions that are answered with a search engine: generated worlds, or imported questions and passages.

In reading order:

- ``env``: the Gymnasium environment; ``tool_env``: the same with two tools.
- ``scoring``: exact match and F1.
- ``corpus``: a corpus with its questions on disk, which :mod:`trial_envs.text_index` searches; ``server``: a server of passages.
- ``world``, ``relations``: generated worlds.
- ``importing``: the import of a corpus and of questions.
- ``expert``: scripted policies.
"""
