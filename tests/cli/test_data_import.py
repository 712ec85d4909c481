"""Local copies of the data: checked by digest, copied to where environments read them, refused if they differ."""

import pytest
from third_party import ALFWORLD
from webshop_source import NOUNS, PRODUCTS, write_source

from trial_envs.alfworld import importing
from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.alfworld.export import write_games
from trial_envs.alfworld.importing import import_games
from trial_envs.errors import CorruptGameError, MissingDataError
from trial_envs.webshop.env import WebShopEnv
from trial_ray import cli


@pytest.fixture
def home(monkeypatch, tmp_path):
    """Home folder of this test, into which nothing was imported."""
    for name in ("ALFWORLD_DATA", "WEBSHOP_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.data
def test_imported_games_are_played_without_naming_a_folder(home, capsys):
    with pytest.raises(MissingDataError):
        ALFWorldEnv("valid_seen")
    assert cli.main(["data", "alfworld", "--from", str(ALFWORLD)]) == 0
    env = ALFWorldEnv("valid_seen")
    assert len(env.tasks()) == 140
    env.close()
    assert cli.main(["data", "alfworld", "--from", str(ALFWORLD)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_other_games_are_refused_and_not_imported(home, tmp_path):
    write_games(tmp_path / "own", 2, 0, "tiny")
    with pytest.raises(CorruptGameError):
        import_games(tmp_path / "own")
    assert not (home / ".cache" / "alfworld").exists()
    with pytest.raises(MissingDataError):
        import_games(tmp_path / "nowhere")


@pytest.mark.parametrize("aim", ["key", ".", "../private"])
def test_link_out_of_the_games_is_not_followed(home, tmp_path, aim, monkeypatch):
    """An archive of games must not copy other files of the user into the folder of the games."""
    write_games(tmp_path / "own", 2, 0, "tiny")
    monkeypatch.setattr(importing, "inspect_games", lambda *_: [importing.SplitState("train", 2, 2, True)])
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    (tmp_path / "own" / "extra").symlink_to(aim if aim.startswith("..") else tmp_path / "private" / aim)
    with pytest.raises(CorruptGameError, match="extra is a link out of"):
        import_games(tmp_path / "own")
    assert not (home / ".cache" / "alfworld").exists()


def test_imported_shop_is_opened_without_naming_a_folder(home, tmp_path, capsys):
    prices = {product["asin"]: 9.5 for product in PRODUCTS}
    folder = write_source(tmp_path / "source", title_nouns=NOUNS, prices=prices)
    assert cli.main(["data", "webshop", "--from", str(folder)]) == 0
    assert "DIFFERS" in capsys.readouterr().out  # the published set has files of these names
    env = WebShopEnv("test")
    assert env.catalogue.price(2) == 9.5
    env.close()
    assert cli.main(["data", "webshop"]) == 0
    letters = tmp_path / "letters"
    letters.mkdir()
    (letters / "letter").touch()  # a folder other than an index is not replaced
    for code, out in ((2, letters), (0, tmp_path / "index"), (0, tmp_path / "index")):
        assert cli.main(["data", "webshop", "--from", str(folder), "--out", str(out)]) == code
    assert (letters / "letter").exists()
    (folder / "items_shuffle.json").unlink()
    assert cli.main(["data", "webshop", "--from", str(folder)]) == 2
    assert "items_shuffle" in capsys.readouterr().err
