"""Reports of runs: one HTML page, figures, a viewer of trajectories, and text for the terminal.

- :mod:`~trial_ray.reports.page`: the report as an HTML page
- :mod:`~trial_ray.reports.groups`: runs that differ only in their seed
- :mod:`~trial_ray.reports.charts`: the charts as values
- :mod:`~trial_ray.reports.plots`: the charts as figures
- :mod:`~trial_ray.reports.tables`: the tables as rows of text
- :mod:`~trial_ray.reports.viewer`: trajectories as a page with a script
- :mod:`~trial_ray.reports.terminal`: trajectories in the terminal
- :mod:`~trial_ray.reports.templates`: templates of page and terminal
"""
