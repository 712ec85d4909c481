"""Qwen2.5-3B-Instruct in ALFWorld with the paper's settings, on 8 GPUs of 80 GB.

    trial-ray train tuned_examples/alfworld_qwen2.5_3b.py

The run needs the official games (`ALFWORLD_DATA`) and the GPU build of vLLM.
"""

from paper_alfworld import paper_config

config = paper_config("Qwen/Qwen2.5-3B-Instruct")
stop = {"training_iteration": 150}
