"""The trajectory viewer: recorded trajectories as a folder that a browser reads without a server."""
