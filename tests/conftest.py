"""Settings of every test: property tests draw the same examples everywhere and have no deadline on a busy machine."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")
