"""Learner connector pieces: group advantages → plan → privileged views → scores → what the method fixes."""
