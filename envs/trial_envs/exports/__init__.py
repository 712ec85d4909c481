"""trial_envs in the form of other libraries."""
