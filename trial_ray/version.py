"""The version of this package, which its wheel, its pages and its run folders name."""

__version__ = "0.1.0"
