"""Qwen3-1.7B in ALFWorld with the paper's settings, on one GPU of 80 GB.

    trial-ray train tuned_examples/alfworld_qwen3_1.7b_1gpu.py

The run needs the official games (`ALFWORLD_DATA`) and the GPU build of vLLM. All weights are trained: 1.72 billion parameters
are 6.9 GB of float32 weights, 13.8 GB of optimizer state and 4.1 GB of the reference. These 24.8 GB stay on the GPU. While the
engine samples, it may use 0.55 of the GPU, 44 GB: 3.4 GB of bfloat16 weights and about 37 GB of key-value cache. At 114,688
bytes a token, the cache has 320,000 tokens, enough for 128 prompts with responses of full length (2,560 tokens together). While
the learner updates, the engine sleeps; its memory is used for 6.9 GB of gradients and for the activations of 16,384 tokens a
pass, recomputed layer by layer. The figures are computed from shapes; no run on a GPU has confirmed them.
"""

from paper_alfworld import paper_config

config = (
    paper_config("Qwen/Qwen3-1.7B")
    .engines(num_engines=1, engine_kwargs={"dtype": "bfloat16", "gpu_memory_utilization": 0.55, "max_batch": 128})
    .env_runners(num_env_runners=2, num_cpus_per_env_runner=2)
    .learners(num_learners=1)
)
stop = {"training_iteration": 150}
