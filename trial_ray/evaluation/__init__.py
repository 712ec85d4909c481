"""Evaluation on fixed panels: results, intervals, paired comparison, and the oracle that bounds them."""
