"""Makes learning.png, the README's figure, out of docs/results/study_learning_alfworld.json.

python docs/images/learning.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from trial_ray.evaluation.statistics import bootstrap_curve
from trial_ray.files import read_json
from trial_ray.reports.plots import drawing

HERE = Path(__file__).parent
CURVES = HERE.parent / "results" / "study_learning_alfworld.json"
METHODS = {"trial": ("TRIAL", "#d95f02"), "grpo": ("GRPO", "#1f77b4")}
WINDOW = 3
"""Iterations of a centred moving mean; an iteration has 64 rollouts a seed."""


def smooth(curves: np.ndarray) -> np.ndarray:
    """Return the centred moving means of curves ``[seeds, iterations]``, over fewer iterations at both ends."""
    weights = np.ones(WINDOW)
    counts = np.convolve(np.ones(curves.shape[1]), weights, mode="same")
    return np.array([np.convolve(curve, weights, mode="same") / counts for curve in curves])


def main() -> None:
    """Write learning.png beside this file: mean over the seeds and its 95 % bootstrap interval, for each method."""
    path = HERE / "learning.png"
    # The background is opaque, so that the figure is readable in light and dark themes.
    with drawing([path], (6.4, 3.0)) as (_, axis):
        for method, (label, colour) in METHODS.items():
            curves = 100 * smooth(np.array(list(read_json(CURVES)["methods"][method]["curves"].values())))
            iterations = np.arange(1, curves.shape[1] + 1)
            low, high = bootstrap_curve(curves).T
            axis.fill_between(iterations, low, high, alpha=0.2, color=colour, linewidth=0)
            axis.plot(iterations, curves.mean(0), color=colour, label=label)
        axis.axvline(5, color="grey", linewidth=0.8, linestyle=":")
        axis.text(5.3, 12, "λ from iteration 5", color="grey", fontsize=9)
        axis.set(xlabel="iteration", ylabel="success in training (%)", xlim=(1, 30), ylim=(10, 50))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", frameon=False)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
    print(path, f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
