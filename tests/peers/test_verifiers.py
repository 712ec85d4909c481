"""verifiers evaluates these environments with its command line; the rewards are those of the plain environment.

A local OpenAI-compatible endpoint (vLLM's, on the CPU) serves a small model. verifiers' ``null`` harness installs its
chat program's packages with ``uv`` when it runs for the first time.
"""

import ast
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import gymnasium
import pytest
from commands import completed
from exported_games import run_example
from fitted_model import fit_model, fit_tokenizer
from vllm_server import served

from trial_envs.chat import SYSTEM_PROMPT, user_message
from trial_envs.core.projection import project_action
from trial_envs.errors import UnknownSplitError

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[2]
SETTINGS = {"difficulty": "tiny", "max_turns": 6, "num_games": 20}
FITTED_TASKS = 3
EVALUATION_SECONDS = 900


@pytest.fixture(scope="module")
def plugin():
    pytest.importorskip("verifiers.v1")
    import trial_envs.exports.verifiers

    return trial_envs.exports.verifiers


def make():
    """Return the plain environment."""
    return gymnasium.make("trial/ALFWorld-v0", split="generated", **SETTINGS)


@pytest.fixture
def programs():
    """The folder of programs of the environment below this one, which has vLLM and uv."""
    spec = find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    return Path(spec.origin).parents[4] / "bin"


def evaluate(endpoint, programs, folder):
    """Run ``vf-eval`` with this package's taskset on four tasks, each twice; return the traces that it wrote."""
    words = (
        f"{Path(sys.executable).with_name('vf-eval')} trial-verifiers --no-rich -o {folder} --run.name run -m tiny --no-push "
        f"--client.base-url {endpoint} --sampling.max-tokens 64 --sampling.temperature 1.0 -r 2 -c 4 --env.taskset.num-tasks 4 "
        "--env.taskset.env-id trial/ALFWorld-v0 --env.taskset.split generated --env.taskset.settings"
    ).split()
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}"}
    command = [*words, json.dumps(SETTINGS)]
    done = completed(command, env=env, timeout=EVALUATION_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "run/traces.jsonl").read_text().splitlines()]


def play(task, responses):
    """Return the conversation of an episode in the plain environment, and its return."""
    env = make()
    observation, info = env.reset(options={"task": task})
    messages, total = [{"role": "system", "content": SYSTEM_PROMPT}], 0.0
    for response in responses:
        messages.append({"role": "user", "content": user_message(observation, info)})
        messages.append({"role": "assistant", "content": response})
        observation, reward, _, _, info = env.step(project_action(response.strip()).action)
        total += reward
    return messages, total


@pytest.fixture
def policy(tmp_path):
    """A model folder: a small model fitted to conversations that win the first tasks, so that some rewards are not zero."""
    env = make()
    texts = []
    for task in range(FITTED_TASKS):
        env.reset(options={"task": task})
        responses = [f"<think>so</think><action>{action}</action>" for action in env.unwrapped.walkthrough]
        texts.append(play(task, responses)[0])
    tokenizer = fit_tokenizer("qwen2.5", [message["content"] for messages in texts for message in messages])
    model = fit_model(tokenizer, [tokenizer.apply_chat_template(messages, tokenize=False) for messages in texts])
    folder = tmp_path / "policy"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_rewards_of_an_evaluation_are_those_of_the_replayed_actions(plugin, programs, policy, tmp_path):
    with served(programs / "python", policy, tmp_path / "log", "--max-model-len", "2048") as endpoint:
        episodes = evaluate(endpoint, programs, tmp_path)
    rewards = []
    for episode in episodes:
        (trace,) = episode["traces"]
        assert episode["ok"], episode["errors"]
        messages = [node["message"] for node in trace["nodes"]]
        responses = [message["content"] for message in messages if message["role"] == "assistant"]
        conversation, total = play(trace["task"]["data"]["task_id"], responses)
        assert [{name: message[name] for name in ("role", "content")} for message in messages] == conversation
        assert trace["rewards"] == {"environment": {"score": total, "weight": 1.0}}
        assert trace["metrics"]["won"] == trace["metrics"]["score"] == trace["metrics"]["total_reward"] == total
        assert trace["metrics"]["turns"] == len(responses) > 0
        rewards.append(total)
    expected = make().unwrapped.tasks()[:4]
    assert sorted(episode["task"]["data"]["task_id"] for episode in episodes) == sorted([*expected, *expected])
    assert max(rewards) == 1.0


def test_a_taskset_lists_the_tasks_of_its_split(plugin):
    env = plugin.load_environment("trial/WebShop-v0", split="generated", num_tasks=3, difficulty="tiny", num_games=10)
    assert [task.data.task_id for task in env.taskset] == ["0", "1", "2"]
    for env_id, settings, error in (
        ("trial/ALFWorld-v0", {"split": "none"}, UnknownSplitError),
        ("CartPole-v1", {}, TypeError),
    ):
        with pytest.raises(error):
            list(plugin.load_environment(env_id, **settings).taskset)


def test_the_example_of_the_page_runs(plugin, capsys):
    assert len(ast.literal_eval(run_example("peers-verifiers", capsys))) == 8
