"""WebShop with one tool for each of its two actions."""

from __future__ import annotations

from typing import Any

from trial_envs.tool_env import ToolEpisode


class WebShopToolEnv(ToolEpisode):
    """``trial/WebShop-v0`` with the tools ``search`` and ``click``, for TRL's ``environment_factory``.

    A click on a label that is not on the page changes nothing and takes a turn.

    Args:
        settings: keyword arguments of ``trial/WebShop-v0``.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__("trial/WebShop-v0", **settings)

    def search(self, query: str) -> str:
        """
        Search the shop. Possible only on the page that has a search field.

        Args:
            query: The words to search for.

        Returns:
            The page of results, and the actions that are possible on it.
        """
        return self._take(f"search[{query}]")

    def click(self, label: str) -> str:
        """
        Click a button, a product or an option of the page. "buy now" ends the episode.

        Args:
            label: The label as it stands on the page, such as "next >" or "buy now".

        Returns:
            The page that follows, and the actions that are possible on it.
        """
        return self._take(f"click[{label}]")
