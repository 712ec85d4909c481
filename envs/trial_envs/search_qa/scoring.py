"""Scores of an answer: exact match and F1 over words, after the normalisation of SQuAD's evaluation."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalise(text: str) -> str:
    """Return a text in lower case without ASCII punctuation, English articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Iterable[str]) -> bool:
    """Return whether an answer equals one of the accepted answers after normalisation."""
    return normalise(answer) in map(normalise, accepted)


def f1(answer: str, accepted: Iterable[str]) -> float:
    """Return the F1 score of an answer's words: the harmonic mean of precision and recall, for the best accepted answer.

    If the answer and an accepted answer both have no words after normalisation, they count as equal, as in version 2.0 of
    SQuAD's evaluation.

    Returns:
        A number in [0, 1]; 1.0 for an exact match, 0.0 without accepted answers.
    """
    words = normalise(answer).split()
    return max((_overlap(words, normalise(text).split()) for text in accepted), default=0.0)


def _overlap(words: list[str], expected: list[str]) -> float:
    if not words or not expected:
        return float(words == expected)
    common = (Counter(words) & Counter(expected)).total()
    return 2 * common / (len(words) + len(expected))
