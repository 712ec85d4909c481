"""The text environments in the form of other libraries.

- ``gem``: GEM.
- ``skyrl_gym``: SkyRL-gym.
- ``verifiers``: verifiers and prime-rl.
"""
