"""A text environment that repeats each action; the task's number wins, and the engine does not understand an empty action."""

from trial_envs.core import Outcome, TextEnv


class EchoEnv(TextEnv):
    """Tasks are numbers; ``freed`` counts calls of ``_free``."""

    def __init__(self, max_turns=4, render_mode=None):
        super().__init__("numbers", max_turns, render_mode)
        self.freed = 0

    def tasks(self, split=None):
        return [str(number) for number in range(50)]

    def family(self, task_id):
        return "even" if int(task_id) % 2 == 0 else "odd"

    def _start(self, task_id):
        self.wanted = task_id
        return f"say {task_id}", Outcome(f"Ünïcode {task_id}", ("1", "2"))

    def _advance(self, action):
        won = action == self.wanted
        return Outcome(f"{action}!", ("1",), float(won), float(won), won, won, invalid_action=action == "")

    def _free(self):
        self.freed += 1
