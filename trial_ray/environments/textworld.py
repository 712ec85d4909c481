"""TextWorld's coin collector and treasure hunter: what the trainer knows of ``trial/TextWorld-v0``."""

from trial_ray.environments.adapter import ACQUISITION, NAVIGATION, EnvironmentAdapter, ReportLabels
from trial_ray.environments.templates import TaggedTemplate

ADAPTER = EnvironmentAdapter(
    env_id="trial/TextWorld-v0",
    templates={
        "tagged": TaggedTemplate("You are an agent who explores rooms described in text and looks for one object."),
    },
    labels=ReportLabels(action_patterns=((r"take ", ACQUISITION), (r"go ", NAVIGATION))),
)
