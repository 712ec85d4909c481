"""Plugin that verifiers imports for the taskset id ``trial-verifiers``, because a taskset id cannot name a submodule."""

from trial_envs.exports.verifiers import TextEnvironment, TextTaskset

__all__ = ["TextEnvironment", "TextTaskset"]
