"""The plugin that verifiers imports for the taskset id ``trial-verifiers``; the id of a taskset cannot name a submodule."""

from trial_envs.verifiers import TextEnvironment, TextTaskset

__all__ = ["TextEnvironment", "TextTaskset"]
