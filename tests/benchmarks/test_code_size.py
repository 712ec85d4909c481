"""The sizes that make lint holds the repository to."""

import code_size


def test_each_excess_is_named_with_its_size_and_limit(tmp_path):
    (tmp_path / "trial_ray").mkdir()
    (tmp_path / "trial_ray/small.py").write_text('"""Not counted."""\n\nx = 1  # nor this\n')
    (tmp_path / "README.md").write_text("three words here\n")
    assert code_size.excesses(tmp_path, {"trial_ray": 3, "words": 3}) == []
    (tmp_path / "trial_ray/long.py").write_text("\n" * 451)
    tokens, words, lines = code_size.excesses(tmp_path, {"trial_ray": 2, "words": 1})
    assert tokens.startswith("trial_ray has 3 tokens, 1 more than the 2 ")
    assert words.startswith("README and docs have 3 words, 2 more than the 1 ")
    assert lines.startswith("trial_ray/long.py has 451 lines, expected at most 450")
