"""ALFWorld with one tool for each of its commands."""

from __future__ import annotations

from typing import Any

from trial_envs.tool_env import ToolEpisode


class ALFWorldToolEnv(ToolEpisode):
    """``trial/ALFWorld-v0`` with a tool for each command of the game's grammar, for TRL's ``environment_factory``.

    A tool writes its arguments into the command unchanged. If the result is not an admissible command, the observation is
    ``Nothing happens.``, and the call counts as a turn. The tool ``close`` closes a receptacle, not the environment; the engine is
    freed when the object is garbage-collected.

    Args:
        settings: keyword arguments of ``trial/ALFWorld-v0``.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__("trial/ALFWorld-v0", **settings)

    def go_to(self, receptacle: str) -> str:
        """
        Walk to a piece of furniture or an appliance.

        Args:
            receptacle: Its name with its number, such as "desk 1".

        Returns:
            What is there, and the actions that are possible now.
        """
        return self._take(f"go to {receptacle}")

    def take(self, object: str, receptacle: str) -> str:
        """
        Pick up an object. Only one object can be carried.

        Args:
            object: The object with its number, such as "mug 2".
            receptacle: Where it lies, such as "desk 1".

        Returns:
            What happened, and the actions that are possible now.
        """
        return self._take(f"take {object} from {receptacle}")

    def move(self, object: str, receptacle: str) -> str:
        """
        Put down the object that is carried.

        Args:
            object: The object with its number, such as "mug 2".
            receptacle: Where to put it, such as "shelf 3".

        Returns:
            What happened, and the actions that are possible now.
        """
        return self._take(f"move {object} to {receptacle}")

    def open(self, receptacle: str) -> str:
        """
        Open a closed receptacle.

        Args:
            receptacle: Its name with its number, such as "drawer 1".

        Returns:
            What is inside, and the actions that are possible now.
        """
        return self._take(f"open {receptacle}")

    def close(self, receptacle: str) -> str:
        """
        Close an open receptacle.

        Args:
            receptacle: Its name with its number, such as "drawer 1".

        Returns:
            What happened, and the actions that are possible now.
        """
        return self._take(f"close {receptacle}")

    def heat(self, object: str, appliance: str) -> str:
        """
        Heat the object that is carried.

        Args:
            object: The object with its number, such as "egg 1".
            appliance: The microwave with its number, such as "microwave 1".

        Returns:
            What happened, and the actions that are possible now.
        """
        return self._take(f"heat {object} with {appliance}")

    def cool(self, object: str, appliance: str) -> str:
        """
        Cool the object that is carried.

        Args:
            object: The object with its number, such as "pan 1".
            appliance: The fridge with its number, such as "fridge 1".

        Returns:
            What happened, and the actions that are possible now.
        """
        return self._take(f"cool {object} with {appliance}")

    def clean(self, object: str, appliance: str) -> str:
        """
        Clean the object that is carried.

        Args:
            object: The object with its number, such as "cloth 1".
            appliance: The sink with its number, such as "sinkbasin 1".

        Returns:
            What happened, and the actions that are possible now.
        """
        return self._take(f"clean {object} with {appliance}")

    def slice(self, object: str, knife: str) -> str:
        """
        Slice an object with the knife that is carried.

        Args:
            object: The object with its number, such as "bread 1".
            knife: The knife with its number, such as "butterknife 1".

        Returns:
            What happened, and the actions that are possible now.
        """
        return self._take(f"slice {object} with {knife}")

    def use(self, lamp: str) -> str:
        """
        Switch on a lamp.

        Args:
            lamp: The lamp with its number, such as "desklamp 1".

        Returns:
            What happened, and the actions that are possible now.
        """
        return self._take(f"use {lamp}")

    def examine(self, name: str) -> str:
        """
        Look closely at a receptacle or an object.

        Args:
            name: Its name with its number, such as "shelf 1".

        Returns:
            What it looks like, and the actions that are possible now.
        """
        return self._take(f"examine {name}")

    def look(self) -> str:
        """
        Look around.

        Returns:
            Where you are, and the actions that are possible now.
        """
        return self._take("look")

    def inventory(self) -> str:
        """
        Look at what you carry.

        Returns:
            What you carry, and the actions that are possible now.
        """
        return self._take("inventory")

    def _show(self, observation: str, info: dict[str, Any]) -> str:
        """Return the observation and the admissible actions without ``help``, for which there is no tool."""
        offered = [command for command in info["admissible_actions"] if command != "help"]
        return super()._show(observation, info | {"admissible_actions": offered})
