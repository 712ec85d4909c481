"""Settings of what a run does when something fails that no actor's replacement makes good."""

from __future__ import annotations

from trial_ray.settings import Section, Settings, setting


class RecoverySettings(Settings):
    """When a run notices that it hangs, and how often it begins again from its last checkpoint."""

    max_restarts: int = setting(
        3,
        "times that ``trial-ray train`` continues by itself from the newest checkpoint, all actors started anew, after a "
        "failure that is not of the input; 0 stops at the first",
        at_least=0,
    )
    stall_timeout_s: float = setting(
        1200.0,
        "seconds without any progress of a process of the run (no turn, engine step or forward pass) after which "
        "``trial-ray train`` writes who waits for whom and ends what hangs; above the longest of these that is right",
        above=0,
    )

    recovery = Section("Set how a run recovers from failures.")
