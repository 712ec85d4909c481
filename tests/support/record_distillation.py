"""Record the distillation losses of released code on random inputs, for tests/objectives/test_distillation.py.

    python tests/support/record_distillation.py PRIME_RL TRL     # checkouts of prime-rl 559b447 and TRL 1.16

Only the two functions are taken out of their files, because their packages need servers and CUDA.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

RECORD = Path(__file__).parents[1] / "data" / "distillation.json"
TOKENS, VOCABULARY = 10, 7


def functions_of(file: Path, names: set[str], **globals_: Any) -> dict[str, Any]:
    """Return functions of a file, without running anything else in it."""
    found = [node for node in ast.walk(ast.parse(file.read_text())) if getattr(node, "name", None) in names]
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    namespace = {"torch": torch, "F": functional, **globals_}
    exec(compile(ast.Module(found, []), str(file), "exec"), namespace)
    return namespace


def reverse_kl(checkout: Path) -> list[dict[str, Any]]:
    """prime-rl's loss of on-policy distillation, and its gradient; the sampled policy is near, so no token is dropped."""
    code = functions_of(
        checkout / "src/prime_rl/trainer/rl/loss.py",
        {"ref_kl_loss_fn", "compute_importance_ratio_and_mismatch_kl", "_safe_mean"},
        LossOutputs=SimpleNamespace,
    )
    cases = []
    for seed, shift in ((0, 0.0), (1, 0.05)):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda scale: scale * torch.randn(TOKENS, generator=generator, dtype=torch.float64)  # noqa: B023, E731
        old = -draw(2.0).abs() - 0.1
        current, teacher = old + draw(shift), old + draw(1.0)
        leaf, mask = current.clone().requires_grad_(), torch.rand(TOKENS, generator=generator) < 0.8
        inputs = SimpleNamespace(
            trainer_logprobs=leaf, inference_logprobs=old, ref_logprobs=teacher, loss_mask=mask, loss_weights=None
        )
        loss = code["ref_kl_loss_fn"](inputs).loss
        loss.backward()
        tensors = {"old": old, "current": current, "teacher": teacher, "mask": mask, "gradient": leaf.grad}
        cases.append({**{name: value.tolist() for name, value in tensors.items()}, "loss": loss.item()})
    return cases


def divergences(checkout: Path) -> list[dict[str, Any]]:
    """TRL's generalised Jensen-Shannon divergence as a mean over tokens, and its gradient."""
    code = functions_of(checkout / "trl/experimental/gkd/gkd_trainer.py", {"generalized_jsd_loss"})
    cases = []
    for seed, (beta, temperature) in enumerate(((0.5, 1.0), (0.1, 2.0), (0.9, 0.7))):
        generator = torch.Generator().manual_seed(seed)
        student, teacher = 2 * torch.randn(2, TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)
        leaf = student.clone().requires_grad_()
        loss = code["generalized_jsd_loss"](
            leaf[None], teacher[None], beta=beta, temperature=temperature, num_items_in_batch=TOKENS
        )
        loss.backward()
        tensors = {"student": student, "teacher": teacher, "gradient": leaf.grad}
        cases.append(
            {
                "mix": beta,
                "temperature": temperature,
                **{name: value.tolist() for name, value in tensors.items()},
                "loss": loss.item(),
            }
        )
    return cases


if __name__ == "__main__":
    prime_rl, trl = map(Path, sys.argv[1:])
    RECORD.write_text(json.dumps({"prime_rl": reverse_kl(prime_rl), "trl": divergences(trl)}) + "\n")
    print(RECORD)
