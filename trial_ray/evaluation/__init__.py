"""Evaluation on fixed evaluation sets: results, confidence intervals, paired comparisons, and the oracle as an upper bound."""
