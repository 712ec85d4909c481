"""Questions that are answered with a search engine: from imported data, or about generated worlds of invented entities.

In reading order:

- ``env``: the Gymnasium environment; ``tool_env``: a version of it with two tools.
- ``scoring``: exact match and F1.
- ``corpus``: a corpus with its questions on disk, which :mod:`trial_envs.text_index` searches.
- ``server``: client of a retrieval server, which returns passages.
- ``world``, ``relations``: generated worlds.
- ``importing``: the import of a corpus and of questions.
- ``expert``: scripted policies.
"""
