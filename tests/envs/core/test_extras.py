"""Messages on missing packages name packages of a package index."""

import re
from pathlib import Path

import pytest

from trial_envs.core.extras import install_command

ROOT = Path(__file__).parents[3]
SOURCES = [file.read_text() for folder in ("trial_ray", "envs/trial_envs") for file in (ROOT / folder).rglob("*.py")]
EXTRAS = sorted({name for text in SOURCES for name in re.findall(r"""install_command\(["']([\w-]+)["']\)""", text)})


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_that_a_message_names_is_one_of_setup_py(extra):
    assert re.fullmatch(r"pip install( '[\w\[\]-]+[<>=][^']*')+", install_command(extra))


def test_an_unknown_extra_is_installed_from_a_clone():
    assert len(EXTRAS) > 10
    assert install_command("no-such") == "pip install '.[no-such]' in a clone"
