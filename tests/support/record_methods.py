"""Record settings and methods of released code on random updates, for tests/algorithms/test_released_methods.py.

    python tests/support/record_methods.py FOLDER

FOLDER has checkouts named verl (1dda039), prime-rl (559b447), SERL (5a2a85b), ADRS (gitrxh/ADRS-arxiv, c4277ac), G2PO (55d811a),
SDPO (0e6d510) and SDAR (8b85c23); TRL 1.16 is the installed one. Functions are taken out of their files, because their packages
need servers and CUDA, and compute in float64, because float32 would turn equal returns into advantages.
"""

from __future__ import annotations  # inherited by the released code: its annotations are not evaluated

import ast
import asyncio
import json
import lzma
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.sdpo.loss_utils import compute_divergence
from trl.trainer.grpo_trainer import GRPOTrainer

RECORD = Path(__file__).parents[1] / "data" / "released_methods.json.xz"
FOLDER = Path(sys.argv[-1])
OPD = {"ref_kl_loss_fn", "compute_importance_ratio_and_mismatch_kl", "_safe_mean"}


class Names(dict):
    """Attributes that released code reads; the others are ``None``."""

    __getattr__ = dict.get


def code_of(file, names=None, **globals_):
    """Functions of a file, without running anything else in it; without ``names`` those outside classes."""
    tree = ast.parse((FOLDER / file).read_text())
    found = [node for node in ast.walk(tree) if names and getattr(node, "name", None) in names]
    found = found or [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in found:
        node.decorator_list = []
    namespace = Names(np=np, torch=torch, F=functional, defaultdict=defaultdict, Counter=Counter, **globals_)
    exec(compile(ast.Module(found, []), file, "exec"), namespace)
    return namespace


def core_of(checkout):
    helpers = code_of(f"{checkout}/verl/utils/torch_functional.py")
    return code_of(f"{checkout}/verl/trainer/ppo/core_algos.py", verl_F=helpers, AlgoConfig=list, ActorConfig=Names)


def random_update(seed, smallest, longest):
    """Columns of an update's turns and tokens: 4 groups of ``smallest`` to 5 rollouts of at most ``longest`` turns.

    The returns of the first group are equal.
    """
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(4), rng.integers(smallest, 6, 4))
    rollout = np.repeat(np.arange(len(group)), rng.integers(1, longest + 1, len(group)))
    score = np.where(group == 0, seed % 2, rng.choice([0, 0.25, 1], len(group)))
    length = rng.integers(1, 4, len(rollout))
    noise = rng.normal(0, 1, (3, length.sum()))
    old = -2 * np.abs(noise[0]) - 0.1
    columns = {
        "group": group[rollout],
        "rollout": rollout,
        "score": score[rollout],
        "observation": rng.integers(3, size=len(rollout)),
        "valid": rng.choice([0, 1, 1, 1], len(rollout)),
        "length": length,
        "old": old,
        "current": old + rng.choice([0, 0.3, 1.5], len(old)) * noise[1],
        "teacher": old + noise[2],
    }
    return {name: values.round(4).tolist() for name, values in columns.items()}


class Rows:
    """An update as released functions take it: a padded row for each turn."""

    def __init__(self, update):
        self.group, self.rollout, score, self.observation, valid = (np.array(update[name]) for name in list(update)[:5])
        self.score, self.valid, self.won = 10.0 * score, valid == 1, score == 1
        self.old, current, self.teacher, self.mask = (
            torch.nn.utils.rnn.pad_sequence(torch.tensor(values).split(update["length"]), batch_first=True)
            for values in (*list(update.values())[6:], [1.0] * len(update["old"]))
        )
        self.kept, self.leaf = self.mask.bool(), current.requires_grad_()

    def totals(self, of_turns):
        return functional.pad(torch.tensor(of_turns)[:, None], (0, self.mask.shape[1] - 1))

    def recorded(self, loss, *advantages):
        values = [values.expand_as(self.mask)[self.kept].tolist() for values in advantages]
        (gradient,) = torch.autograd.grad(loss, self.leaf)
        return {"advantages": values, "loss": loss.item(), "gradient": gradient[self.kept].tolist()}


def settings_of(rows):
    """Estimators and losses of verl, prime-rl and TRL for responses of one turn."""
    core, mask = CORES["verl"], rows.mask
    differ = [len({*rows.score[rows.group == group]}) > 1 for group in rows.group]
    trained = mask * torch.tensor(differ & rows.valid)[:, None]

    def estimate(name, **more):
        return core[f"compute_{name}_outcome_advantage"](rows.totals(rows.score), mask, index=rows.group, **more)[0]

    def max_rl():
        traces = [Names(reward=score, group=group) for score, group in zip(rows.score, rows.group, strict=True)]
        score = code_of(
            "prime-rl/src/prime_rl/orchestrator/algo/max_rl.py",
            {"score_group"},
            iter_trainable_traces=enumerate,
            assign_advantages=lambda trace, value: trace.update(advantage=value),
        ).score_group
        for group in {*rows.group}:
            asyncio.run(score(None, [trace for trace in traces if trace.group == group]))
        return torch.tensor([trace.advantage for trace in traces])[:, None] * mask

    def verl(advantages, loss="vanilla", how="token-mean", mask=mask, clips=(0.2, 0.2), dual=3.0):
        config = Names(
            clip_ratio_low=clips[0], clip_ratio_high=clips[1], clip_ratio_c=dual, tau_pos=1.0, tau_neg=1.05, global_batch_info={}
        )  # fmt: skip
        computed = core[f"compute_policy_loss_{loss}"](rows.old, rows.leaf, advantages, mask, how, config)
        return rows.recorded(computed[0], advantages)

    def trl(advantages, loss, mask=mask, level="token", clips=(0.2, 0.2)):
        trainer = Names(
            _get_per_token_logps_and_entropies=lambda *_, **__: (rows.leaf, mask, None),
            top_entropy_quantile=1.0, importance_sampling_level=level, beta=0.0, loss_type=loss, epsilon_low=clips[0],
            epsilon_high=clips[1], args=Names(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05), model=Names(),
            accelerator=Names(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
            max_completion_length=mask.shape[1], _metrics=defaultdict(lambda: defaultdict(list)),
        )  # fmt: skip
        inputs = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), mask)
        inputs |= {"advantages": advantages[:, 0], "old_per_token_logps": rows.old, "num_items_in_batch": mask.sum()}
        return rows.recorded(GRPOTrainer._compute_loss(trainer, None, inputs))

    grpo, centred = estimate("grpo"), estimate("grpo", norm_adv_by_std_in_grpo=False)
    rloo = estimate("rloo_vectorized")
    return {
        "rloo": verl(rloo),
        "max_rl": verl(max_rl()),
        "cispo": verl(grpo, "cispo", clips=(0.2, 0.28)),
        "sapo": verl(grpo, "sapo"),
        "sapo_trl": trl(grpo, "sapo"),
        "dapo": verl(grpo, clips=(0.2, 0.28), mask=trained, dual=np.inf),
        "dapo_trl": trl(grpo, "dapo", trained, clips=(0.2, 0.28)),
        "dr_grpo": verl(centred, how="seq-mean-token-sum-norm", dual=np.inf),
        "dr_grpo_trl": trl(centred, "dr_grpo"),
        "gspo": verl(grpo, "gspo", clips=(3e-4, 4e-4)),
        "gspo_trl": trl(grpo, "grpo", level="sequence", clips=(3e-4, 4e-4)),
        "minimax": verl(grpo, "cispo", clips=(1.0, 4.0)),
        "minimax_trl": trl(grpo, "cispo", clips=(None, 5.0)),
        "reinforce": verl(estimate("reinforce_plus_plus_baseline")),
    }


def rivals_of(rows, seed):
    """The rival methods, for rollouts of several turns."""
    core, mask, ends = CORES["ADRS"], rows.mask, np.append(np.diff(rows.rollout) != 0, True)
    arrays = {
        "uid": rows.group,
        "traj_uid": rows.rollout,
        "anchor_obs": rows.observation,
        "active_masks": rows.score >= 0,
        "rewards": 10.0 * rows.won * ends,
        "episode_rewards": 10.0 * rows.won,
    }
    batch = Names(batch={"input_ids": mask, "responses": mask}, non_tensor_batch=arrays)
    totals = rows.totals(10.0 * rows.won - 0.1 * ~rows.valid)

    def surrogate(advantages):
        loss = core.compute_policy_loss(rows.old, rows.leaf, advantages, mask, cliprange=0.2)[0]
        return rows.recorded(loss, advantages)

    def hgpo(checkout, mode, alpha, base):
        code = code_of(f"{checkout}/recipe/hgpo/core_hgpo.py", print=lambda text: None)
        steps = code.compute_step_discounted_returns(batch, 0.95) - torch.tensor(0.1 * ~rows.valid)
        return surrogate(
            code.compute_hgpo_outcome_advantage(
                totals.clone(), steps, mask, rows.observation, rows.group, rows.rollout, 2, 1e-6, mode, alpha, base
            )[0]
        )

    def g2po(mode):
        code = code_of("G2PO/g2po/core_g2po.py", SUCCESS_REWARD=10.0)
        values, *nodes = code.compute_group_aggregation_values(batch)
        return surrogate(
            code.compute_g2po_outcome_advantage(
                totals.clone(), values, mask, rows.group, rows.rollout, *nodes, rows.valid, mode=mode
            )[0]
        )

    def adrs(*, released):
        steps = mask.long() * 0 + torch.arange(len(mask))[:, None]
        reward = code_of("ADRS/verl/trainer/ppo/adrs_utils.py").compute_adrs_reward(
            rows.teacher, mask, step_boundary_mask=steps, token_level_rewards=totals, prompt_uids=rows.group,
            eta=0.02, tva_level="L2", normalize_mode="per_seq",
        )[0]  # fmt: skip
        given = {"eta": 0.02, "teacher_reward": reward, "wn_clip": 0.02, "wn_adaptive_clip": True} if released else {}
        advantages = core.compute_grpo_outcome_advantage(totals, mask, rows.group, rows.rollout, **given)[0]
        return surrogate(advantages if released else advantages + reward * mask)

    draw = np.random.default_rng(seed).normal(0, 2, (2, *mask.shape, 3)).round(3)
    logits, teacher = torch.tensor(draw[0]).requires_grad_(), torch.tensor(draw[1])
    views = [values.log_softmax(-1) for values in (logits, teacher)]

    def of_logits(loss, divergences):
        gradient = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        columns = {"logits": logits, "teacher_logits": teacher, "divergences": divergences, "gradient": gradient}
        return {name: values[rows.kept].tolist() for name, values in columns.items()} | {"loss": loss.item()}

    def sdpo(alpha, *, sampled=False):
        solved = {*rows.group[rows.won]}
        shown = [not won and group in solved for group, won in zip(rows.group, rows.won, strict=True)]
        config = Names(full_logit_distillation=not sampled, alpha=alpha, is_clip=2.0)
        loss = CORES["SDPO"].compute_self_distillation_loss(
            rows.leaf, rows.teacher, mask, config, rows.old, *views, self_distillation_mask=torch.tensor(shown).double()
        )[0]
        return rows.recorded(loss) if sampled else of_logits(loss, compute_divergence(*views, alpha))

    def opsd():
        mix, temperature = 0.9, 0.7
        loss = GKDTrainer.generalized_jsd_loss(
            logits[rows.kept][None], teacher[rows.kept][None], None, mix, temperature, num_items_in_batch=mask.sum()
        )
        tempered = [(values / temperature).log_softmax(-1) for values in (logits, teacher)]
        return of_logits(loss, compute_divergence(*tempered, mix))

    def opd():
        """prime-rl's loss without its penalty on drift; the sampled policy is so near that it drops no token."""
        rows.leaf = (rows.old + 0.05 * (rows.teacher - rows.old)).detach().requires_grad_()
        inputs = Names(
            trainer_logprobs=rows.leaf[rows.kept], inference_logprobs=rows.old[rows.kept],
            ref_logprobs=rows.teacher[rows.kept], loss_mask=mask[rows.kept].bool(),
        )  # fmt: skip
        code = code_of("prime-rl/src/prime_rl/trainer/rl/loss.py", OPD, LossOutputs=Names)
        loss = code.ref_kl_loss_fn(inputs).loss - 1e-3 * (rows.leaf - rows.old).square().sum()
        return {"current": rows.leaf[rows.kept].tolist(), **rows.recorded(loss / mask.sum())}

    skill_sd = code_of("SDAR/verl/trainer/ppo/skillsd_utils.py", agg_loss=core.agg_loss).compute_sdl_loss
    # Means of equal dyadic numbers are exact, so SERL's file recognises advantages of 0; other numbers leave 1e-16.
    return {
        "hgpo-serl": hgpo("SERL", "mean_std_norm", 1.0, False),
        "hgpo-adrs": hgpo("ADRS", "mean_std_norm", 1.0, False),
        "hgpo-base": hgpo("ADRS", "mean_norm", 0.5, True),
        "g2po": g2po("mean_std_norm"),
        "g2po-mean": g2po("mean_norm"),
        "adrs": adrs(released=True),
        "adrs-paper": adrs(released=False),
        "sdpo-sampled": sdpo(1.0, sampled=True),
        "sdpo": sdpo(1.0),
        "sdpo-jsd": sdpo(0.5),
        "opsd": opsd(),
        "skill_sd": rows.recorded(skill_sd(rows.leaf, rows.teacher, rows.old, mask)),
        "opd": opd(),
    }


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.float32, torch.Tensor.float, np.float32 = torch.float64, torch.Tensor.double, np.float64
    CORES = {name: core_of(name) for name in ("verl", "ADRS", "SDPO")}
    record = {"settings": [], "rivals": []}
    for number in range(40):
        if number % 4 == 0:
            drawn = random_update(number, smallest=2, longest=1)
            record["settings"].append({**drawn, "released": settings_of(Rows(drawn))})
        drawn = random_update(number, smallest=1, longest=4)
        record["rivals"].append({**drawn, "released": rivals_of(Rows(drawn), number)})
    rounded = json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.8g}"))
    RECORD.write_bytes(lzma.compress(json.dumps(rounded, separators=(",", ":")).encode()))
