"""Episodes of text environments: won by the walkthrough, or played by a scripted expert."""


def win(env, task=0):
    """Carry out the walkthrough of a task, which must win it, and return the last answer of ``step``."""
    env.reset(options={"task": task})
    for action in env.unwrapped.walkthrough:
        answer = env.step(action)
    assert answer[2:4] == (True, False), task
    assert answer[4]["won"], (task, answer[4]["task"])
    return answer


def play_expert(env, task, expert, seed, check=None):
    """Play an episode with an expert; return the last ``info`` and the actions.

    With ``check(observation, info, options)``, every action must be one of the expert's options.
    """
    observation, info = env.reset(options={"task": task})
    expert.reset(info["task"], observation, seed)
    ended, actions = False, []
    while not ended:
        admissible = info["admissible_actions"]
        options = expert.options(observation, admissible) if check else ()
        actions.append(expert.act(observation, admissible))
        assert actions[-1].startswith(("search[", "answer[")) or actions[-1] in admissible
        if check:
            assert actions[-1] in options
            check(observation, info, options)
        observation, _, terminated, truncated, info = env.step(actions[-1])
        ended = terminated or truncated
    return info | {"truncated": truncated}, actions
