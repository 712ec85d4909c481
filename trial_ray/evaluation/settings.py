"""Settings of the panel: the fixed held-out tasks that evaluation plays."""

from __future__ import annotations

from typing import Any

from trial_ray.errors import ConfigError
from trial_ray.inference.admission import MIN_TEMPERATURE
from trial_ray.rollout.settings import PlaySettings
from trial_ray.settings import Section, Settings, setting


class PanelSettings(Settings):
    """Which tasks an evaluation plays, and how; one rollout each."""

    panel_env_config: dict[str, Any] = setting(
        factory=dict, doc="entries that replace those of the training environment's ``env_config``"
    )
    panel_split: str | dict[str, str] | None = setting(
        None,
        "split that the tasks come from; in a mixture of environments also a dict from their names to splits, and then "
        "``env_config`` is a dict from names, too; ``None`` means no panel",
    )
    panel_num_tasks: int = setting(128, "tasks in the panel", at_least=1)
    panel_seed: int = setting(0, "chooses which tasks, and seeds the rollouts")
    panel_temperature: float = setting(0.4, "sampling temperature of the evaluation; 0 is greedy", at_least=0)
    panel_top_p: float = setting(1.0, "nucleus mass of the evaluation", above=0, within=(0, 1))

    panel = Section("Choose the fixed panel of held-out tasks that evaluation plays.", prefix="panel_")

    def check_panel(self) -> None:
        """Refuse temperatures that engines would change without saying so.

        Raises:
            ConfigError: the temperature is neither 0 nor large enough.
        """
        if self.panel_temperature and not self.panel_temperature >= MIN_TEMPERATURE:
            raise ConfigError(
                f"panel_temperature is {self.panel_temperature}, expected 0 (greedy) or at least {MIN_TEMPERATURE}."
            )


class EvaluationSettings(PanelSettings, PlaySettings):
    """All that playing panels needs."""
