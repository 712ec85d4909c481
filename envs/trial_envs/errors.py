"""Exceptions of the environments. Each message states the value found, the value expected and the fix."""


class TrialEnvError(Exception):
    """Base class of the package's own exceptions."""


class UnknownSplitError(TrialEnvError, ValueError):
    """The environment has no split of this name."""


class UnknownTaskError(TrialEnvError, ValueError):
    """The split has no task of this id or index."""


class UnknownOptionError(TrialEnvError, ValueError):
    """An option or keyword argument of ``reset`` is unknown."""


class RenderModeError(TrialEnvError, ValueError):
    """The environment cannot be rendered in this mode."""


class GeneratorSettingError(TrialEnvError, ValueError):
    """An unknown difficulty level or task family was given, or a setting of an environment is out of range."""


class MissingDataError(TrialEnvError, FileNotFoundError):
    """The data of a split were not found."""


class CorruptGameError(TrialEnvError, ValueError):
    """A game file is incomplete, unreadable, or describes a game that the engine cannot load."""


class CorruptTranscriptError(TrialEnvError, ValueError):
    """A line of a transcript file is not a recorded episode."""


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
    """The files of a shop or a text corpus are incomplete or unreadable, or do not match the manifest of its search index."""


class MissingPackageError(TrialEnvError, ImportError):
    """An optional package is not installed."""


class RemoteEnvError(TrialEnvError, RuntimeError):
    """An environment in another process, or a server, rejected a request; the exception's message contains the reason."""


class SessionProcessError(TrialEnvError, RuntimeError):
    """The process of a session on an OpenEnv server could not be started, has ended, or did not answer in time."""


class ServerConnectionError(TrialEnvError, ConnectionError):
    """An OpenEnv server or a retrieval server cannot be reached, or the connection to it was lost."""


class ServerTimeoutError(TrialEnvError, TimeoutError):
    """An OpenEnv server or a retrieval server did not answer in time."""


class ServerAnswerError(TrialEnvError, ValueError):
    """A server's answer does not have the required content: an observation, or a list of passages."""
