"""Trainer–sampler mismatch: rounding compared with wrong weights.

    python benchmarks/bench_logprob_gap.py --json benchmarks/results/logprob_gap.json

SmolLM2-135M answers prompts in float32 at temperature 1. Its responses are then scored as a learner would score them: by the same
model in float32 with other batch shapes, in bfloat16, and by models with weights as after a broken sync. The limits
``FLOAT32_GAP`` and ``LOW_PRECISION_GAP`` of ``trial_ray.engines.protocol`` must be above the mismatch from rounding and below that
from wrong weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from measure import Measure, report_parser, write_report
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from trial_ray.engines.protocol import FLOAT32_GAP, LOW_PRECISION_GAP
from trial_ray.models.folders import prepare_smollm2
from trial_ray.objectives.divergences import engine_divergences

QUESTIONS = [
    f"You are in the middle of a room. You see a {place}. Your task is to {task}. What do you do, and why?"
    for place in ("cabinet 1, a fridge 1 and a sink basin 1", "desk 1 and a bed 1", "countertop 2")
    for task in ("put a clean apple on the table", "find two pillows", "heat a mug", "look at the book under the lamp")
]
RESPONSE_TOKENS = 48
ROUNDED, LOW_PRECISION = "float32, rows in one padded batch", "bfloat16"


def logprobs_of(model: nn.Module, sequences: list[tuple[int, torch.Tensor]], temperature: float = 1.0) -> torch.Tensor:
    return torch.cat([pick(model(ids[None]).logits[0] / temperature, start, ids) for start, ids in sequences])


def padded_logprobs_of(model: nn.Module, sequences: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    logits = model(nn.utils.rnn.pad_sequence([ids for _, ids in sequences], batch_first=True)).logits
    return torch.cat([pick(logits[row], start, ids) for row, (start, ids) in enumerate(sequences)])


def pick(logits: torch.Tensor, start: int, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of a sequence's ids from the index ``start`` on."""
    logprobs = torch.log_softmax(logits[start - 1 : len(ids) - 1].float(), -1)
    return logprobs.gather(-1, ids[start:, None]).squeeze(-1)


def layer(model: nn.Module, index: int) -> nn.Module:
    return model.model.layers[index]


@torch.no_grad()
def main() -> None:
    args = report_parser(__doc__).parse_args()
    torch.manual_seed(0)
    folder = prepare_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        ids = engine.generate(
            prompt, max_new_tokens=RESPONSE_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
        sequences.append((prompt.shape[1], ids[0]))
    reported = logprobs_of(engine, sequences)
    scores = {
        ROUNDED: padded_logprobs_of(engine, sequences),
        "engine at temperature 0.7, learner at 1": logprobs_of(engine, sequences, temperature=0.7),
    }
    for name, change in changes(engine).items():
        learner = copy.deepcopy(engine)
        change(learner)
        scores[name] = logprobs_of(learner, sequences)
    rows = {}
    for name, scored in scores.items():
        rows[name] = {key: value.item() for key, value in engine_divergences(scored, reported).items()}
        print(f"{name:50s} gap {rows[name]['logprob_diff']:.2e}  kl {rows[name]['kl']:.2e}", flush=True)
    limits = {"FLOAT32_GAP": FLOAT32_GAP, "LOW_PRECISION_GAP": LOW_PRECISION_GAP}
    write_report(args.json, measures(rows), {"tokens": len(reported), "limits": limits, "learners": rows})


def measures(rows: dict[str, dict[str, float]]) -> list[Measure]:
    """Return the measures for the table of all benchmarks: rounding is below the limits, wrong weights are above them."""
    gaps = {name: row["logprob_diff"] for name, row in rows.items()}
    rounded, low = gaps.pop(ROUNDED), gaps.pop(LOW_PRECISION)
    # Noise of 1 % on all weights has as small an effect as bfloat16's rounding, so no limit can separate the two.
    wrong, name = min((gap, name) for name, gap in gaps.items() if "off by" not in name)
    return [
        Measure("engine's gap by rounding, float32", rounded, "nats", FLOAT32_GAP, "lower", "SmolLM2-135M"),
        Measure("engine's gap by rounding, bfloat16", low, "nats", LOW_PRECISION_GAP, "lower", "SmolLM2-135M"),
        Measure("engine's gap by wrong weights, the least", wrong, "nats", LOW_PRECISION_GAP, note=name),
    ]


def changes(engine: nn.Module) -> dict[str, Callable[[nn.Module], object]]:
    """Return functions, by name, that change a copy of the engine's model in place: rounding to bfloat16, or wrong weights."""
    middle = engine.config.num_hidden_layers // 2

    def noise(scale: float) -> Callable[[nn.Module], object]:
        return lambda m: [p.add_(scale * p.std() * torch.randn_like(p)) for p in m.parameters()]

    return {
        LOW_PRECISION: lambda m: m.to(torch.bfloat16),
        "one projection is that of the next layer": lambda m: layer(m, middle).self_attn.q_proj.weight.copy_(
            layer(m, middle + 1).self_attn.q_proj.weight
        ),
        "one layer is the next one": lambda m: layer(m, middle).load_state_dict(layer(m, middle + 1).state_dict()),
        "one norm of the last layer is all ones": lambda m: layer(m, -1).post_attention_layernorm.weight.fill_(1.0),
        "the final norm is all ones": lambda m: m.model.norm.weight.fill_(1.0),
        "all weights off by 1 % of their deviation": noise(0.01),
        "all weights off by 5 % of their deviation": noise(0.05),
    }


if __name__ == "__main__":
    main()
