"""Porter's stemmer (1980) with the changes of Porter's later program, as in Lucene's ``PorterStemFilter``.

The rule ``bli`` → ``ble`` replaces ``abli`` → ``able``, the rule ``logi`` → ``log`` is new, and words of one or two letters are
not stemmed. The stemmer is implemented here because importing a package with this variant takes 80 MB of memory and seconds.
"""

from __future__ import annotations

from functools import lru_cache

_STEP_2 = {
    "ational": "ate",
    "tional": "tion",
    "enci": "ence",
    "anci": "ance",
    "izer": "ize",
    "bli": "ble",
    "alli": "al",
    "entli": "ent",
    "eli": "e",
    "ousli": "ous",
    "ization": "ize",
    "ation": "ate",
    "ator": "ate",
    "alism": "al",
    "iveness": "ive",
    "fulness": "ful",
    "ousness": "ous",
    "aliti": "al",
    "iviti": "ive",
    "biliti": "ble",
    "logi": "log",
}
_STEP_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP_4 = (
    *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent"),
    *("ion", "ou", "ism", "ate", "iti", "ous", "ive", "ize"),
)


def _longest_first(suffixes: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(suffixes.items(), key=lambda item: -len(item[0])))


_RULES_2 = _longest_first(_STEP_2)
_RULES_3 = _longest_first(_STEP_3)
_SUFFIXES_4 = tuple(sorted(_STEP_4, key=len, reverse=True))


@lru_cache(maxsize=1 << 13)
def stem(word: str) -> str:
    """Return the stem of a lower-case word."""
    if len(word) <= 2:
        return word
    word = _remove_plural(word)
    word = _remove_past(word)
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    word = _replace(word, _RULES_2)
    word = _replace(word, _RULES_3)
    word = _remove_ending(word)
    return _tidy(word)


def _shape(word: str) -> str:
    """Return the word with each letter replaced by ``v`` (vowel) or ``c`` (consonant); ``y`` is a vowel after a consonant."""
    shape = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _measure(word: str) -> int:
    """Return Porter's measure of a word, m in [C](VC)^m[V]: the number of times that a consonant follows a vowel."""
    return _shape(word).count("vc")


def _ends_short(word: str) -> bool:
    """Return whether the word ends with a consonant, a vowel and a consonant other than w, x or y."""
    return word[-1:] not in ("w", "x", "y") and _shape(word).endswith("cvc")


def _ends_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _shape(word).endswith("c")


def _remove_plural(word: str) -> str:
    if not word.endswith("s") or word.endswith("ss"):
        return word
    return word[:-2] if word.endswith(("sses", "ies")) else word[:-1]


def _remove_past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    ending = 2 if word.endswith("ed") else 3 if word.endswith("ing") else 0
    if not ending or "v" not in _shape(word[:-ending]):
        return word
    word = word[:-ending]
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _ends_double(word):
        return word if word[-1] in "lsz" else word[:-1]
    return word + "e" if _measure(word) == 1 and _ends_short(word) else word


def _replace(word: str, rules: tuple[tuple[str, str], ...]) -> str:
    for suffix, replacement in rules:
        if word.endswith(suffix):
            start = word[: -len(suffix)]
            return start + replacement if _measure(start) > 0 else word
    return word


def _remove_ending(word: str) -> str:
    for suffix in _SUFFIXES_4:
        if word.endswith(suffix):
            start = word[: -len(suffix)]
            if suffix == "ion" and not start.endswith(("s", "t")):
                return word
            return start if _measure(start) > 1 else word
    return word


def _tidy(word: str) -> str:
    measure = _measure(word)
    if word.endswith("e") and (measure > 1 or (measure == 1 and not _ends_short(word[:-1]))):
        word = word[:-1]
    return word[:-1] if word.endswith("ll") and measure > 1 else word
