"""SmolLM2-135M-Instruct calls a tool in ALFWorld's tiny games on two CPU cores: GRPO against TRIAL.

    trial-ray sweep pair --scale pretrained_tools                   # about an hour; the same command continues

The scale is like `pretrained`, but an episode is one conversation with the tool `act(action)`. The model's own chat template has
no tools. TRL's template for Qwen2.5 writes the same messages with tools, and TRL parses its calls (`pip install trl`). The model
was not trained on calls and learns them in the warm start.
"""

import dataclasses
import shutil
from importlib.resources import as_file, files
from pathlib import Path

from trial_envs.tool_env import ToolEnv
from trial_ray.models.folders import SMOLLM2, packaged_folder
from trial_ray.sweeps.study import load_scale

PRETRAINED = load_scale("pretrained")
ITERATIONS = 5
MAX_TURNS = 8
EVALUATION_GAMES = 48


def with_tools() -> str:
    """Return the folder of a copy of the packaged model with a chat template that has tools."""
    folder = packaged_folder(SMOLLM2)
    copy = folder.with_name(f"{folder.name}-tools")
    if not copy.exists():
        with as_file(files("trl") / "chat_templates" / "qwen2_5.jinja") as template:
            partial = Path(shutil.copytree(folder, copy.with_name(f"{copy.name}.partial"), dirs_exist_ok=True))
            shutil.copy(template, partial / "chat_template.jinja")
            partial.rename(copy)
    return str(copy)


def configure(environment, backbone):
    config = PRETRAINED.configure(environment, backbone)
    games = {"difficulty": "tiny", "max_turns": MAX_TURNS}
    warm_start = {
        **config.warm_start,
        "model_path": with_tools(),
        "env_config": games,
        "response_style": "tools",
        "max_steps": 30,
        "check_every": 30,
        # Checks are slow: their engine computes every prompt of a conversation as a whole. Policies are evaluated with vLLM.
        "check_games": 2,
        "evaluation_games": 8,
    }
    return (
        config.environment(
            env_config={**config.env_config, **games}, adapter=dataclasses.replace(config.adapters[0], tools=ToolEnv)
        )
        .rl_module(warm_start=warm_start)
        .env_runners(prompt_style="tools", max_prompt_tokens=1536, max_response_tokens=48)
        .evaluation(
            evaluation_env_config={**config.evaluation_env_config, "num_games": EVALUATION_GAMES},
            evaluation_num_tasks=EVALUATION_GAMES,
        )
        .training(tasks_per_iteration=2, group_size=4, hindsight_start_iteration=1)
    )


scale = dataclasses.replace(
    PRETRAINED,
    configure=configure,
    backbones=("SmolLM2-135M-tools",),
    controlled_backbone="SmolLM2-135M-tools",
    iterations=ITERATIONS,
    seeds=1,
)
