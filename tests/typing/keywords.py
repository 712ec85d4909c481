"""What type checkers refuse of a config: where an ``ignore`` below is not needed, the check fails (``make lint``)."""

from __future__ import annotations

from typing import assert_type

from trial_ray import GRPOConfig, TRIALConfig

TRIALConfig().training(grop_size=8)  # type: ignore[call-arg]
TRIALConfig().training(group_size="8")  # type: ignore[arg-type]
TRIALConfig().engines(engine="vlm")  # type: ignore[arg-type]
TRIALConfig().engines(engine="transformers", num_engine=2)  # type: ignore[call-arg]
TRIALConfig().env_runners(64)  # type: ignore[call-arg]
assert_type(TRIALConfig().training(group_size=8, lr=1e-6, hindsight_coeff=0.1), TRIALConfig)
assert_type(TRIALConfig().resources(num_cpus_for_main_process=0.5), TRIALConfig)
assert_type(GRPOConfig().engines(num_engines=2).env_runners(max_prompt_tokens=512), GRPOConfig)
