"""Search in texts on disk, with Lucene's analysis and ranking, for WebShop and Search-QA.

In reading order:

- ``search``, ``bm25``: search in an index; ``analyser``, ``porter``: the terms of a text.
- ``indexing``: builds an index; ``records``: arrays and records in files.
- ``folder``: folders of index files with a manifest.
"""
