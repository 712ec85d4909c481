"""Qwen3-1.7B in ALFWorld with the paper's settings, on 8 GPUs of 80 GB.

    trial-ray train tuned_examples/alfworld_qwen3_1.7b.py

The run needs the official games (`ALFWORLD_DATA`) and the GPU build of vLLM. The chat template has thinking switched off, as in
the published runs; the response's own <think> block is part of the prompt's instruction.
"""

from paper_alfworld import paper_config

config = paper_config("Qwen/Qwen3-1.7B")
stop = {"training_iteration": 150}
