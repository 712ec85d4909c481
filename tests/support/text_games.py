"""Episodes of text environments: won by the walkthrough, or played by a scripted expert or a list of actions."""

from trial_ray.trajectory import Turn


class Script:
    """A player that takes the given actions."""

    def __init__(self, actions):
        self.actions = actions

    async def act(self, result, history, step):
        return Turn(action=self.actions[len(history)])


def begin(env, task):
    """Start the episode of a task."""
    return env.reset(options={"task": task})


def win(env, task=0):
    """Carry out the walkthrough of a task, which must win it, and return the last answer of ``step``."""
    begin(env, task)
    for action in env.unwrapped.walkthrough:
        answer = env.step(action)
    assert answer[2:4] == (True, False), task
    assert answer[4]["won"], (task, answer[4]["task"])
    return answer


def play_expert(env, make_expert, check=None):
    """Play every task with an expert of its own, and return the last ``info`` and the actions of each episode.

    With ``check(expert, observation, info, options)``, every action must be one of the expert's options.
    """
    played = []
    for seed, task in enumerate(env.tasks()):
        expert, actions, ended = make_expert(), [], False
        observation, info = begin(env, task)
        expert.reset(info["task"], observation, seed)
        while not ended:
            admissible = info["admissible_actions"]
            options = expert.options(observation, admissible) if check else ()
            actions.append(expert.act(observation, admissible))
            assert actions[-1].startswith(("search[", "answer[")) or actions[-1] in admissible
            if check:
                assert actions[-1] in options
                check(expert, observation, info, options)
            observation, _, terminated, truncated, info = env.step(actions[-1])
            ended = terminated or truncated
        played.append((info | {"truncated": truncated}, actions))
    return played
