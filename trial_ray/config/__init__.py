"""Settings of a run. In reading order:

- ``declare``: how a setting is declared, documented and checked; names of settings in TRL and verl
- ``sampling``: settings of policy, environments, engines and rollouts
- ``training``: settings of the update, of evaluation and of recovery, and the check of reward functions
- ``run``: all settings of a run, and the checks across them
"""
