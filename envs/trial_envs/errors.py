"""Typed errors of the environments: what was found, what was expected, what to do."""


class TrialEnvError(Exception):
    """Base of every error that this package raises on purpose."""


class UnknownSplitError(TrialEnvError, ValueError):
    """The environment has no split of this name."""


class UnknownTaskError(TrialEnvError, ValueError):
    """The task id names no task of the split."""


class UnknownOptionError(TrialEnvError, ValueError):
    """``reset`` knows no such option."""


class GeneratorSettingError(TrialEnvError, ValueError):
    """The generator has no such level or family, or a number is out of range."""


class MissingDataError(TrialEnvError, FileNotFoundError):
    """The data that a split needs are not on this machine."""


class CorruptGameError(TrialEnvError, ValueError):
    """A game file is incomplete, unreadable, or describes a game that the engine refuses."""


class CorruptTranscriptError(TrialEnvError, ValueError):
    """A line of a transcript is no recorded episode."""


class MissingEngineError(TrialEnvError, ImportError):
    """The engine behind an environment is not installed."""


class ClosedEnvError(TrialEnvError, RuntimeError):
    """The environment was used after ``close``."""


class EpisodeOverError(TrialEnvError, RuntimeError):
    """``step`` was called before ``reset``, or after the episode had ended."""


class CorruptCatalogueError(TrialEnvError, ValueError):
    """A shop's data or its index are incomplete, unreadable, or not what their manifest says."""


class MissingPackageError(TrialEnvError, ImportError):
    """A package that only this step needs is not installed."""
