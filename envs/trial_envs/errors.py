"""Exceptions of the environments. Each message states the value found, the value expected and the fix."""


class TrialEnvError(Exception):
    """Base class of the package's own exceptions."""


class UnknownSplitError(TrialEnvError, ValueError):
    """The environment has no split of this name."""


class UnknownTaskError(TrialEnvError, ValueError):
    """The split has no task of this id or index."""


class UnknownOptionError(TrialEnvError, ValueError):
    """``reset`` got an unknown option."""


class RenderModeError(TrialEnvError, ValueError):
    """The environment cannot be rendered in this mode."""


class GeneratorSettingError(TrialEnvError, ValueError):
    """A task generator has no such difficulty level or task family, or a number is out of range."""


class MissingDataError(TrialEnvError, FileNotFoundError):
    """The data of a split were not found."""


class CorruptGameError(TrialEnvError, ValueError):
    """A game file is incomplete, unreadable, or describes a game that the engine cannot load."""


class CorruptTranscriptError(TrialEnvError, ValueError):
    """A line of a transcript is not a recorded episode."""


class UnrecordableInfoError(TrialEnvError, TypeError):
    """``info`` has a value that cannot be written to a transcript."""


class MissingEngineError(TrialEnvError, ImportError):
    """The engine of an environment is not installed."""


class ClosedEnvError(TrialEnvError, RuntimeError):
    """The environment was used after ``close``."""


class EpisodeOverError(TrialEnvError, RuntimeError):
    """``step`` was called before ``reset``, or after the episode had ended."""


class ObservationTooLongError(TrialEnvError, ValueError):
    """An observation does not fit into the shared memory of its observation space."""


class CorruptCatalogueError(TrialEnvError, ValueError):
    """The data or the index of a shop or a corpus are incomplete or unreadable, or differ from the index's manifest."""


class MissingPackageError(TrialEnvError, ImportError):
    """An optional package is not installed."""


class RemoteEnvError(TrialEnvError, RuntimeError):
    """An environment in another process, or a server, rejected a request; the message contains its error."""


class SessionProcessError(TrialEnvError, RuntimeError):
    """The process of a session on an OpenEnv server could not be started, has ended, or did not answer in time."""


class ServerConnectionError(TrialEnvError, ConnectionError):
    """A server of environments or of passages cannot be reached, or the connection to it was lost."""


class ServerTimeoutError(TrialEnvError, TimeoutError):
    """A server of environments or of passages did not answer in time."""


class ServerAnswerError(TrialEnvError, ValueError):
    """A server's answer does not have the required content: an observation, or a list of passages."""
