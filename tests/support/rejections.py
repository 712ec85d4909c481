"""Calls that must raise a ``CheckpointError`` or a ``ConfigError``."""

from functools import partial

import pytest

from trial_ray.errors import CheckpointError, ConfigError


def rejected(words, call, *arguments, error=CheckpointError, **options):
    """Require that the call raises the error, and that its message matches ``words`` unless these are ``None``."""
    with pytest.raises(error, match=words):
        call(*arguments, **options)


# ``misconfigured`` requires a ``ConfigError`` in the same way.
misconfigured = partial(rejected, error=ConfigError)
