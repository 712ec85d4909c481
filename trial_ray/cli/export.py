"""``trial-ray export CHECKPOINT DIR``: copy the Hugging Face model out of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from trial_ray.cli import console as terminal

HELP = "copy the model out of a checkpoint, in Hugging Face format"
EPILOG = """examples:
  trial-ray export runs/my-run exported/agent
  trial-ray export runs/my-run/checkpoints/000020 exported/agent
  trial-ray export runs/my-lora-run exported/adapter --adapter

DIR then loads with transformers (AutoModelForCausalLM.from_pretrained) and serves with vLLM (vllm serve DIR). Where a run
trained an adapter (lora_rank), it is merged into the weights; --adapter copies it alone, for peft.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run folder (its newest)"
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    parser.add_argument("--adapter", action="store_true", help="copy the adapter alone, in the format of peft")


def run(args: argparse.Namespace) -> int:
    """Copy."""
    from trial_ray.runs.checkpoints import export_model

    target = export_model(args.checkpoint, args.folder, adapter=args.adapter)
    terminal.show(f"{'adapter' if args.adapter else 'model'}: {target}")
    return terminal.DONE
