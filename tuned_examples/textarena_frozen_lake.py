"""A small agent learns a game of TextArena on two CPU cores: cross a frozen lake, a grid of four by four with three holes.

    pip install textarena==0.7.4
    trial-ray train tuned_examples/textarena_frozen_lake.py

A tiny model first clones an expert that takes the shortest way, but moves elsewhere in three of ten moves: into a hole, or into a
wall, which ends the game the second time in a row. TRIAL then trains it. docs/environments.md has the result.
"""

from collections import deque
from dataclasses import dataclass

from trial_envs.core.projection import project_action
from trial_ray import EnvironmentAdapter, TRIALConfig, WarmStartSpec

MOVES = {"[up]": (-1, 0), "[down]": (1, 0), "[left]": (0, -1), "[right]": (0, 1)}


THINGS = {"": "ice", "H": "hole", "G": "goal"}


def board(observation):
    """Return the cell at each place (row, column): ``""`` (ice), ``H`` (hole), ``G`` (goal), ``P`` (player) or ``P/G``."""
    lines = [line.strip("|").split("|") for line in observation.splitlines() if line.startswith("|")]
    return {(y, x): cell.strip() for y, line in enumerate(lines) for x, cell in enumerate(line)}


def places(cells):
    """Return the player's place, and the place that each move leads to."""
    y, x = next(place for place, cell in cells.items() if cell.startswith("P"))
    return (y, x), {move: (y + down, x + right) for move, (down, right) in MOVES.items()}


@dataclass(frozen=True)
class BoardPrompt:
    """A prompt with the rules, the player's place and its neighbours; the whole response is the move."""

    style = "plain"

    def render(self, context):
        cells = board(context.observation)
        if not cells:  # Templates are also checked with a text of another game.
            return "\n".join([context.task, context.observation, "move"])
        (y, x), after = places(cells)
        around = [f"{move} {THINGS[cells[place]] if place in cells else 'wall'}" for move, place in after.items()]
        return "\n".join([context.task, f"row {y} column {x}", *around, "move"])

    def project(self, response):
        return project_action(response, self.style)


class ShortestWay:
    """An expert that takes the shortest way around the holes; the board shows all of them."""

    def reset(self, task, observation, seed):
        pass

    def act(self, observation, admissible):
        return self.options(observation, admissible)[0]

    def options(self, observation, admissible):
        cells = {place: cell for place, cell in board(observation).items() if cell != "H"}
        goal = next(place for place, cell in cells.items() if cell.endswith("G"))
        away, seen = {goal: 0}, deque([goal])
        while seen:
            y, x = seen.popleft()
            for place in ((y + down, x + right) for down, right in MOVES.values()):
                if place in cells and place not in away:
                    away[place] = away[y, x] + 1
                    seen.append(place)
        _, after = places(cells)
        nearest = min(away.get(place, 99) for place in after.values())
        return [move for move, place in after.items() if away.get(place, 99) == nearest]

    def carried_out(self, action):
        pass


ADAPTER = EnvironmentAdapter(
    env_id="trial/TextArena-v0",
    title="TextArena",
    templates={"plain": BoardPrompt()},
    warm_start=WarmStartSpec(demonstrator=ShortestWay),
    skills={"": "Go right and down, and around the holes."},
)

config = (
    TRIALConfig()
    .environment(
        "trial/TextArena-v0",
        env_config={"game": "FrozenLake-v0", "max_turns": 12, "actions": list(MOVES)},
        adapter=ADAPTER,
    )
    .rl_module(
        warm_start={
            "size": "nano",
            "history_window": 0,
            "games": 400,
            "episodes_per_game": 2,
            "suboptimal_probability": 0.3,
            "prompt_weight": 0.0,
            "max_steps": 400,
            "check_every": 400,
            "target_success": 0.1,
            "threads": 1,
        }
    )
    .training(
        lr=5e-4,
        weight_decay=0.0,
        adam_betas=(0.9, 0.98),
        group_size=8,
        tasks_per_iteration=16,
        minibatch_rows=128,
        microbatch_rows=64,
        invalid_action_penalty=0.0,
        reward_scale=1.0,
        ref_kl_coeff=0.0,
        entropy_coeff=0.0,
        hindsight_start_iteration=4,
    )
    .env_runners(
        num_env_runners=2,
        num_cpus_per_env_runner=0.25,
        max_prompt_tokens=512,
        max_response_tokens=8,
        prompt_style="plain",
        history_window=0,
    )
    .engines(engine="transformers", num_cpus_per_engine=0.5)
    .learners(num_learners=1, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.25)
    .evaluation(evaluation_split="test", evaluation_num_tasks=256, evaluation_temperature=1.0)
    .debugging(seed=0)
)
stop = {"training_iteration": 20}
