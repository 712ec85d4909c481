"""Typed errors: what was found, what was expected, what to do.

``UserInputError`` means that the user can fix it (the command line exits with 2); ``InfrastructureError`` means that an
engine, an actor or a device failed while running (exit 1).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


class TrialRayError(Exception):
    """Base of every error that this package raises on purpose."""


class UserInputError(TrialRayError, ValueError):
    """Something that the user wrote, named or configured is wrong."""


class UnwritableError(UserInputError, OSError):
    """A file or folder cannot be written where the user wants it."""


class ConfigError(UserInputError):
    """A configuration value is missing, unknown or out of range."""


class MethodError(UserInputError):
    """A method's hook has an unknown name, or returned something else than its interface says."""


class CallbackError(UserInputError):
    """A callback of the user's, or a function that was sent to env runners, raised."""


class UnsupportedError(UserInputError):
    """A call that RLlib offers has no meaning here."""


class ChatTemplateError(UserInputError):
    """A tokenizer has no chat template, or one in which the user's message cannot be located."""


class CheckpointError(UserInputError):
    """A checkpoint is missing, incomplete, or of another kind than expected."""


class FolderInUseError(UserInputError):
    """Another command is writing into the folder."""


class MissingDependencyError(UserInputError):
    """A package that the configuration asks for is not installed."""


class ClusterError(UserInputError):
    """The Ray cluster that was named does not answer, refuses the token, or cannot be used from here."""


class PromptTooLongError(UserInputError):
    """A prompt does not fit its limit even after everything that may be cut was cut."""


class InfrastructureError(TrialRayError):
    """An engine, an actor or a transfer failed while running."""


class ResourcesError(InfrastructureError):
    """The cluster did not offer what the actors of a run ask for."""


class EngineError(InfrastructureError):
    """An inference engine failed, died, or answered outside its contract."""


class EnvironmentFaultError(InfrastructureError):
    """An environment raised, could not be made, or answered outside the contract of text environments."""


class RewardError(EnvironmentFaultError):
    """A reward function raised, did not answer in time, or returned something else than finite numbers."""


class LearnerError(InfrastructureError):
    """A learner died, and with it the part of the state that no other process holds."""


class WeightSyncError(InfrastructureError):
    """An engine does not hold the weights that the learner sent."""


class TrainingDivergedError(InfrastructureError):
    """Gradients were not finite several times in a row, or the policy is lost in another way; weights are finite numbers."""


class PolicyBrokenError(TrainingDivergedError):
    """The weights are not finite, or give log-probabilities that are not: there is nothing that would be worth saving."""


class StorageError(TrialRayError):
    """The file system of a run is full."""


def root_cause(error: BaseException) -> BaseException:
    """The error that an actor raised, out of the one in which Ray hands it over."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def first_line(error: BaseException) -> str:
    """An error's message in one line, without the full stop; of a traceback as text, the error that it ends with."""
    cause = root_cause(error)
    text = str(cause).strip() or type(cause).__name__
    return text.splitlines()[-1 if "Traceback" in text else 0].strip().rstrip(".")


def is_user_error(error: BaseException) -> bool:
    """Whether the user can fix the failure; otherwise something broke while running."""
    from trial_envs.errors import TrialEnvError

    error = root_cause(error)
    if isinstance(error, TrialEnvError):
        return not isinstance(error, RuntimeError)  # those tell of misuse by the calling code
    return isinstance(error, UserInputError)


def refusing(calls: Mapping[str, str]) -> Callable[[Class], Class]:
    """Decorate a class so that calls which it inherits raise :class:`UnsupportedError`.

    Args:
        calls: the reason, by the name of the method.
    """

    def decorate(cls: Class) -> Class:
        for name, why in calls.items():
            setattr(cls, name, _Refused(f"{cls.__name__}.{name}() is not supported: {why}."))
        abc.update_abstractmethods(cls)
        return cls

    return decorate


class _Refused:
    """In place of a method, whether it is called on the class or on an instance."""

    def __init__(self, told: str) -> None:
        self.told = told

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(self.told)
