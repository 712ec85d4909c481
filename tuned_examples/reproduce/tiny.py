"""The paper's comparisons with the quickstart's model on two CPU cores: 12 iterations, a few minutes a run.

    trial-ray sweep table3 --scale tiny

The only environment is ALFWorld, with new generated games in every iteration, and 256 held-out games half-way and at the end.
Settings are the quickstart's; the dense term begins after a sixth of the run, as in the paper.
"""

import runpy
from pathlib import Path

from trial_ray.sweeps.study import EvaluationSplit, Scale

ITERATIONS = 12
QUICKSTART = Path(__file__).parents[1] / "alfworld_quickstart.py"


def configure(environment, backbone):
    config = runpy.run_path(str(QUICKSTART))["config"]
    return config.training(hindsight_start_iteration=3).evaluation(evaluation_interval=ITERATIONS // 2)


scale = Scale(
    configure=configure,
    environments={"alfworld": (EvaluationSplit("generated"),)},
    backbones=("alfworld-tiny",),
    controlled_backbone="alfworld-tiny",
    iterations=ITERATIONS,
    seeds=5,
    # In the published runs of 150 iterations, λ falls to 0 in 50 (SERL, StepOPSD) or 100 (RLSD); teachers are synced every 10.
    method_settings={
        **{method: {"rescaling_iterations": 4, "teacher_sync_iterations": 1} for method in ("serl", "stepopsd")},
        "rlsd": {"rescaling_iterations": 8},
    },
)
