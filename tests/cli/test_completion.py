"""The completion script, run by bash."""

import subprocess

import pytest

from trial_ray import cli

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
function=$(complete -p trial-ray | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function trial-ray "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("ex", {"export"}),
        ("train --checkpoint-e", {"--checkpoint-every"}),
        ("train --method ser", {"serl"}),
        ("train mi", {"mine.py"}),
        ("train --resume my", {"my_runs"}),
    ],
)
def test_bash_completes_commands_options_names_and_paths(words, completions, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["--print-completion", "bash"])
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    (tmp_path / "mine.py").touch()
    (tmp_path / "my_runs").mkdir()
    command = ["bash", "-c", ASK, "bash", "completion", "trial-ray", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert {word.rstrip("/") for word in done.stdout.split()} == completions
