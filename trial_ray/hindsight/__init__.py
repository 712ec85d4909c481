"""Hindsight views of a turn: OutcomeView (Eq. 2) and Aug (Eq. 3). Pure functions of text and token ids."""

from trial_ray.hindsight.aug import augment, encode_evidence
from trial_ray.hindsight.outcome_view import PrivilegedView, outcome_view
from trial_ray.hindsight.untrusted import encode_untrusted

__all__ = ["PrivilegedView", "augment", "encode_evidence", "encode_untrusted", "outcome_view"]
