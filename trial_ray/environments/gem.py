"""GEM's environments: what the trainer knows of ``trial/GEM-v0``."""

from trial_ray.environments.adapter import EnvironmentAdapter, WarmStartSpec
from trial_ray.environments.templates import TaggedTemplate
from trial_ray.environments.textarena import ROLE, GamePlayer


def _demonstrator() -> GamePlayer:
    return GamePlayer("\\boxed{{{}}}")


ADAPTER = EnvironmentAdapter(
    env_id="trial/GEM-v0",
    title="GEM",
    templates={"tagged": TaggedTemplate(ROLE, keep_case=True)},
    warm_start=WarmStartSpec(demonstrator=_demonstrator),
)
