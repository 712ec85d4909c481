"""The import step: the files it finds, the damage it refuses, and its equality with the published engine's data."""

import json
import lzma
import shutil

import pytest
from text_games import win
from third_party import WEBSHOP_1K
from webshop_source import PRODUCTS, tag, write_source

from trial_envs.errors import CorruptCatalogueError, MissingDataError
from trial_envs.webshop import sources
from trial_envs.webshop.catalogue import open_catalogue
from trial_envs.webshop.env import WebShopEnv
from trial_envs.webshop.preparation import import_shop, prepare


def index(folder, **settings):
    """Write the index of a source folder beside it, and return the index folder."""
    return prepare(folder, folder.parent / "index", tagger=tag, **settings)


@pytest.mark.data
def test_published_goals_and_prices_follow_from_products_and_seed(tmp_path, published_shop):
    folder = tmp_path / "raw"
    folder.mkdir()
    for name in ("items_shuffle_1000.json.xz", "items_ins_v2_1000.json", "title_nouns.json"):
        shutil.copyfile(WEBSHOP_1K / name, folder / name)
    built = open_catalogue(prepare(folder, tmp_path / "index"))
    recorded = open_catalogue(published_shop)
    assert built.num_goals == recorded.num_goals == 6910
    for number in range(6910):
        assert built.goal(number) == recorded.goal(number)
    for number in range(1000):
        assert built.price(number) == recorded.price(number)


@pytest.mark.data
def test_the_packed_set_is_recognised_by_its_digests():
    assert all(file.known for file in sources.inspect_source(WEBSHOP_1K))


def test_human_goals_are_built_on_request(tmp_path):
    told = {"instruction": "a bright lamp", "instruction_attributes": ["bright"], "instruction_options": ["green"]}
    asin = PRODUCTS[1]["asin"]
    folder = write_source(tmp_path / "source", items_human_ins={asin: [told]})
    shop = open_catalogue(index(folder, human_goals=True))
    assert shop.num_goals == 1
    goal = shop.goal(0)
    assert goal.asin == asin
    assert goal.attributes == ("bright",)
    assert goal.wanted == ("green",)
    assert goal.weight == 1
    assert goal.instruction.startswith("a bright lamp, and price lower than ")
    (folder / "items_human_ins.json").unlink()
    with pytest.raises(MissingDataError, match=r"lacks items_human_ins\.json, which human_goals=True needs"):
        index(folder, human_goals=True)
    assert open_catalogue(tmp_path / "index").num_goals == 1


def test_an_imported_shop_is_the_default_shop(own_cache):
    folder = write_source(own_cache / "source")
    import_shop(folder, tagger=tag)
    shutil.rmtree(folder)
    env = WebShopEnv("all")
    assert len(env.tasks()) == 6
    product = env.catalogue.product(1)
    assert product.options == {"color": ("red | blue", "green")}
    assert product.query == "lamps"
    assert product.price_tag == "$10.5 to $20.0"
    assert product.features == ("Bright", "Tall")
    assert env.catalogue.product(0).price_tag == "$100.0"
    win(env)
    assert WebShopEnv().split == "train"


def test_missing_sources_are_named_with_their_size(tmp_path):
    with pytest.raises(MissingDataError, match=r"items_shuffle\.json.*items_ins_v2.*GB"):
        import_shop(tmp_path)
    with pytest.raises(MissingDataError, match="not a folder"):
        import_shop(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("products", {"no": "list"}),
        ("products", [*PRODUCTS, 7]),
        ("products", [{**PRODUCTS[0], "pricing": "ten dollars"}]),
        ("products", [{**PRODUCTS[0], "asin": "B\ud800"}]),
        ("attributes", ["no", "object"]),
        ("title_nouns", {}),
    ],
)
def test_damaged_sources_are_refused_and_leave_nothing_behind(tmp_path, name, content):
    folder = write_source(tmp_path / "source", **{name: content})
    with pytest.raises(CorruptCatalogueError):
        index(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("name", "pack"), [("items_shuffle.json.xz", lzma.compress), ("items_shuffle.json", bytes)])
def test_a_truncated_file_is_refused(tmp_path, name, pack):
    folder = write_source(tmp_path / "source")
    file = folder / "items_shuffle.json"
    content = pack(file.read_bytes())
    file.rename(folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptCatalogueError, match=name):
        index(folder)


def test_a_long_list_is_read_piece_by_piece(tmp_path, monkeypatch):
    values = [{"text": "x" * n, "list": [n, "]", "}"]} for n in range(60)]
    path = tmp_path / "list.json"
    path.write_text(json.dumps(values, indent=1))
    for chunk in (1, 7, 100, 10**6):
        monkeypatch.setattr(sources, "_CHUNK", chunk)
        assert list(sources.read_list(path)) == values
