"""Sweeps with Ray Tune.

- :mod:`~trial_ray.sweeps.space`: search spaces in a config
- :mod:`~trial_ray.sweeps.plan`: the trials of a sweep file
- :mod:`~trial_ray.sweeps.study`: plans that compare several methods over several seeds, with tables and figures
- :mod:`~trial_ray.sweeps.run`: starts or continues a sweep in its folder, with as many trials at a time as fit the cluster
- :mod:`~trial_ray.sweeps.callbacks`: run folders and progress of the trials
- :mod:`~trial_ray.sweeps.results`: results by trial and by point (trials that differ only in the seed)
- :mod:`~trial_ray.sweeps.outputs`: tables, a map of the metric over two settings, and the best configuration
"""
