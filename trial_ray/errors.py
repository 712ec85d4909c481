"""Typed errors; their messages contain the cause, the expected input and the remedy.

``UserInputError`` means that the user can fix the error (the command line exits with 2); ``InfrastructureError`` means that an
engine, an actor or a device failed while running (exit 1).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
Value = TypeVar("Value")


class TrialRayError(Exception):
    """Base of every error that this package raises on purpose."""


class UserInputError(TrialRayError, ValueError):
    """A file, name or setting of the user is wrong."""


class UnwritableError(UserInputError, OSError):
    """A file or folder cannot be written at the path that the user gave."""


class ConfigError(UserInputError):
    """A configuration value is missing, unknown or out of range."""


class MethodError(UserInputError):
    """A training method's hook has an unknown name, or the hook's return value violates its interface."""


class CallbackError(UserInputError):
    """A user's callback, or a function that was sent to env runners, raised an error."""


class UnsupportedError(UserInputError):
    """This package does not support a call of RLlib's API."""


class ChatTemplateError(UserInputError):
    """A tokenizer has no chat template, or the user's message cannot be located in the template's output."""


class CheckpointError(UserInputError):
    """A checkpoint is missing, incomplete, or of another kind than expected."""


class FolderInUseError(UserInputError):
    """Another command is using the folder that this command would write into."""


class MissingDependencyError(UserInputError):
    """A package that the configuration requires is not installed."""


class ClusterError(UserInputError):
    """The given Ray cluster does not answer, rejects this process's token, or cannot be used from this machine."""


class PromptTooLongError(UserInputError):
    """A prompt exceeds its limit even after truncation."""


class InfrastructureError(TrialRayError):
    """An engine, an actor or a transfer failed while running."""


class ResourcesError(InfrastructureError):
    """The cluster did not provide the resources that the actors of a run request."""


class EngineError(InfrastructureError):
    """An inference engine failed, died, or returned a response that violates its contract."""


class NotConnectedError(InfrastructureError):
    """An env runner is not connected to the engines, because Ray has restarted its process."""


class CannotServeError(EngineError):
    """An engine's process died, or can no longer serve requests; the engine must be replaced."""


class EnvironmentFaultError(InfrastructureError):
    """An environment raised an error, could not be created, or violated the contract of text environments.

    Args:
        message: cause, expected input and remedy.
        calls: counts of the chat requests that a ``ProgramEnv``'s program had made before the error, by the keys of
            ``info["calls"]`` (for example "received"); ``None`` if the counts are unknown.
    """

    def __init__(self, message: str | None = None, calls: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.calls = dict(calls or {})


class RewardError(EnvironmentFaultError):
    """A reward function raised an error, did not return in time, or returned values that are not finite numbers."""


class LearnerError(InfrastructureError):
    """A learner died, and its part of the training state is lost."""


class WeightSyncError(InfrastructureError):
    """An engine does not have the weights that the learner sent."""


class TrainingDivergedError(InfrastructureError):
    """Training diverged: numbers such as rewards, losses or gradients are not finite, or the policy fails a health check."""


class PolicyBrokenError(TrainingDivergedError):
    """The policy's weights or log-probabilities are not finite, so its state is not worth saving."""


class StorageError(TrialRayError):
    """The file system of a run is full."""


def root_cause(error: BaseException) -> BaseException:
    """Return the error that an actor raised, without Ray's wrapper; other errors are returned unchanged."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the last line if the message is a traceback, without a full stop."""
    cause = root_cause(error)
    text = str(cause).strip() or type(cause).__name__
    return text.splitlines()[-1 if "Traceback" in text else 0].strip().rstrip(".")


def is_user_error(error: BaseException) -> bool:
    """Return True if wrong input of the user caused the error; otherwise, something failed while running."""
    from trial_envs.errors import TrialEnvError

    error = root_cause(error)
    if isinstance(error, TrialEnvError):
        # A RuntimeError means that this package misused the environment, or that the environment's process or server failed.
        return not isinstance(error, RuntimeError)
    return isinstance(error, UserInputError)


def by_name(table: Mapping[str, Value]) -> dict[str, Value]:
    """Return a table with one entry per name; in the keys of ``table``, names with the same value are separated by spaces."""
    return {name: value for names, value in table.items() for name in names.split()}


def refusing(calls: Mapping[str, str]) -> Callable[[Class], Class]:
    """Decorate a class so that the given inherited methods raise :class:`UnsupportedError`.

    Args:
        calls: reasons by method name; names of methods with the same reason are separated by spaces.
    """

    def decorate(cls: Class) -> Class:
        for name, why in by_name(calls).items():
            setattr(cls, name, _Refused(f"{cls.__name__}.{name}() is not supported: {why}."))
        abc.update_abstractmethods(cls)
        return cls

    return decorate


class _Refused:
    """Replacement of an unsupported method; calling it, on the class or on an instance, raises :class:`UnsupportedError`."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(self.message)
