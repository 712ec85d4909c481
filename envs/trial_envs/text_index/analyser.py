"""Converts text to index terms, as in Lucene's English analysis.

A text is split into standard tokens (word segmentation of UAX #29, emoji included). Tokens are lower-cased, the possessive
``'s`` and 33 stop words are removed, and the other tokens are reduced to their Porter stems.
"""

from __future__ import annotations

from collections.abc import Iterator

from trial_envs.core.extras import install_command
from trial_envs.errors import MissingPackageError
from trial_envs.text_index.porter import stem

try:
    import regex
except ImportError as error:
    raise MissingPackageError(f"Not installed: regex; {install_command('search-qa')}") from error

MAX_TOKEN = 255
"""Maximum length of a token in characters; longer tokens are split."""

_STOP_TEXT = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_TEXT.split())

# Characters with the property Extended_Pictographic in Unicode 12.1, as in Lucene 9; many of them lost it in Unicode 17.
_PICTOGRAPHS = (
    r"\u00A9\u00AE\u203C\u2049\u2122\u2139\u2194-\u2199\u21A9\u21AA\u231A\u231B\u2328\u2388\u23CF\u23E9-\u23F3"
    r"\u23F8-\u23FA\u24C2\u25AA\u25AB\u25B6\u25C0\u25FB-\u25FE\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705"
    r"\u2708-\u2712\u2714\u2716\u271D\u2721\u2728\u2733\u2734\u2744\u2747\u274C\u274E\u2753-\u2755\u2757\u2763-\u2767"
    r"\u2795-\u2797\u27A1\u27B0\u27BF\u2934\u2935\u2B05-\u2B07\u2B1B\u2B1C\u2B50\u2B55\u3030\u303D\u3297\u3299"
    r"\U0001F000-\U0001F0FF\U0001F10D-\U0001F10F\U0001F12F\U0001F16C-\U0001F171\U0001F17E\U0001F17F\U0001F18E"
    r"\U0001F191-\U0001F19A\U0001F1AD-\U0001F1E5\U0001F201-\U0001F20F\U0001F21A\U0001F22F\U0001F232-\U0001F23A"
    r"\U0001F23C-\U0001F23F\U0001F249-\U0001F3FA\U0001F400-\U0001F53D\U0001F546-\U0001F64F\U0001F680-\U0001F6FF"
    r"\U0001F774-\U0001F77F\U0001F7D5-\U0001F7FF\U0001F80C-\U0001F80F\U0001F848-\U0001F84F\U0001F85A-\U0001F85F"
    r"\U0001F888-\U0001F88F\U0001F8AE-\U0001F8FF\U0001F90C-\U0001F93A\U0001F93C-\U0001F945\U0001F947-\U0001FFFD"
)


def _token_pattern() -> regex.Pattern[str]:
    """Return the pattern of UAX #29 tokens that have a letter, a digit, an ideograph or an emoji.

    By rule WB4 of UAX #29, marks may follow every character. Matching takes linear time, because most quantifiers are
    possessive and so do not backtrack, and because connectors (such as ``_``) that are not part of a word are also matched, by
    the group ``idle``; such matches are not tokens.
    """
    marks = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*+"
    letter = rf"[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{marks}"
    digit = rf"\p{{WB=Numeric}}{marks}"
    within_word = rf"[\p{{WB=MidLetter}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{marks}"
    within_number = rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{marks}"
    connector = rf"(?:\p{{WB=ExtendNumLet}}{marks})"
    katakana = rf"(?:\p{{WB=Katakana}}{marks})"
    run = rf"(?:(?:{letter}(?:{within_word}{letter})*+|{digit}(?:{within_number}{digit})*+)++|{katakana}++)"
    emoji = rf"[{_PICTOGRAPHS}]{marks}(?:(?<=\u200d)[{_PICTOGRAPHS}]{marks})*+"
    flag = rf"\p{{WB=Regional_Indicator}}{marks}\p{{WB=Regional_Indicator}}{marks}"
    return regex.compile(
        rf"{connector}*+{run}(?:{connector}++{run})*+{connector}*+"
        rf"|[\p{{Script=Han}}\p{{Script=Hiragana}}]{marks}"
        rf"|\p{{LB=Complex_Context}}++|{emoji}|{flag}|(?P<idle>{connector}++)"
    )


_TOKEN = _token_pattern()
_POSSESSIVES = ("'s", "’s", "＇s")


def index_terms(text: str) -> Iterator[str]:
    """Yield the terms of a text in order, with duplicates."""
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "idle":
            continue
        token = match.group()
        for start in range(0, len(token), MAX_TOKEN):
            piece = token[start : start + MAX_TOKEN].lower()
            if piece.endswith(_POSSESSIVES):
                piece = piece[:-2]
            if piece not in STOP_WORDS:
                yield stem(piece)
