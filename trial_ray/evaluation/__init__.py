"""Evaluation on fixed evaluation sets: results, intervals, paired comparison, and the oracle that bounds them."""
