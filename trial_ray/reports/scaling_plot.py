"""Picture of a simulated run over the number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trial_ray.reports.plots import COLOURS, DASHES, drawing


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """A simulated run.

    Attributes:
        gpus: number.
        iteration_s: seconds an iteration with losses of nodes; infinite where it hardly gets on.
        gpu_hours: of 1,000 episodes.
        limit: the part that limits it, where more GPUs stop helping; else empty.
    """

    gpus: int
    iteration_s: float
    gpu_hours: float
    limit: str = ""


def plot_scaling(lines: Mapping[str, Sequence[ScalingPoint]], title: str, path: Path) -> None:
    """Seconds an iteration, and GPU hours of 1,000 episodes, against GPUs; a dot marks where more of them stop helping.

    Args:
        lines: points by the kind of run, ascending by GPUs.
        title: of the figure.
        path: of the PNG or SVG file.
    """
    with drawing([path], (9.5, 4.0), columns=2) as (figure, axes):
        figure.suptitle(title)
        styles = zip(COLOURS, DASHES, ("o", "s", "^"), strict=False)
        for (kind, points), (colour, dash, marker) in zip(lines.items(), styles, strict=False):
            gpus = [each.gpus for each in points]
            limited = next((each for each in points if each.limit), None)
            label = f"{kind}: up to {limited.gpus:,}, then {limited.limit}" if limited else kind
            for axis, name in zip(axes, ("iteration_s", "gpu_hours"), strict=True):
                values = [value if math.isfinite(value := getattr(each, name)) else math.nan for each in points]
                axis.plot(gpus, values, dash, color=colour, label=label)
                if limited:
                    axis.plot([limited.gpus], [getattr(limited, name)], marker, color=colour)
        for axis, label in zip(axes, ("seconds an iteration", "GPU hours of 1,000 episodes"), strict=True):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel("GPUs")
            axis.set_ylabel(label)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            for setter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
                setter(lambda value, _: f"{value:,.4g}")
            axis.grid(True)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
