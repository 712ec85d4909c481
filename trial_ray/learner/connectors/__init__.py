"""Learner connector pieces: group advantages → hindsight views → scores → padded rows."""
