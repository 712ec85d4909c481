"""Sweeps with Ray Tune.

- :mod:`~trial_ray.sweeps.space`: search spaces in a config
- :mod:`~trial_ray.sweeps.plan`: the trials of a sweep file
- :mod:`~trial_ray.sweeps.study`: the paper's comparisons as plans, with tables and figures
- :mod:`~trial_ray.sweeps.run`: the number of trials that fit a cluster; a plan and its folder, run or continued
- :mod:`~trial_ray.sweeps.callbacks`: run folders and progress of the trials
- :mod:`~trial_ray.sweeps.results`: trials and points
- :mod:`~trial_ray.sweeps.outputs`: tables, map and best configuration
"""
