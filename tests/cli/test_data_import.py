"""Local copies of the data: checked by digest, copied to where environments read them, refused if they differ."""

import pytest
from third_party import ALFWORLD
from webshop_source import NOUNS, write_source

from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.alfworld.export import write_games
from trial_envs.alfworld.importing import SplitState, import_games
from trial_envs.errors import CorruptGameError, MissingDataError
from trial_envs.webshop.env import WebShopEnv
from trial_ray import cli


@pytest.fixture
def home(monkeypatch, tmp_path):
    """Home folder of this test, into which nothing was imported."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def own(home):
    """Two generated games, in a folder from which they may be imported."""
    write_games(home / "own", 2, 0, "tiny")
    return home / "own"


def data(words):
    return cli.main(f"data {words}".split())


@pytest.mark.data
def test_imported_games_are_played_without_naming_a_folder(home, capsys):
    with pytest.raises(MissingDataError):
        ALFWorldEnv("valid_seen")
    assert data(f"alfworld --from {ALFWORLD}") == 0
    env = ALFWorldEnv("valid_seen")
    assert len(env.tasks()) == 140
    env.close()
    assert data(f"alfworld --from {ALFWORLD}") == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_other_games_are_refused_and_not_imported(home, own):
    with pytest.raises(CorruptGameError):
        import_games(own)
    assert not (home / ".cache/alfworld").exists()
    with pytest.raises(MissingDataError):
        import_games(home / "nowhere")


@pytest.mark.parametrize("aim", ["key", ".", "../private"])
def test_link_out_of_the_games_is_not_followed(home, own, aim, monkeypatch):
    """An archive of games must not copy other files of the user into the folder of the games."""
    monkeypatch.setattr("trial_envs.alfworld.importing.inspect_games", lambda *_: [SplitState("train", 2, 2, True)])
    private = home / "private"
    private.mkdir()
    (private / "key").write_text("secret")
    (own / "extra").symlink_to(aim if aim.startswith("..") else private / aim)
    with pytest.raises(CorruptGameError, match="extra is a link out of"):
        import_games(own)
    assert not (home / ".cache/alfworld").exists()


def test_imported_shop_is_opened_without_naming_a_folder(home, capsys):
    folder = write_source(home / "source", title_nouns=NOUNS, prices=dict.fromkeys(NOUNS, 9.5))
    letters = home / "letters"
    index = home / "index"
    importing = f"webshop --from {folder}"
    assert data(importing) == 0
    assert "DIFFERS" in capsys.readouterr().out  # the published set has files of these names
    env = WebShopEnv("test")
    assert env.catalogue.price(2) == 9.5
    env.close()
    assert data("webshop") == 0
    letters.mkdir()
    (letters / "letter").touch()  # a folder other than an index is not replaced
    assert [data(f"{importing} --out {out}") for out in (letters, index, index)] == [2, 0, 0]
    assert (letters / "letter").exists()
    (folder / "items_shuffle.json").unlink()
    assert data(importing) == 2
    assert "items_shuffle" in capsys.readouterr().err
