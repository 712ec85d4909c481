"""Five ways to use a stronger policy, or none, with 8 seeds each, on two CPU cores.

    trial-ray sweep sweeps/from_zero --method grpo
    trial-ray sweep sweeps/from_zero --method rft
    trial-ray sweep sweeps/from_zero --method grpo --set model_path=models/tuned --set tasks_per_iteration=7
    trial-ray sweep sweeps/from_zero --method opd --set teacher_model=models/teacher
    trial-ray sweep sweeps/from_zero --method opd --set teacher_model=models/teacher --set outcome_coeff=1

The student is the quickstart's initial policy, in the setting of the scale `study` (tuned_examples/reproduce/study.py).
`models/teacher` plays better, and `models/tuned` is the student after fine-tuning on 240 episodes of the teacher, which count as
rollouts, so GRPO samples 7 tasks per iteration for it instead of 8. docs/results.md has the commands that make both
models, and the results, "From zero".
"""

from ray import tune

from trial_ray.models.folders import ALFWORLD_TINY
from trial_ray.sweeps.study import load_scale

STUDY = load_scale("study")

config = (
    STUDY.configure("alfworld", "mini")
    .rl_module(model_path=ALFWORLD_TINY, warm_start=None)
    .evaluation(evaluation_interval=STUDY.iterations)
    .debugging(seed=tune.grid_search(list(range(8))))
)
stop = {"training_iteration": STUDY.iterations}
