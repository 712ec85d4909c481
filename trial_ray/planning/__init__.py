"""What a run will need before anything starts: memory of every actor and time of an iteration, from shapes and constants."""
