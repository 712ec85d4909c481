"""TRL's side of ``bench_sft.py``: it runs in ``.venv-bench`` without this package and answers on standard output.

    .venv-bench/bin/python benchmarks/trl_sft_worker.py ROWS MODEL

``ROWS`` is a pickle of the number of conversations per update, and all conversations, each ``(input_ids, labels)``. The worker
reads one command per line from standard input. ``run BATCH_SIZE`` returns the seconds of an epoch of ``SFTTrainer.train`` and
the number of forwarded tokens, padding included; ``loss 1`` returns the mean loss of all response tokens before any training.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def make_trainer(conversations: list, model_path: str, batch_size: int, per_update: int, folder: str) -> SFTTrainer:
    settings = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=per_update // batch_size,
        num_train_epochs=1,
        max_length=None,
        # Packing and padding-free batches need FlashAttention, which does not run on CPUs.
        train_sampling_strategy="group_by_length",
        bf16=False,
        gradient_checkpointing=False,  # TRL's default True costs an additional forward pass
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in conversations]),
        processing_class=AutoTokenizer.from_pretrained(model_path),
    )


def epoch(trainer: SFTTrainer) -> dict[str, float]:
    tokens = [0]

    def count(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        tokens[0] += args[0].numel()

    hook = trainer.model.get_input_embeddings().register_forward_pre_hook(count)
    seconds = trainer.train().metrics["train_runtime"]
    hook.remove()
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
    rows_file, model_path = sys.argv[1:]
    per_update, conversations = pickle.loads(Path(rows_file).read_bytes())  # written by bench_sft.py a moment ago
    print(json.dumps({"threads": torch.get_num_threads()}), file=answers, flush=True)
    for line in sys.stdin:
        command, batch_size = line.split()
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(conversations, model_path, int(batch_size), per_update, folder)
            result = epoch(trainer) if command == "run" else mean_loss(trainer)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
