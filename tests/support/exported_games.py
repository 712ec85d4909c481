"""Games that other libraries make and play, and the check of their pages' examples, for ``tests/peers``."""

import pytest
from snippets import snippets

CASES = pytest.mark.parametrize(
    ("env_id", "settings", "task"),
    [
        ("trial/ALFWorld-v0", {"split": "generated", "difficulty": "tiny"}, 3),
        ("trial/WebShop-v0", {"split": "generated", "difficulty": "tiny", "num_games": 10}, 2),
        ("trial/TextWorld-v0", {"level": 1}, "coin_collector-1-0"),
        ("trial/SearchQA-v0", {"split": "generated", "num_passages": 200, "num_games": 10}, 2),
    ],
    ids=["ALFWorld", "WebShop", "TextWorld", "SearchQA"],
)


def tagged(action):
    """Return a response with an action."""
    return f"<think>so</think><action>{action}</action>"


def run_example(name, capsys, address=""):
    """Run the example of docs/environments.md, with another server's address if it is given; return what it printed."""
    (code,) = snippets("environments.md", name)
    if address:
        assert "http://127.0.0.1:8000" in code
        code = code.replace("http://127.0.0.1:8000", address)
    exec(compile(code, f"docs/environments.md, {name}", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out
