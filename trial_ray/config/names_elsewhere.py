"""Names that TRL and verl give to settings of this package."""

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
