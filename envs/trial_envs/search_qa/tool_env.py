"""Search-QA with one tool for each of its two actions."""

from __future__ import annotations

from typing import Any

from trial_envs.tool_env import ToolEpisode


class SearchQAToolEnv(ToolEpisode):
    """``trial/SearchQA-v0`` with the tools ``search`` and ``answer``, for TRL's ``environment_factory``.

    Args:
        settings: keyword arguments of ``trial/SearchQA-v0``, without ``style``.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__("trial/SearchQA-v0", **settings)

    def search(self, query: str) -> str:
        """
        Search the passages of the corpus.

        Args:
            query: The words to search for.

        Returns:
            The titles and texts of the best passages.
        """
        return self._take(f"search[{query}]")

    def answer(self, text: str) -> str:
        """
        Answer the question. The answer ends the episode.

        Args:
            text: The answer alone, such as a name or a year.

        Returns:
            Whether the answer is right.
        """
        return self._take(f"answer[{text}]")
