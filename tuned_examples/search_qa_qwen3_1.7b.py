"""Qwen3-1.7B answers NQ and HotpotQA with Search-R1's published GRPO settings, on 8 GPUs of 80 GB.

    trial-ray data search-qa --questions train.parquet test.parquet       # of Search-R1's nq_hotpotqa_train
    trial-ray train tuned_examples/search_qa_qwen3_1.7b.py --method grpo

The passages come from Search-R1's retrieval server, which has to run at RETRIEVER; with `--corpus wiki-18.jsonl` at the import and
without the retriever, BM25 searches on every node instead. The run needs the GPU build of vLLM.

In the published settings (scripts/nq_hotpotqa/v0.2/train_grpo.sh of Search-R1), an iteration has 512 questions of 5 rollouts and is
trained in minibatches of 256 episodes. Here a row is a turn, so a minibatch has four times as many rows. An episode is one
conversation with messages for the passages, in place of one response into which they are inserted. TRIAL uses the paper's λ.
"""

import dataclasses

from trial_ray import TRIALConfig
from trial_ray.adapters.search_qa import ADAPTER, SearchR1Template

RETRIEVER = "http://127.0.0.1:8000/retrieve"

config = (
    TRIALConfig()
    .environment(
        "trial/SearchQA-v0",
        env_config={"split": "train", "style": "search_r1", "retriever": RETRIEVER, "top_k": 3, "max_turns": 5},
        adapter=dataclasses.replace(ADAPTER, templates={"conversation": SearchR1Template(ADAPTER.template("tagged"))}),
    )
    .rl_module(model_path="Qwen/Qwen3-1.7B", compute_dtype="bfloat16", gradient_checkpointing=True)
    .rl_module(chat_template_kwargs={"enable_thinking": False})
    .training(
        # The learning rate rises for 0.285 of 1005 steps, each of which has about 2,560 episodes of four turns.
        lr=[[0, 0.0], [2_930_000, 1e-6]],
        weight_decay=0.01,
        grad_clip=1.0,
        num_epochs=1,
        group_size=5,
        tasks_per_iteration=512,
        minibatch_rows=1024,
        microbatch_rows=64,
        reward="return",
        reward_scale=1.0,
        invalid_action_penalty=0.0,
        clip_low=0.2,
        clip_high=0.2,
        ref_kl_coeff=0.001,
        entropy_coeff=0.001,
        hindsight_coeff=0.01,
        hindsight_start_iteration=50,
    )
    .env_runners(
        num_env_runners=8,
        num_cpus_per_env_runner=2,
        # A slow server must not stop the other episodes of an env runner.
        environment_processes=True,
        max_prompt_tokens=4096,
        max_response_tokens=500,
        temperature=1.0,
        top_p=1.0,
        prompt_style="conversation",
        stop_strings=["</search>", "</answer>"],
    )
    .engines(
        engine="vllm",
        num_engines=8,
        num_gpus_per_engine=0.5,
        colocate=True,
        engine_kwargs={"dtype": "bfloat16", "gpu_memory_utilization": 0.4},
    )
    .learners(num_learners=8, num_gpus_per_learner=0.5)
    .evaluation(evaluation_split="test", evaluation_num_tasks=512, evaluation_interval=100, evaluation_temperature=1.0)
    .debugging(seed=0)
)
stop = {"training_iteration": 1005}
