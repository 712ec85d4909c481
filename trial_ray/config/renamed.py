"""Names that settings and metrics had in earlier versions, which code, command lines and run folders may hold."""

from __future__ import annotations

import warnings

RENAMED_SETTINGS = {
    **{
        f"panel_{name}": f"evaluation_{name}"
        for name in ("env_config", "split", "num_tasks", "seed", "temperature", "top_p")
    },
    "kl_coeff": "ref_kl_coeff",
    "max_logprob_gap": "max_logprob_diff",
    "privileged_view": "teacher_context",
    "guard_action": "health_check_action",
    "guard_patience": "health_check_patience",
}
"""The name of each setting by its earlier one."""
REMOVED_SETTINGS = {"clamp_scope": "Eq. 8 clamps each microbatch"}
"""Settings that were removed in this version, and what holds in their place."""
RENAMED_METRICS = {
    "learners/default_policy/engine/logprob_gap": "learners/default_policy/engine/logprob_diff",
    "learners/default_policy/engine/logprob_gap_max": "learners/default_policy/engine/logprob_diff_max",
    "guards/num_violated": "health_checks/num_failed",
}
"""The key of each metric by its earlier one."""


def current_name(given: str) -> str:
    """The name that a setting has now; warns of an earlier one."""
    if (name := RENAMED_SETTINGS.get(given, given)) != given:
        warn_of(given, name, stacklevel=4)
    return name


def warn_of(given: str, name: str, stacklevel: int = 3) -> None:
    """Warn of an earlier name, once for each place that gives it: the caller of the caller, by default."""
    warnings.warn(
        f"{given} is {name} now; the next version rejects the earlier name", FutureWarning, stacklevel=stacklevel
    )
