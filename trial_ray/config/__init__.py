"""Settings of a run. In reading order:

- ``declare``: how a setting is declared, documented and checked
- ``sampling``: settings of policy, environments, engines and rollouts
- ``training``: settings of the update, of evaluation and of recovery
- ``run``: all settings of a run, and the checks across them
- ``names_elsewhere``: names of these settings in TRL and verl
"""
