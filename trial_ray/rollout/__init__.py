"""From a task to a trajectory: prompts, episodes, env-runner actors, records."""
