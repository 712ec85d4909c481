"""The stubs that type checkers and editors read are those of the settings that are declared."""

from keyword_stubs import FILE, stubs


def test_stubs_are_up_to_date():
    assert FILE.read_text() == stubs(), "run python docsite/keyword_stubs.py"
