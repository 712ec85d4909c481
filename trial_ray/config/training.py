"""Settings of the update, of evaluation and of recovery, and the check of reward functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from trial_ray.config.declare import Section, Settings, setting
from trial_ray.errors import ConfigError
from trial_ray.objectives import AdvantageEstimator, ImportanceMode, PolicyLoss, RatioLevel, SurrogateMean

REWARDS = ("success", "score", "return", "per_turn")
Reward = Literal["success", "score", "return", "per_turn"] | Callable[..., Any] | list[Callable[..., Any]]
TOTAL = "total"
"""Name under which the weighted sum of several reward functions is logged."""
RECORDED_FUNCTION = "function "
"""Prefix of a reward function's name in a recorded config, which does not contain the function's code."""
TEACHER_CONTEXTS = ("outcome", "feedback", "skill", "solution", "peer")


def reward_name(reward: Reward) -> str:
    """Return the name of a value of the setting ``reward``: the value itself if it is a text, else the names of its functions."""
    if isinstance(reward, list):
        return ", ".join(map(reward_name, reward))
    return reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__).strip("<>")


class TrainingSettings(Settings):
    """Settings of the objective and its optimisation."""

    group_size: int = setting(8, "rollouts G per task", at_least=2)
    tasks_per_iteration: int = setting(16, "tasks drawn per iteration", at_least=1)
    task_sampling: str = setting(
        "uniform",
        'which tasks are drawn: ``"uniform"``, shuffled passes, or ``"success_rate"``: more often those that the policy solves '
        "sometimes (no better than uniform in the one study)",
        one_of=("uniform", "success_rate"),
    )
    minibatch_rows: int = setting(
        256,
        "maximum turn rows in an optimizer step, over all learners; each row is in one step per epoch; a conversation is in one "
        "step, even if it is longer",
        at_least=1,
    )
    microbatch_rows: int = setting(
        32,
        "maximum turn rows over which a token mean and the dense clamp are computed, at any number of learners",
        at_least=1,
    )
    num_epochs: int = setting(1, "passes over all rows of an iteration", at_least=1)
    batch_shards: int = setting(
        8,
        "parts of the batch, in task order; each minibatch takes a slice of each: 8 ranks in the published runs; 1: "
        "rows in task order",
        at_least=1,
    )
    shuffle: bool = setting(
        False, "draw the rows of minibatches at random (by the run's seed) instead of by ``batch_shards``"
    )
    microbatch_weighting: Literal["rows", "tokens", "equal"] = setting(
        "rows",
        'weight of a microbatch in its minibatch: by its ``"rows"`` with a token to learn from, by these ``"tokens"`` (the mean '
        'is then over the tokens of the minibatch), or ``"equal"`` as in the published runs',
    )
    max_tokens_per_forward: int = setting(
        16_384,
        "maximum tokens in a forward pass, repeated and padded ones included; limits memory, never changes the loss",
        at_least=1,
    )
    reward: Reward = setting(
        "success",
        'R_i: ``"success"`` (0 or 1), the environment\'s ``"score"`` or ``"return"``; ``"per_turn"``: success, and each '
        "turn's discounted return relative to the same turn of the group's other rollouts; or a function of the "
        "episode, or a list of functions",
    )
    reward_weights: dict[str, float] = setting(
        factory=dict,
        doc="weights of the named parts that a reward function returns, or of the functions of a list; 1 for others, "
        "0: only logged",
    )
    reward_timeout_s: float = setting(
        120.0, "deadline of a reward function in seconds, after which its rollout fails", above=0
    )
    turn_coeff: float = setting(1.0, 'with ``reward="per_turn"``, weight of the turns\' advantages', at_least=0)
    turn_discount: float = setting(0.95, 'with ``reward="per_turn"``, γ of the return from a turn on', within=(0, 1))
    reward_scale: float = setting(1.0, "factor on the reward; 10 in the published runs", above=0)
    advantage_statistics: str = setting(
        "trajectories",
        'mean and deviation over ``"trajectories"`` (Eq. 1) or turn ``"rows"``',
        one_of=("trajectories", "rows"),
    )
    advantage_estimator: AdvantageEstimator = setting(
        "group",
        'advantage of a rollout: ``"group"``, as ``advantage_norm`` says; ``"rloo"``: return minus the mean of the other rollouts; '
        '``"max_rl"``: return minus the mean, over the mean. Terms of single turns follow ``advantage_norm``',
    )
    advantage_norm: str = setting(
        "mean_std_norm",
        'advantage: return minus the group\'s mean, over the deviation (Eq. 1), or ``"mean_norm"``, not divided, or '
        '``"batch_norm"``, then standardised over all tokens of the iteration (REINFORCE++)',
        one_of=("mean_std_norm", "mean_norm", "batch_norm"),
    )
    advantage_epsilon: float = setting(1e-6, "number added to the deviation", above=0)
    drop_zero_variance_groups: bool = setting(
        False, "drop groups in which the method's advantages of all turns are 0, so that the surrogate has no gradient"
    )
    max_refills: int = setting(
        0,
        "with ``drop_zero_variance_groups``: times per iteration that tasks are drawn to replace dropped groups "
        "(dynamic sampling)",
        at_least=0,
    )
    invalid_action_penalty: float = setting(
        0.1,
        'subtracted from the scaled reward, and at most as much from the advantage (with ``advantage_statistics="rows"`` before '
        "it is normalised), of a turn whose response lacks the required format",
        at_least=0,
    )
    mask_truncated: bool = setting(
        False,
        "exclude responses that were truncated at ``max_response_tokens`` from the loss (DAPO; TRL: "
        "``mask_truncated_completions``); their rollouts stay in the group's statistics",
    )
    policy_loss: PolicyLoss = setting(
        "clip",
        'surrogate of a token: ``"clip"`` (PPO), ``"cispo"``: log-likelihood weighted by the clipped ratio, or ``"sapo"``: '
        "a soft gate in place of the clip",
    )
    sapo_temperatures: tuple[float, float] = setting(
        (1.0, 1.05), 'with ``policy_loss="sapo"``, τ for positive advantages and for the others', above=0
    )
    clip_low: float = setting(0.2, "lower clip of the probability ratio is ``1 - clip_low``", within=(0, 1))
    clip_high: float = setting(0.2, "upper clip of the probability ratio is ``1 + clip_high``", at_least=0)
    dual_clip: float | None = setting(
        3.0, "bound on the surrogate for negative advantages; ``None``: no bound", above=1
    )
    ref_kl_coeff: float = setting(
        0.01, "weight of the k3 KL to the frozen initial policy; 0 loads no reference model", at_least=0
    )
    entropy_coeff: float = setting(0.001, "weight of the entropy bonus", at_least=0)
    weight_decay: float = setting(0.01, "weight decay of AdamW", at_least=0)
    adam_betas: tuple[float, float] = setting((0.9, 0.999), "decay rates of AdamW's moments")
    max_logprob_diff: float | None = setting(
        None,
        "limit on the trainer–sampler mismatch (mean absolute difference of log-probabilities, nats), above which the run "
        "stops before it trains; ``None``: 0.001 if both compute in float32, else 0.1",
        above=0,
    )
    importance_cap: float | None = setting(
        None,
        "TIS cap on the weight of each token of the surrogate, the ratio of the learner's to the engine's probability; "
        "``None``: not weighted",
        at_least=1,
    )
    importance_mode: ImportanceMode = setting(
        "token_truncate",
        "with ``importance_cap``: the ratio of each ``token`` or of a whole response (``sequence``); ``truncate`` lowers "
        "it to the cap, ``mask`` drops token or response",
    )
    ratio_level: RatioLevel = setting(
        "token",
        'clipped ratio to the policy before the update: of each ``"token"`` or of a whole response (``"sequence"``: '
        "geometric mean of its tokens' ratios, GSPO)",
    )
    surrogate_mean: SurrogateMean = setting(
        "tokens",
        'mean of the surrogate over ``"tokens"``, over ``"rows"`` of each response\'s mean, or (``"fixed_length"``) of '
        "each response's sum divided by ``max_response_tokens`` (Dr. GRPO)",
    )
    max_skipped_updates: int = setting(
        3, "consecutive optimizer steps that may be skipped for non-finite gradients", at_least=1
    )
    teacher_context: str | None = setting(
        None,
        'teacher context of a turn: ``"outcome"`` of the action, ``"feedback"`` (the same as immediate feedback), '
        '``"skill"`` (advice on the task\'s family), ``"solution"`` (the environment\'s own), ``"peer"`` (in a failed '
        "rollout, the actions of a successful one); ``None``: none",
        one_of=TEACHER_CONTEXTS,
    )
    max_outcome_tokens: int = setting(
        512, "longest teacher context, in tokens; longer ones lose their middle, which is marked", at_least=1
    )
    teacher_model: str | None = setting(
        None,
        "model that scores the responses as the teacher, with the teacher context if there is one: a folder, a name on the model "
        "hub or ``package:NAME``, with the policy's vocabulary; ``None``: the policy itself",
    )
    teacher_sync_iterations: int | None = setting(
        None,
        "iterations between syncs of a stale copy of the policy that scores the teacher context; ``None``: the "
        "policy before the update scores it",
        at_least=1,
    )

    training = Section("Set the objective and the optimisation.", of_subclasses=True)


class EvaluationSettings(Settings):
    """Settings of evaluations, which play one rollout per task."""

    evaluation_env_config: dict[str, Any] = setting(
        factory=dict, doc="entries that replace entries of the training ``env_config``"
    )
    evaluation_split: str | dict[str, str] | None = setting(
        None,
        "split of the tasks; in a mixture of environments also a dict by name, with ``evaluation_env_config`` by name "
        "too; ``None``: no evaluation set",
    )
    evaluation_num_tasks: int = setting(128, "tasks in the evaluation set", at_least=1)
    evaluation_seed: int = setting(0, "chooses the tasks and seeds the rollouts")
    evaluation_temperature: float = setting(0.4, "sampling temperature; 0 is greedy", at_least=0)
    evaluation_top_p: float = setting(1.0, "nucleus mass", above=0, within=(0, 1))

    evaluation = Section("Choose the held-out tasks that are played before, during and after training, and how.")


class HealthCheckSettings(Settings):
    """Settings of the health checks: limits beyond which a policy counts as diverged."""

    health_check_action: str = setting(
        "stop",
        'after ``health_check_patience`` consecutive violations ``"stop"`` saves the state aside and ends the run with exit code '
        '1, ``"warn"`` only warns',
        one_of=("stop", "warn"),
    )
    health_check_patience: int = setting(
        5,
        "consecutive iterations that violate one check before ``health_check_action`` follows; at most 2 after a collapse from "
        "one iteration to the next",
        at_least=1,
    )
    max_kl: float | None = setting(5.0, "largest ``grpo/kl``, in nats a token, each counted as 10 at most", above=0)
    max_mean_ratio: float | None = setting(
        10.0, "largest ``grpo/ratio_mean`` and ``engine/ratio_mean``, which are near 1 in healthy runs", above=1
    )
    min_entropy: float | None = setting(
        1e-4, "lower limit on ``grpo/entropy``, nats a token; checked once it has been ten times as large", above=0
    )
    min_response_tokens: float | None = setting(
        1.5,
        "lower limit on the mean length of a response, stop token included; checked once it has been twice as large",
        above=0,
    )
    max_cut_response_rate: float | None = setting(
        1.0,
        "share of responses truncated at ``max_response_tokens`` that is a violation; checked once it has been at most "
        "half of this",
        above=0.5,
    )
    min_valid_rate: float | None = setting(
        0.01,
        "lower limit on the share of valid turns (response well-formed, action understood); checked once it has been ten "
        "times as large",
        within=(0, 0.1),
    )

    max_update_kl: float | None = setting(
        0.1,
        "largest ``grpo/update_kl``; above it, or if the share of invalid turns doubles, a warning names what to lower",
        above=0,
    )

    health_checks = Section("Set when a policy counts as diverged; ``None`` disables a check.")


class RecoverySettings(Settings):
    """Settings for detecting hanging runs and restarting from the last checkpoint."""

    max_restarts: int = setting(
        3,
        "restarts of ``trial-ray train`` from the newest checkpoint, with new actors, after failures other than "
        "wrong input; 0: none",
        at_least=0,
    )
    stall_timeout_s: float = setting(
        1200.0,
        "seconds without progress (no turn, engine step or forward pass) after which ``trial-ray train`` replaces "
        "engines and env runners; must exceed the longest of these steps",
        above=0,
    )

    fault_tolerance = Section("Set how a run recovers from failures.")


# -- check of the setting `reward` -----------------------------------------------------------------------------------------


def check_reward(reward: Any, weights: Mapping[str, float]) -> None:
    """Reject a reward that is neither a known name nor functions that can be sent to actors, and weights of unknown functions.

    Args:
        reward: the setting ``reward``.
        weights: the setting ``reward_weights``.

    Raises:
        ConfigError: the reward or a weight is invalid; the message contains the value.
    """
    if isinstance(reward, str) and (reward in REWARDS or reward.startswith(RECORDED_FUNCTION)):
        if weights and reward in REWARDS:
            raise ConfigError(f"reward_weights weighs the parts of a reward function, but reward is {reward!r}.")
        return
    functions = reward if isinstance(reward, list) else [reward]
    if not functions or not all(map(callable, functions)):
        raise ConfigError(
            f"reward is {reward!r}, expected one of {', '.join(map(repr, REWARDS))}, or a function that is called with "
            "each episode and returns a number, or a list of such functions."
        )
    for function in functions:
        _check_function(function)
    if isinstance(reward, list):
        names = [reward_name(function) for function in functions]
        if len({*names, TOTAL}) <= len(names):
            raise ConfigError(
                f"The reward functions are called {', '.join(names)}, and their rewards are logged by these names; expected "
                f"different names other than {TOTAL!r}, the name of their sum."
            )
        if unknown := sorted(weights.keys() - {*names}):
            raise ConfigError(f"reward_weights names {', '.join(unknown)}; expected names of {', '.join(names)}.")


def _check_function(function: Any) -> None:
    """Reject a function that cannot be called with an episode, logged by its name or sent to actors.

    Raises:
        ConfigError: the function is rejected; the message contains its name.
    """
    # Import here, because Ray takes long to import.
    from ray import cloudpickle

    from trial_ray.adapters.guarded import REWARD_NAME

    name = reward_name(function)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"The reward function {name} cannot be called with one argument, the episode: {error}."
        ) from error
    except ValueError:  # Some callables, such as functions in C, have no signature.
        pass
    if not REWARD_NAME.fullmatch(name):
        raise ConfigError(
            f"The reward function is called {name!r:.100}, and its reward is logged by that name; expected at most 64 ASCII "
            "letters, digits and '_'."
        )
    try:
        cloudpickle.dumps(function)
    except Exception as error:  # Objects that the function refers to may raise any error.
        raise ConfigError(
            f"The reward function {name} cannot be sent to env runners ({type(error).__name__}: {error}). "
            "Create clients, locks and open files inside the function."
        ) from error
