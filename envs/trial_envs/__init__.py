"""Gymnasium text environments for language-model agents.

Importing this package registers the environment ids, as Gymnasium 1.x expects of third-party packages. Engines are
imported only when an environment is made, so the import is fast. ``gymnasium.make("trial_envs:trial/ALFWorld-v0")``
imports the package and makes the environment.

In reading order:

- ``core``: the base class of the environments; ``errors``: their exceptions.
- ``alfworld``, ``webshop``, ``search_qa``, ``textworld``: environments with an engine.
- ``imports``: environments of other libraries; ``exports``: the environments of this package for other libraries.
- ``openenv``: a server that offers the environments to OpenEnv clients.
- ``wrappers``: Gymnasium wrappers.
- ``chat``, ``tool_env``: an environment as a conversation, and as an object with tools.
- ``program``: programs that call a chat model, as environments; ``chat_apis``: the chat APIs that they may use.
- ``text_index``: full-text search (BM25) in texts on disk.
"""

from gymnasium.envs import registration

__all__ = ["NAMESPACE", "register"]

NAMESPACE = "trial"

ENTRY_POINTS = {
    "ALFWorld-v0": "trial_envs.alfworld.env:ALFWorldEnv",
    "GEM-v0": "trial_envs.imports.gem:GEMEnv",
    "OpenEnv-v0": "trial_envs.imports.openenv:OpenEnvEnv",
    "ReasoningGym-v0": "trial_envs.imports.reasoning_gym:ReasoningGymEnv",
    "ScienceWorld-v0": "trial_envs.imports.scienceworld:ScienceWorldEnv",
    "SearchQA-v0": "trial_envs.search_qa.env:SearchQAEnv",
    "TextArena-v0": "trial_envs.imports.textarena:TextArenaEnv",
    "TextWorld-v0": "trial_envs.textworld.env:TextWorldEnv",
    "WebShop-v0": "trial_envs.webshop.env:WebShopEnv",
}
"""Name of an environment -> import path of its class."""


def register() -> None:
    """Register every environment as ``trial/<name>``; repeated calls have no effect."""
    for name, entry_point in ENTRY_POINTS.items():
        if f"{NAMESPACE}/{name}" not in registration.registry:
            registration.register(id=f"{NAMESPACE}/{name}", entry_point=entry_point)


register()
