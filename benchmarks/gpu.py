"""Measurements that need a GPU, in parts of at most ten minutes.

    python benchmarks/gpu.py --json benchmarks/results/gpu    # make bench-gpu
    python benchmarks/gpu.py step --json FOLDER               # the named parts, even if they have results

| part | measures |
| --- | --- |
| ``numerics`` | log-probabilities and gradients of trees in bfloat16 and float32 against one row at a time in float32 |
| ``learner`` | model FLOPs utilisation of the learner, SmolLM2-135M's shape and Qwen3-1.7B's, bfloat16 |
| ``colocate`` | engine and learner on one device: putting the engine to sleep, waking it, sending weights |
| ``example`` | an iteration of the example for one GPU: peak memory by phase |
| ``step`` | Qwen2.5-1.5B's shape in ALFWorld, 8 tasks × 8 rollouts × 50 turns: seconds by phase |

A call without names runs each part in a new process, and skips parts that have a ``PART.json`` in the folder. Nothing is
downloaded: models have the shapes of the real ones and random weights. Without CUDA, the command exits with status 2;
``--device cpu --small`` runs every part on the CPU, only to check that the code works.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from learners import BenchLearner, Update, input_ids, relative_difference
from measure import Measure, ray_cluster, report_parser, run_script, write_report
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from trial_ray import TRIALConfig
from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.metrics import LEARNER
from trial_ray.models.prefix_tree import PrefixOrder
from trial_ray.models.tiny import build_tokenizer
from trial_ray.planning.time import RESPONSE_SHARE
from trial_ray.runs.metrics_file import flatten
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn
from trial_ray.user_files import run_user_file

TIMEOUT_S = 590.0
ONE_GPU = Path(__file__).parents[1] / "tuned_examples" / "alfworld_qwen3_1.7b_1gpu.py"
SMOLLM2, QWEN3, QWEN2_5 = "SmolLM2-135M", "Qwen3-1.7B", "Qwen2.5-1.5B"
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SHAPES = {
    SMOLLM2: (LlamaConfig, (49152, 576, 1536, 30, 9, 3, 64)),
    QWEN3: (Qwen3Config, (151936, 2048, 6144, 28, 16, 8, 128)),
    QWEN2_5: (Qwen2Config, (151936, 1536, 8960, 28, 12, 2, 128)),
}
SMALL = (2048, 64, 128, 2, 4, 2, 16)
Result = tuple[list[Measure], dict[str, Any]]


@dataclass(frozen=True)
class Setup:
    """Device and sizes of the measurements.

    Attributes:
        device: device of the measurements.
        small: whether to use the smallest sizes, at which figures have no meaning.
    """

    device: torch.device
    small: bool

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def model_config(self, name: str) -> PretrainedConfig:
        """Return the config of a model with this shape or, if ``small`` is set, of a very small model of the same architecture."""
        architecture, sizes = SHAPES[name]
        shape = dict(zip(SIZES, SMALL if self.small else sizes, strict=True))
        ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
        return architecture(**shape, **ids, tie_word_embeddings=True, max_position_embeddings=8192)

    def save_model(self, folder: str, name: str) -> str:
        """Write the model with random weights and a tokenizer that uses few of its ids; return the folder."""
        tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(self.model_config(name), dtype=torch.float32)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    def groups(self, vocabulary: int, tasks: int, turns: int) -> list[TrajectoryGroup]:
        """Return groups of 8 rollouts (2 if small) with prompts as in ALFWorld: about 700 tokens, of which 400 are the task's."""
        rng = np.random.default_rng(0)
        rollouts, task_tokens, own, answer = (2, 24, 8, 4) if self.small else (8, 400, 300, 60)

        def ids(count: int) -> np.ndarray:
            return rng.integers(10, vocabulary, count).astype(np.int32)

        def turn(task: np.ndarray, context: np.ndarray) -> Turn:
            prompt = np.concatenate([task, context])
            logprobs = np.zeros(answer, np.float32)
            return Turn(prompt, ids(answer), logprobs, 1, len(prompt) - 1, "", "look", True, "You look.", 0.0, "stop")

        def group(name: str) -> TrajectoryGroup:
            task, first = ids(task_tokens), ids(own)  # all rollouts of a task begin with the same observation
            played = [[turn(task, ids(own) if step else first) for step in range(turns)] for _ in range(rollouts)]
            return TrajectoryGroup(
                name, [Trajectory(name, "pick", index, each, index % 2 == 0) for index, each in enumerate(played)]
            )

        return [group(f"task-{number}") for number in range(tasks)]

    def seconds(self, function: Callable[[], Any], repeats: int) -> float:
        """Return the median seconds of some calls after two warm-up calls, or of one call at the smallest sizes."""
        calls = [self._once(function) for _ in range(1 if self.small else 2 + repeats)]
        return statistics.median(calls[-repeats:])

    def _once(self, function: Callable[[], Any]) -> float:
        began = time.perf_counter()
        function()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def device_bytes(self) -> int:
        """Return the memory of the device in use by all processes."""
        if not self.cuda:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free


# ---- the learner: numbers and utilisation ----


def trial_config(setup: Setup, model_path: str, compute_dtype: str) -> TRIALConfig:
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0")
        .rl_module(model_path=model_path, compute_dtype=compute_dtype)
        .training(
            ref_kl_coeff=0.0,
            entropy_coeff=0.0,
            minibatch_rows=256,
            microbatch_rows=32,
            max_tokens_per_forward=16_384,
            max_logprob_diff=1e9,  # no engine sampled the rows
        )
        .learners(num_learners=0, num_gpus_per_learner=1 if setup.cuda else 0)
    )


def numerics(setup: Setup) -> Result:
    """Compare log-probabilities and gradient of an update with one row at a time in float32, in SmolLM2-135M's shape."""
    torch.backends.cuda.matmul.allow_tf32 = False
    measures = []
    with tempfile.TemporaryDirectory() as folder:
        path = setup.save_model(folder, SMOLLM2)
        groups = setup.groups(setup.model_config(SMOLLM2).vocab_size, tasks=1, turns=2 if setup.small else 4)
        exact = BenchLearner(trial_config(setup, path, "float32")).update(groups, keep_gradients=True)
        low = BenchLearner(trial_config(setup, path, "bfloat16")).update(groups, keep_gradients=True)
        logprobs, gradient = one_row_at_a_time(setup, path, exact)
    for name, update, limit in (("float32", exact, 1e-4), ("bfloat16", low, 0.1)):
        gap = float((update.rows.logprobs - logprobs).abs().mean())
        difference = relative_difference(update.gradients[0], gradient)
        measures += [
            Measure(f"{name} trees: mean gap of log-probabilities", gap, "nats", limit, "lower"),
            Measure(f"{name} trees: difference of the gradient, relative", difference, "", limit, "lower"),
        ]
    return measures, {"tokens": len(logprobs), "rows": len(exact.rows)}


def one_row_at_a_time(setup: Setup, model_path: str, update: Update) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return all rows' log-probabilities, and the first minibatch's gradient of −A log π, the surrogate's gradient on policy."""
    lm = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(setup.device)
    table, step = update.rows, update.plan.steps[0]
    weight = {int(row): each.weight / len(table.token_positions(each.rows)) for each in step for row in each.rows}
    found = []
    for index, turn in enumerate(table.turns):
        ids = torch.tensor([[*turn.prompt_ids, *turn.response_ids]], device=setup.device).long()
        hidden = lm.get_decoder()(ids[:, :-1], use_cache=False).last_hidden_state[0, len(turn.prompt_ids) - 1 :]
        targets = ids[0, len(turn.prompt_ids) :]
        logprobs = torch.log_softmax(lm.get_output_embeddings()(hidden), -1).gather(-1, targets[:, None])[:, 0]
        found.append(logprobs.detach().cpu())
        if index in weight:
            (-float(table.advantages[index]) * weight[index] * logprobs.sum()).backward()
    return torch.cat(found), {name: each.grad for name, each in lm.named_parameters()}


def learner(setup: Setup) -> Result:
    """Time the forward and backward passes of an update in bfloat16."""
    size = 8192 if setup.cuda else 512
    one, other = (torch.randn(size, size, device=setup.device, dtype=torch.bfloat16) for _ in range(2))
    peak = 2 * size**3 / setup.seconds(lambda: one @ other, repeats=20)
    measures, details = [], {"matmul_flops": peak}
    for name, tasks in ((SMOLLM2, 8), (QWEN3, 4)):
        gc.collect()  # free the previous model, which is in a reference cycle
        with tempfile.TemporaryDirectory() as folder:
            bench = BenchLearner(trial_config(setup, setup.save_model(folder, name), "bfloat16"))
        measure, details[name] = utilisation(setup, name, bench, 1 if setup.small else tasks, peak)
        measures.append(measure)
        del bench
    return measures, details


def utilisation(setup: Setup, name: str, bench: BenchLearner, tasks: int, peak: float) -> tuple[Measure, dict]:
    groups = setup.groups(bench.lm.config.vocab_size, tasks, turns=2 if setup.small else 8)
    found: list[Update] = []
    setup.seconds(lambda: found.append(bench.update(groups)), repeats=3)
    update = min(found, key=lambda each: each.seconds)
    in_rows = sum(map(len, input_ids(update.rows, range(len(update.rows)), two_views=False)))
    forwarded, flops = update.tokens, tree_flops(bench.lm.config, update)
    memory = torch.cuda.max_memory_allocated() / 1e9 if setup.cuda else 0.0
    measure = Measure(
        f"{name}: utilisation of the learner's passes",
        100 * flops / update.seconds / peak,
        "%",
        40,
        note=f"{update.seconds:.2f} s for {forwarded:,} tokens forwarded of {in_rows:,} in rows; of {peak / 1e12:.0f} TFLOP/s of "
        f"a matrix product, peak memory {memory:.1f} GB",
    )
    return measure, {"seconds": update.seconds, "tokens": forwarded, "tokens_in_rows": in_rows, "flops": flops}


def tree_flops(config: PretrainedConfig, update: Update) -> float:
    """Return the operations of forward and backward passes (6 a weight and token) over the distinct prefixes of each minibatch.

    The operations are matrix products, attention of each token to all tokens of its prefix, and the output head.
    """
    hidden, size = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    weights = 2 * hidden * heads * size + 2 * hidden * kv_heads * size + 3 * hidden * config.intermediate_size
    total = 0.0
    for step in update.plan.steps:
        chosen = [sequence for each in step for sequence in update.rows.sequences(each.rows)]
        order = PrefixOrder(chosen)
        spans = zip(order.lengths.tolist(), order.shared.tolist(), strict=True)
        keys = sum((length * (length + 1) - shared * (shared + 1)) // 2 for length, shared in spans)
        total += config.num_hidden_layers * (6 * weights * order.num_distinct + 12 * heads * size * keys)
        total += 6 * hidden * config.vocab_size * sum(sequence.num_targets for sequence in chosen)
    return total


# ---- runs: engine and learner that share the device ----


@contextmanager
def running(setup: Setup, shape: str, tasks: int, turns: int, response_tokens: int | None = None) -> Iterator[Any]:
    """Build the algorithm of the example for one GPU, in generated games, with hindsight from the first iteration on.

    The model has the vocabulary size of the real one, but most token ids have no text, so responses do not lengthen prompts. With
    random weights, no game is won and no response ends early, so all episodes and responses have their maximum length.

    Args:
        setup: device and sizes; on the CPU, the engine is ``transformers``.
        shape: name of the model's shape, a key of ``SHAPES``.
        tasks: number of tasks of an iteration, each with 8 rollouts.
        turns: number of turns of an episode.
        response_tokens: maximum number of tokens of a response; ``None``: the example's limit.
    """
    tasks, turns = (2, 2) if setup.small else (tasks, turns)
    config = run_user_file(ONE_GPU, "one_gpu_example")["config"].copy(copy_frozen=False)
    games = {"split": "generated", "difficulty": "official", "num_games": 64, "max_turns": turns}
    config.environment(env_config=games)
    config.training(tasks_per_iteration=tasks, hindsight_start_iteration=1, max_logprob_diff=1e9)
    config.evaluation(evaluation_split=None, evaluation_interval=None).debugging(seed=0)
    if response_tokens is not None:
        config.env_runners(max_response_tokens=response_tokens)
    if not setup.cuda:
        config.engines(engine="transformers", num_gpus_per_engine=0, num_cpus_per_engine=0.5, engine_kwargs={})
        config.learners(num_gpus_per_learner=0, num_cpus_per_learner=0.5).resources(num_cpus_for_main_process=0.5)
        config.env_runners(num_env_runners=1, num_cpus_per_env_runner=0.5)
    elif importlib.util.find_spec("vllm") is None:
        kwargs = {"device": "cuda", "dtype": "bfloat16", "max_batch": 128}
        config.engines(engine="transformers", engine_kwargs=kwargs)
    if setup.small:
        config.training(group_size=2).env_runners(max_prompt_tokens=1024, max_response_tokens=4)
    with ray_cluster(8 if setup.cuda else 4) as folder:
        config.rl_module(model_path=setup.save_model(f"{folder}/model", shape))
        if setup.cuda:
            torch.cuda.empty_cache()
        algorithm = config.build_algo()
        try:
            yield algorithm
        finally:
            algorithm.stop()


def colocate(setup: Setup) -> Result:
    """Time each stage between two sampling phases; the engine verifies the checksum of the weights."""
    seconds: dict[str, list[float]] = {}

    def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            key = f"{name} {args[0]}" if name == "wake" else name
            began = time.perf_counter()
            result = function(*args, **kwargs)
            seconds.setdefault(key, []).append(time.perf_counter() - began)
            return result

        return call

    with running(setup, QWEN3, tasks=2, turns=2) as algorithm:
        pool, config = algorithm.engine_pool, algorithm.config
        for name in ("sleep", "wake", "sync"):
            setattr(pool, name, timed(getattr(pool, name), name))
        memory = {"awake": setup.device_bytes()}
        for version in range(1 if setup.small else 5):
            algorithm.learner_group.make_room(algorithm.engine_pool)
            memory["asleep"] = setup.device_bytes()
            algorithm.learner_group.send_weights(algorithm.engine_pool, 1000 + version)
    held = ", ".join(f"{value / 1e9:.1f} GB {state}" for state, value in memory.items())
    note = f"device memory {held}; weights by {config.transfer_backend()}, sleep level {config.sleep_level}"
    measures = [
        Measure(f"{config.engine} engine beside a learner: {name}", min(values), "s", note=note)
        for name, values in seconds.items()
    ]
    return measures, {"seconds": seconds, "memory_bytes": memory}


class PhaseMemory:
    """Records peak device memory in scoring and update: PyTorch's in this process, and all processes' (read every 0.1 s).

    Args:
        learner: a built ``GRPOLearner`` of this process, on a CUDA device.
        setup: setup with that device.
    """

    def __init__(self, learner: Any, setup: Setup) -> None:
        self._setup = setup
        self._device_peak = 0
        self.peaks: dict[str, dict[str, int]] = {}
        learner.scoring.scored_rows = self._measured(learner.scoring.scored_rows, "scoring")
        learner._optimizer_steps = self._measured(learner._optimizer_steps, "update")

    def _measured(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            torch.cuda.reset_peak_memory_stats()
            self._device_peak, ended = 0, threading.Event()
            thread = threading.Thread(target=self._look_until, args=(ended,), daemon=True)
            thread.start()
            found = function(*args)
            ended.set()
            thread.join()
            self.peaks[phase] = {
                "device": self._device_peak,
                "torch": torch.cuda.max_memory_allocated(),
                "torch_reserved": torch.cuda.max_memory_reserved(),
            }
            return found

        return call

    def _look_until(self, ended: threading.Event) -> None:
        while not ended.wait(0.1):
            self._device_peak = max(self._device_peak, self._setup.device_bytes())


def measured_iteration(algorithm: Any, setup: Setup) -> dict[str, Any]:
    """Run one iteration; return seconds and, on a GPU, peak memory by phase, rows and tokens.

    The driver measures all seconds except ``scoring``, which the learner measures and which is subtracted from ``update``.
    """

    def install(learner: Any) -> None:
        learner.phase_memory = PhaseMemory(learner, setup)

    if setup.cuda:
        algorithm.learner_group.ask(install)
    result = algorithm.train()
    memory = algorithm.learner_group.ask(lambda learner: learner.phase_memory.peaks)[0] if setup.cuda else {}
    metrics, clock = flatten(result), result["seconds"]
    scoring = float(metrics[f"{LEARNER}scoring/seconds"])
    seconds = {phase: float(clock[phase]) for phase in ("sampling", "update", "sync")} | {"scoring": scoring}
    seconds["update"] -= scoring
    kept = ("num_prompt_tokens", "num_response_tokens", "episode_len_mean")
    return {
        "seconds": seconds,
        "memory": memory,
        "rows": int(result["rows"]["given_to_learners"]),
        **{name: metrics[f"env_runners/{name}"] for name in kept},
        "logprob_diff": metrics.get(f"{LEARNER}engine/logprob_diff"),
        "engine": algorithm.config.engine,
        "actors": algorithm.actor_reports(),
    }


def example(setup: Setup) -> Result:
    """Return the peak memory by phase of the example for one GPU, with responses of full length.

    A quarter of the example's tasks and 8 of its 50 turns suffice for packs and caches of full size.
    """
    with running(setup, QWEN3, tasks=4, turns=8) as algorithm:
        details = measured_iteration(algorithm, setup)
    measures = [
        Measure(
            f"example for one GPU: peak memory, {phase}",
            peaks["device"] / 2**30,
            "GiB",
            note=", ".join(f"{name} {value / 2**30:.1f} GiB" for name, value in peaks.items()),
        )
        for phase, peaks in details["memory"].items()
    ]
    return measures, details


def step(setup: Setup) -> Result:
    """Run half of a published step of TRIAL, with responses of the mean length that ``trial-ray plan`` assumes.

    A short run with the same model before it compiles the kernels, which the measured run reads from caches.
    """
    tokens = round(RESPONSE_SHARE * run_user_file(ONE_GPU, "one_gpu_example")["config"].max_response_tokens)
    with running(setup, QWEN2_5, tasks=2, turns=3, response_tokens=tokens) as algorithm:
        algorithm.train()
    with running(setup, QWEN2_5, tasks=8, turns=50, response_tokens=tokens) as algorithm:
        details = measured_iteration(algorithm, setup)
    shares = ", ".join(f"{name} {value:.1f} s" for name, value in details["seconds"].items())
    name = f"a step of TRIAL in ALFWorld, {QWEN2_5}'s shape, 8 × 8 × 50"
    return [Measure(name, sum(details["seconds"].values()), "s", note=f"{details['rows']:,} rows; {shares}")], details


# ---- command ----

PARTS = {part.__name__: part for part in (numerics, learner, colocate, example, step)}


def run_parts(folder: Path | None) -> list[str]:
    """Run each part in a new process, which releases the GPU's memory at its end; return the parts that failed."""
    failed = []
    for part in PARTS:
        if folder and (folder / f"{part}.json").is_file():
            print(f"== {part}: {folder / part}.json is there", flush=True)
        elif not run_script(part, [__file__, part, *sys.argv[1:]], TIMEOUT_S):
            failed.append(part)
    return failed


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="the smallest sizes: only whether everything runs")
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"unknown parts: {', '.join(unknown)}; expected some of: {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} finds no CUDA device, and these measurements need one. Run them on a machine with a GPU; "
            "--device cpu --small only tries whether the code runs.",
            file=sys.stderr,
        )
        sys.exit(2)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not args.parts and (failed := run_parts(args.json)):
        sys.exit(f"failed: {', '.join(failed)}")
    for part in args.parts:
        if part in ("numerics", "learner"):  # RLlib gets the device from Ray
            ray.init("local", num_cpus=1, num_gpus=int(args.device == "cuda"), include_dashboard=False)
        report = PARTS[part](Setup(torch.device(args.device), args.small))
        ray.shutdown()  # the next part starts Ray again
        write_report(args.json / f"{part}.json" if args.json else None, *report)


if __name__ == "__main__":
    main()
