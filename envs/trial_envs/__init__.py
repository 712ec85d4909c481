"""Gymnasium text environments for language-model agents.

Importing this package registers the ids, as Gymnasium 1.x expects of third-party environments; engines are imported
when an environment is made, so the import itself is cheap. ``gymnasium.make("trial_envs:trial/ALFWorld-v0")`` imports
and makes in one go. Gymnasium before 1.0 also finds the ids by the entry point ``trial`` of the group
``gymnasium.envs``; later versions read no entry points.
"""

from gymnasium.envs import registration

__all__ = ["NAMESPACE", "register", "register_plugin"]

NAMESPACE = "trial"

ENTRY_POINTS = {
    "ALFWorld-v0": "trial_envs.alfworld.env:ALFWorldEnv",
    "TextWorld-v0": "trial_envs.textworld.env:TextWorldEnv",
    "WebShop-v0": "trial_envs.webshop.env:WebShopEnv",
}
"""Name of an environment -> where its class is."""


def register() -> None:
    """Registers every environment as ``trial/<name>``; may be called any number of times."""
    for name, entry_point in ENTRY_POINTS.items():
        if f"{NAMESPACE}/{name}" not in registration.registry:
            registration.register(id=f"{NAMESPACE}/{name}", entry_point=entry_point)


def register_plugin() -> None:
    """The target of the entry point; whoever loads it may have set Gymnasium's namespace to ``trial`` already."""
    register()


register()
