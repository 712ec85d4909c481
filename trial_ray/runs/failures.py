"""Whose fault a failure is: the user's, who can mend it, or that of something that failed while running."""

from __future__ import annotations

from trial_ray.errors import UserInputError

# Of the environments' errors, those that the user can mend.
ENVIRONMENT_USER_ERRORS = frozenset(
    {
        "UnknownSplitError",
        "UnknownTaskError",
        "UnknownDifficultyError",
        "MissingDataError",
        "CorruptGameError",
        "MissingEngineError",
    }
)


def root_cause(error: BaseException) -> BaseException:
    """The error that an actor raised, out of the one in which Ray hands it over."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def is_user_error(error: BaseException) -> bool:
    """Whether the user can mend it."""
    error = root_cause(error)
    if isinstance(error, UserInputError):
        return True
    return any(
        kind.__name__ in ENVIRONMENT_USER_ERRORS and kind.__module__.startswith("trial_envs")
        for kind in type(error).__mro__
    )
