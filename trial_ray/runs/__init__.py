"""Training runs: writing and reading their folders.

In reading order:

- ``experiment``: experiment files, which define a config and stop criteria, and ``--set key=value``;
- ``session``: one run, from building the algorithm to the summary;
- ``ray_session``: the Ray cluster of a command;
- ``watchdog``: ends hanging processes, and decides after which failures a run restarts;
- ``folder``: the folder of a run;
- ``locks``: the lock of the command that writes into a folder;
- ``config_record``: ``resolved_config.json``, the settings of every command of a run;
- ``metrics_file``: ``metrics.jsonl``, and checks of metric names;
- ``evaluations``: evaluations before and after training;
- ``checkpoints``: saving, verifying, finding and exporting checkpoints;
- ``cost``: ``cost.json``, the time, tokens and memory of a run;
- ``node_records``: trajectories and training records that processes on other nodes write;
- ``trackers``: services that receive metrics;
- ``terminal``: progress on the terminal, and the log file of libraries;
- ``storage`` and ``stored_run``: runs in remote storage such as S3;
- ``reader`` and ``recorded_trajectory``: read runs and trajectories for reports and the viewer;
- ``replay``: repeating one update from its recordings.

``trial_ray.trust`` restricts reading from a folder that another user may have written.
"""
