"""The completion scripts, asked by the shells themselves, and the console of results."""

import shutil
import subprocess
import sys

import pytest

from trial_ray import cli
from trial_ray.cli import console

BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
function=$(complete -p trial-ray | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function trial-ray "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
echo "${COMPREPLY[@]}"
"""
FISH = "source $argv[1]; complete --do-complete (string join ' ' $argv[2..]) | string split --fields 1 \\t"


@pytest.fixture
def script(tmp_path, capsys):
    def write(shell):
        with pytest.raises(SystemExit) as end:
            cli.main(["--print-completion", shell])
        assert end.value.code == 0
        file = tmp_path / f"completion.{shell}"
        file.write_text(capsys.readouterr().out)
        return file

    return write


def ask(*command, folder):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=True, cwd=folder)
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_completes_commands_options_names_and_paths(shell, script, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = script(shell)
    (tmp_path / "mine.py").touch()
    (tmp_path / "my_runs").mkdir()
    start = ["bash", "-c", BASH, "bash", file] if shell == "bash" else ["fish", "--no-config", "-c", FISH, file]

    def complete(*words):
        return {each.rstrip("/") for each in ask(*start, "trial-ray", *words, folder=tmp_path)}

    assert complete("ex") == {"export"}
    assert complete("train", "--checkpoint-e") == {"--checkpoint-every"}
    assert complete("train", "--method", "ser") == {"serl"}
    assert complete("train", "mi") == {"mine.py"}
    assert complete("train", "--resume", "my") == {"my_runs"}


def test_zsh_reads_its_script(script):
    file = script("zsh")
    text = file.read_text()
    assert text.startswith("#compdef trial-ray")
    for command in ("train", "evaluate", "sweep", "doctor"):
        assert f"    {command}:'" in text
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", file], check=True, timeout=60)


def test_results_are_shown_as_they_are_and_also_without_a_stdout(capsys, monkeypatch):
    console.show("/models/[lr=1]")
    assert capsys.readouterr().out == "/models/[lr=1]\n"
    monkeypatch.setattr(sys, "stdout", None)
    console.output().print("done")
