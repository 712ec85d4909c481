"""What a run leaves on disk and shows while it works: run folder, metric writers, overrides, progress."""
