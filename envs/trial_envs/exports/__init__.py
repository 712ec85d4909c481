"""The text environments with the interfaces of other libraries.

- ``gem``: GEM.
- ``skyrl_gym``: SkyRL-gym.
- ``verifiers``: verifiers and prime-rl.
"""
