"""Calls that must raise a ``CheckpointError``."""

import pytest

from trial_ray.errors import CheckpointError


def rejected(words, call, *arguments, **options):
    """Require that the call raises a ``CheckpointError`` whose message matches ``words``."""
    with pytest.raises(CheckpointError, match=words):
        call(*arguments, **options)
