"""Earlier names of settings and metrics, which code, command lines and run folders may contain."""

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
"""Name of each setting, by its earlier name."""
REMOVED_SETTINGS = {"clamp_scope": "Eq. 8 clamps each microbatch"}
"""Settings that were removed in this version, with the behaviour that replaces them."""
NAMES_ELSEWHERE = {
    "beta": "ref_kl_coeff",
    "entropy_coef": "entropy_coeff",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "learning_rate": "lr",
    "loss_type": "surrogate_mean",
    "max_completion_length": "max_response_tokens",
    "max_grad_norm": "grad_clip",
    "max_prompt_length": "max_prompt_tokens",
    "max_response_length": "max_response_tokens",
    "num_generations": "group_size",
    "num_iterations": "num_epochs",
    "scale_rewards": "advantage_norm",
}
"""Name of each setting, by its name in TRL or verl (docs/methods.md)."""
RENAMED_METRICS = {
    "learners/default_policy/engine/logprob_gap": "learners/default_policy/engine/logprob_diff",
    "learners/default_policy/engine/logprob_gap_max": "learners/default_policy/engine/logprob_diff_max",
    "guards/num_violated": "health_checks/num_failed",
}
"""Key of each metric, by its earlier key."""


def current_name(given: str) -> str:
    """Return the current name of a setting; warns if ``given`` is an earlier name."""
    if (name := RENAMED_SETTINGS.get(given, given)) != given:
        warn_of(given, name, stacklevel=4)
    return name


def warn_of(given: str, name: str, stacklevel: int = 3) -> None:
    """Warn of an earlier name, once per place in the code that uses it (by default the caller of the caller)."""
    warnings.warn(
        f"{given} is {name} now; the next version rejects the earlier name", FutureWarning, stacklevel=stacklevel
    )
