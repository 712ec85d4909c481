"""Whose fault a failure is: the user's, who can mend it, or that of something that failed while running."""

from __future__ import annotations

from trial_ray.errors import UserInputError


def root_cause(error: BaseException) -> BaseException:
    """The error that an actor raised, out of the one in which Ray hands it over."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def is_user_error(error: BaseException) -> bool:
    """Whether the user can mend it."""
    from trial_envs.errors import TrialEnvError

    error = root_cause(error)
    if isinstance(error, TrialEnvError):
        return not isinstance(error, RuntimeError)  # those tell of misuse by the calling code
    return isinstance(error, UserInputError)
