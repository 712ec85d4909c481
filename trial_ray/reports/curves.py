"""Metrics that reports draw, and how."""

from __future__ import annotations

from dataclasses import dataclass

from trial_ray.metrics import ENV_RUNNERS, EVALUATION, LEARNER


@dataclass(frozen=True, slots=True)
class Curve:
    """The chart of a metric in reports.

    Attributes:
        name: of the chart, in the page and in file names.
        section: of the page.
        title: heading of the chart.
        axis: what is on the vertical axis, with its unit.
        text: what the metric is, in a sentence.
        percent: whether values are shares.
        windowed: whether means over windows of iterations are shown, as in the paper's Figure 2.
    """

    name: str
    section: str
    title: str
    axis: str
    text: str
    percent: bool = False
    windowed: bool = False


CURVES = {
    f"{EVALUATION}success_rate": Curve(
        "panel",
        "learning",
        "Success on the evaluation set",
        "success",
        percent=True,
        text="Share of the evaluation set's episodes that were solved; failed episodes are excluded throughout.",
    ),
    f"{ENV_RUNNERS}success_rate": Curve(
        "success",
        "learning",
        "Success in training",
        "success",
        percent=True,
        text="Share of episodes that solved their task.",
    ),
    f"{ENV_RUNNERS}episode_return_mean": Curve(
        "return", "learning", "Return", "return", text="Mean over episodes of the undiscounted sum of rewards."
    ),
    f"{ENV_RUNNERS}episode_len_mean": Curve(
        "turns", "learning", "Turns of a rollout", "turns", text="Mean over episodes of the turns taken."
    ),
    f"{LEARNER}trial/dense_loss": Curve(
        "dense_loss",
        "hindsight",
        "Dense loss",
        "nats per token",
        "The dense hindsight loss (Eq. 7) before coefficient and clamp.",
    ),
    f"{LEARNER}trial/turn_score_mean": Curve(
        "turn_score",
        "hindsight",
        "Mean turn score",
        "nats per token",
        "How much hindsight revises a turn: mean absolute gap of its tokens (Eq. 5), in windows of 5 iterations.",
        windowed=True,
    ),
    f"{LEARNER}trial/turn_weight_std": Curve(
        "profile_std",
        "hindsight",
        "Spread of the profile",
        "standard deviation",
        "Standard deviation over turns of the multipliers that were applied (Eq. 6), in windows of 5 iterations.",
        windowed=True,
    ),
    f"{LEARNER}trial/clamp_saturated_fraction": Curve(
        "saturated",
        "hindsight",
        "Saturated share of the clamp",
        "share of microbatches",
        percent=True,
        text="Share of microbatches in which the clamp of Eq. 8 removed the dense gradient; 0 during warm-up.",
    ),
    f"{LEARNER}grpo/entropy": Curve(
        "entropy", "policy", "Entropy of the policy", "nats per token", "Mean over tokens."
    ),
    f"{LEARNER}grpo/kl": Curve(
        "kl",
        "policy",
        "KL divergence of the policy",
        "nats per token",
        "From the frozen reference; without a reference model, from the policy before the update.",
    ),
    f"{LEARNER}grpo/clip_fraction": Curve(
        "clip_fraction",
        "policy",
        "Clipped tokens",
        "share of tokens",
        percent=True,
        text="Share of tokens whose ratio is outside the clip range.",
    ),
    f"{LEARNER}engine/ratio_mean": Curve(
        "engine_ratio",
        "engine",
        "Mean importance ratio",
        "learner / engine",
        "Probability of the sampled tokens under the learner before the update, over that under the engine's policy.",
    ),
    f"{LEARNER}engine/ratio_max": Curve(
        "engine_ratio_max",
        "engine",
        "Largest importance ratio",
        "learner / engine",
        "The same ratio, its largest value in the iteration.",
    ),
    f"{LEARNER}engine/kl": Curve(
        "engine_kl",
        "engine",
        "KL divergence of engine and learner",
        "nats per token",
        "Estimated from the same ratios.",
    ),
    f"{LEARNER}engine/effective_sample_size": Curve(
        "sample_size",
        "engine",
        "Effective sample size",
        "share of tokens",
        "1 where all ratios are equal.",
        percent=True,
    ),
}
"""By the metric's key, in the order of the page."""
