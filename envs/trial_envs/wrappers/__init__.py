"""Gymnasium wrappers for text environments. For a turn limit, use Gymnasium's ``TimeLimit``.

- ``projection``: ``step`` takes a language model's whole response.
- ``history``: observations contain the last turns.
- ``recording`` appends each episode to a file; ``transcript`` is its format.
"""

from trial_envs.wrappers.history import HistoryWindow
from trial_envs.wrappers.projection import ActionProjection
from trial_envs.wrappers.recording import Recording
from trial_envs.wrappers.transcript import Episode, Step, append_episode, read_episodes

__all__ = ["ActionProjection", "Episode", "HistoryWindow", "Recording", "Step", "append_episode", "read_episodes"]
