"""TRL's side of ``bench_trl.py`` and ``bench_sft.py``: it runs in ``.venv-bench`` without this package.

    .venv-bench/bin/python benchmarks/trl_worker.py METHOD ROWS MODEL

The worker reads one command per line from standard input, and answers each with a line of JSON on standard output.

With the METHOD ``grpo``, ``ROWS`` is a pickle of minibatches, each a list of ``(prompt_ids, response_ids, old_logprobs,
advantage)``. ``run PADDING BATCH_SIZE`` returns the seconds of all minibatches' ``training_step`` calls; ``gradient PADDING
BATCH_SIZE FILE`` also writes losses and gradients to FILE. With the PADDING ``generation``, every row is padded to the longest row
of the update, as TRL does before it splits a generation batch into batches of ``per_device_train_batch_size``. With ``sorted``,
which TRL does not offer, rows are sorted by length, and each batch is padded to its longest row.

With the METHOD ``sft``, ``ROWS`` is a pickle of the number of conversations per update, and all conversations, each
``(input_ids, labels)``. ``run BATCH_SIZE`` returns the seconds of an epoch of ``SFTTrainer.train`` and the number of forwarded
tokens, padding included; ``loss 1`` returns the mean loss of all response tokens before any training.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

Answer = Callable[..., dict[str, float]]
SETTINGS: dict[str, Any] = {
    "bf16": False,
    "gradient_checkpointing": False,  # TRL's default True costs an additional forward pass
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
}


class PreparedTrainer(GRPOTrainer):
    """TRL's trainer with prepared inputs: it neither generates nor scores completions."""

    def _prepare_inputs(self, generation_batch):
        return generation_batch


def load_model(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def grpo(minibatches: list, model_path: str, folder: str) -> Answer:
    """Return the function that answers the commands of the method ``grpo``."""
    settings = GRPOConfig(
        output_dir=folder,
        num_generations=8,
        per_device_train_batch_size=8,
        loss_type="dapo",  # the mean over all tokens of the accumulated batches
        beta=0.0,
        epsilon=0.2,
        delta=3.0,
        num_iterations=1,
        max_completion_length=16,
        temperature=1.0,
        **SETTINGS,
    )
    trainer = PreparedTrainer(
        model=load_model(model_path),
        processing_class=AutoTokenizer.from_pretrained(model_path, padding_side="left"),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "unused"}] * 8),
    )
    # TRL divides this loss by num_items_in_batch * accumulation steps / steps_per_generation; make the last two equal.
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    batches: dict[tuple[str, str], list] = {}

    def answer(command: str, padding: str, size: str, file: str | None = None) -> dict[str, float]:
        if (padding, size) not in batches:
            batches[padding, size] = prepared(minibatches, padding, int(size))
        kept: list | None = None if file is None else []
        seconds = update(trainer, batches[padding, size], kept)
        if file is not None:
            torch.save(kept, file)
        return {"seconds": seconds}

    return answer


def padded(rows: list, prompt_length: int, response_length: int, num_tokens: int) -> dict[str, torch.Tensor]:
    """Return rows as inputs of ``GRPOTrainer._compute_loss``: prompts padded on the left, completions on the right."""
    prompt_ids, prompt_mask = torch.zeros(2, len(rows), prompt_length, dtype=torch.long)
    response_ids, response_mask = torch.zeros(2, len(rows), response_length, dtype=torch.long)
    old = torch.zeros(len(rows), response_length)
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


def longest(rows: list) -> tuple[int, int]:
    """Return the lengths of the longest prompt and of the longest response."""
    return max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)


def prepared(minibatches: list, padding: str, batch_size: int) -> list[list[dict[str, torch.Tensor]]]:
    whole = longest([row for rows in minibatches for row in rows])
    result = []
    for rows in minibatches:
        num_tokens = sum(len(row[1]) for row in rows)
        if padding == "sorted":
            ordered = sorted(rows, key=lambda row: -len(row[0]) - len(row[1]))
        else:
            ordered = random.Random(0).sample(rows, len(rows))
        batches = [ordered[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        sizes = [longest(each) if padding == "sorted" else whole for each in batches]
        result.append([padded(each, *size, num_tokens) for each, size in zip(batches, sizes, strict=True)])
    return result


def update(trainer: PreparedTrainer, minibatches: list, kept: list | None) -> float:
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


def sft(rows: tuple[int, list], model_path: str, folder: str) -> Answer:
    """Return the function that answers the commands of the method ``sft``; each answer begins with the initial weights."""
    per_update, conversations = rows
    data = Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in conversations])

    def answer(command: str, batch_size: str) -> dict[str, float]:
        settings = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=int(batch_size),
            gradient_accumulation_steps=per_update // int(batch_size),
            num_train_epochs=1,
            max_length=None,
            # Packing and padding-free batches need FlashAttention, which does not run on CPUs.
            train_sampling_strategy="group_by_length",
            save_strategy="no",
            logging_strategy="no",
            **SETTINGS,
        )
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        model = load_model(model_path)
        trainer = SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
        return epoch(trainer) if command == "run" else mean_loss(trainer)

    return answer


def epoch(trainer: SFTTrainer) -> dict[str, float]:
    tokens = [0]

    def count(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        tokens[0] += args[0].numel()

    trainer.model.get_input_embeddings().register_forward_pre_hook(count)
    seconds = trainer.train().metrics["train_runtime"]
    return {"seconds": seconds, "tokens": tokens[0]}


def mean_loss(trainer: SFTTrainer) -> dict[str, float]:
    batches = list(trainer.get_train_dataloader())
    num_tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    with torch.no_grad():
        losses = [trainer.compute_loss(trainer.model, batch, num_items_in_batch=num_tokens) for batch in batches]
    return {"loss": float(sum(losses))}


def main() -> None:
    # Write answers to the real standard output, and redirect the output of libraries to standard error.
    answers, sys.stdout = sys.stdout, sys.stderr
    method, rows_file, model_path = sys.argv[1:]
    rows = pickle.loads(Path(rows_file).read_bytes())  # written by the benchmark a moment ago
    with tempfile.TemporaryDirectory() as folder:
        answer = {"grpo": grpo, "sft": sft}[method](rows, model_path, folder)
        print(json.dumps({"threads": torch.get_num_threads()}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(*line.split())), file=answers, flush=True)


if __name__ == "__main__":
    main()
