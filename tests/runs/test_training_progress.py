"""What the lines of iterations say besides their metrics."""

import io

import pytest
from rich.console import Console

from trial_ray.runs.terminal import TrainingProgress


@pytest.mark.parametrize(
    ("invalid", "cut", "told"),
    [
        (1.0, 0.7, "100% of the responses have not the required form, 70% end at max_response_tokens: raise"),
        (0.6, 0.1, "60% of the responses have not the required form, 10% end at max_response_tokens: look at them"),
        (0.4, 0.9, None),
    ],
)
def test_a_policy_that_does_not_answer_in_the_required_form_is_warned_of_once(invalid, cut, told):
    shown = io.StringIO()
    metrics = {"env_runners/invalid_response_rate": invalid, "env_runners/cut_response_rate": cut}
    with TrainingProgress(Console(file=shown), total=2) as progress:
        progress.iteration(1, metrics)
        progress.iteration(2, metrics)
    warnings = [line for line in shown.getvalue().splitlines() if line.startswith("warning: ")]
    assert len(warnings) == (told is not None)
    assert told is None or warnings[0].startswith(f"warning: {told}")
