"""The objective, equation by equation: pure functions of flat tensors. ``docs/methods.md`` lists the equations.

- ``advantages``: returns, group-relative advantages (Eq. 1), penalties, RLSD's token advantages.
- ``allocation``: hindsight log-ratios (Eq. 4), turn scores (Eq. 5) and turn weights (Eq. 6).
- ``losses``: the clipped surrogate, the dense hindsight loss (Eq. 7) and their sum (Eq. 8).
- ``responses``: surrogates over whole responses: ratios of GSPO, means of GRPO and Dr. GRPO.
- ``importance``: weights for the mismatch between the engine's policy and the learner's.
- ``divergences``: the KL estimate k3, differences from the engine, Jensen-Shannon divergence.
- ``choices``: names of the variants. ``rounding``: equality up to rounding. ``segments``: sums over segments, argument checks.
"""
