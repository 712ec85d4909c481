"""An agent with a tool, on two CPU cores and without a download: the guessing game, played by calls in the Hermes format.

    trial-ray train tuned_examples/guessing_tools.py --method grpo

The system message describes the tool, a response calls it with JSON, and the answer is the next message of one conversation. A tiny
model first clones the expert of own_environment.py, whose actions become calls. For a pretrained model, leave out the warm start
and, if its chat template has tools, ``tool_format``.
"""

from dataclasses import replace
from typing import Literal

from trial_envs.tool_env import ToolEpisode
from trial_ray.adapters.templates import TaggedTemplate, ToolTemplate
from trial_ray.runs.experiment import experiment_file, load_experiment

GUESSING = load_experiment(experiment_file("own_environment"))
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class GuessingTools(ToolEpisode):
    """The tool of the guessing game."""

    def guess(self, number: Literal[NUMBERS]) -> str:
        """
        Guess the number.

        Args:
            number: The number as a word.

        Returns:
            Whether the hidden number is higher or lower.
        """
        return self._take(f"guess {number}")


# The schema lists the numbers, so messages do not repeat the admissible actions.
OFFERED = frozenset(f"guess {number}" for number in NUMBERS)
ADAPTER = replace(
    GUESSING.config.adapter_of("mine/Guessing-v0"),
    tools=GuessingTools,
    # A response without a valid call is no guess, so the game alone does not limit the turns.
    max_turns=4,
    templates={"tools": ToolTemplate(TaggedTemplate("You guess a number.", hidden_actions=OFFERED))},
)
config = (
    GUESSING.config.copy(copy_frozen=False)
    .environment(adapter=ADAPTER)
    .env_runners(prompt_style="tools", tool_format="hermes", max_prompt_tokens=1024, max_response_tokens=32)
)
stop = GUESSING.stop
