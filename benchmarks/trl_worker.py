"""TRL's side of ``bench_trl.py``: it runs in ``.venv-bench`` without this package and answers on standard output.

    .venv-bench/bin/python benchmarks/trl_worker.py ROWS MODEL

``ROWS`` is a pickle of minibatches, each a list of ``(prompt_ids, response_ids, old_logprobs, advantage)``. The worker
reads one command per line from standard input. ``run PADDING BATCH_SIZE`` returns the seconds of all minibatches'
``training_step`` calls; ``gradient PADDING BATCH_SIZE FILE`` also writes losses and gradients to FILE. With the PADDING
``generation``, every row is padded to the longest row of the update, as TRL does before it splits a generation batch into batches
of ``per_device_train_batch_size``. With ``sorted``, which TRL does not offer, rows are sorted by length, and each batch is padded
to its longest row.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class PreparedTrainer(GRPOTrainer):
    """TRL's trainer with prepared inputs: it neither generates nor scores completions."""

    def _prepare_inputs(self, generation_batch):
        return generation_batch


def make_trainer(model_path: str, output_dir: str) -> PreparedTrainer:
    settings = GRPOConfig(
        output_dir=output_dir,
        num_generations=8,
        per_device_train_batch_size=8,
        loss_type="dapo",  # the mean over all tokens of the accumulated batches
        beta=0.0,
        epsilon=0.2,
        delta=3.0,
        num_iterations=1,
        max_completion_length=16,
        temperature=1.0,
        bf16=False,
        gradient_checkpointing=False,  # TRL's default True costs an additional forward pass
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = PreparedTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model_path, padding_side="left"),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "unused"}] * 8),
    )
    # TRL divides this loss by num_items_in_batch * accumulation steps / steps_per_generation; make the last two equal.
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    return trainer


def padded(rows: list, prompt_length: int, response_length: int, num_tokens: int) -> dict[str, torch.Tensor]:
    """Return rows as inputs of ``GRPOTrainer._compute_loss``: prompts padded on the left, completions on the right."""
    shapes = (len(rows), prompt_length), (len(rows), response_length)
    prompt_ids, prompt_mask = torch.zeros(shapes[0], dtype=torch.long), torch.zeros(shapes[0], dtype=torch.long)
    response_ids, response_mask = torch.zeros(shapes[1], dtype=torch.long), torch.zeros(shapes[1], dtype=torch.long)
    old = torch.zeros(shapes[1])
    for index, (prompt, response, logprobs, _) in enumerate(rows):
        prompt_ids[index, prompt_length - len(prompt) :] = torch.as_tensor(prompt)
        prompt_mask[index, prompt_length - len(prompt) :] = 1
        response_ids[index, : len(response)] = torch.as_tensor(response)
        response_mask[index, : len(response)] = 1
        old[index, : len(response)] = torch.as_tensor(logprobs)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": response_ids,
        "completion_mask": response_mask,
        "old_per_token_logps": old,
        "advantages": torch.tensor([row[3] for row in rows]),
        "num_items_in_batch": torch.tensor(num_tokens),
    }


def longest(rows: list, column: int) -> int:
    return max(len(row[column]) for row in rows)


def prepared(minibatches: list, padding: str, batch_size: int) -> list[list[dict[str, torch.Tensor]]]:
    everything = [row for rows in minibatches for row in rows]
    whole = longest(everything, 0), longest(everything, 1)
    result = []
    for rows in minibatches:
        num_tokens = sum(len(row[1]) for row in rows)
        if padding == "sorted":
            ordered = sorted(rows, key=lambda row: -len(row[0]) - len(row[1]))
        else:
            ordered = random.Random(0).sample(rows, len(rows))
        batches = [ordered[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        sizes = [(longest(each, 0), longest(each, 1)) if padding == "sorted" else whole for each in batches]
        result.append([padded(each, *size, num_tokens) for each, size in zip(batches, sizes, strict=True)])
    return result


def update(trainer: PreparedTrainer, minibatches: list, kept: list | None = None) -> float:
    """Return the seconds of all minibatches' passes; append losses and gradients to ``kept``."""
    seconds = 0.0
    for batches in minibatches:
        began = time.perf_counter()
        trainer.model.zero_grad(set_to_none=True)
        losses = [trainer.training_step(trainer.model, batch, None) for batch in batches]
        seconds += time.perf_counter() - began
        if kept is not None:
            gradients = {name: each.grad.clone() for name, each in trainer.model.named_parameters()}
            kept.append({"loss": float(sum(losses)), "gradient": gradients})
    return seconds


def main() -> None:
    # Write answers to the real standard output, and redirect the output of libraries to standard error.
    answers, sys.stdout = sys.stdout, sys.stderr
    rows_file, model_path = sys.argv[1:]
    minibatches = pickle.loads(Path(rows_file).read_bytes())  # written by bench_trl.py a moment ago
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model_path, folder)
        batches = {}
        print(json.dumps({"threads": torch.get_num_threads()}), file=answers, flush=True)
        for line in sys.stdin:
            command, padding, size, *file = line.split()
            key = padding, int(size)
            if key not in batches:
                batches[key] = prepared(minibatches, *key)
            kept: list | None = [] if command == "gradient" else None
            seconds = update(trainer, batches[key], kept)
            if file:
                torch.save(kept, file[0])
            print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
