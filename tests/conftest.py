"""Settings of every test: the home they run in, the data they compare with, and one small Ray for the whole session.

Property tests draw the same examples everywhere and have no deadline on a busy machine.
"""

import os
import random
import sys
import tempfile
import zlib
from importlib import import_module

# Before anything imports torch: threads of several processes of pytest would wait for each other's processors.
os.environ.setdefault(
    "OMP_NUM_THREADS", str(max(1, os.cpu_count() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
)

import numpy as np
import pytest
import third_party
from hypothesis import settings
from recordings import ORIGINS, OWN_SHOP
from xdist.scheduler import LoadFileScheduling

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")


def pytest_configure(config):
    """A folder that the user named must be the right one; only without a name may the data be missing."""
    if third_party.NAMED and third_party.missing():
        raise pytest.UsageError(third_party.missing())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests of two folders with their names, and put the files that take longest first, then those that start actors.

    No worker then ends with one of these files alone.
    """
    for item in items:
        if item.path.parent.name in ("faults", "peers"):
            item.add_marker(item.path.parent.name)
    longest = [item.path for item in items if item.get_closest_marker("e2e")]
    actors = [item.path for item in items if item.get_closest_marker("actors") or "ray_session" in item.fixturenames]
    rank = dict.fromkeys(actors, 1) | dict.fromkeys(longest, 0)
    items.sort(key=lambda item: rank.get(item.path, 2))


class FileScheduling(LoadFileScheduling):
    """Gives a worker all tests of a file, of the engines' conformance those of one engine: they share what they start.

    Not ``--dist loadgroup``: xdist 3.8 hands out single tests then, since the names of pytest 9.2's items cannot be changed.
    """

    def _split_scope(self, nodeid):
        file, _, test = nodeid.partition("::")
        return f"{file} {'vllm' in test.partition('[')[2]}" if file.endswith("test_engine_conformance.py") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The scheduler of the workers."""
    return FileScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip what needs third-party data or a CUDA device that are not here; seed what is drawn without a generator.

    Tests draw other numbers, so that workers side by side, whose Ray draws ports, do not take the same ones.
    """
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    if item.get_closest_marker("data") and (missing := third_party.missing()):
        pytest.skip(missing)
    if item.get_closest_marker("gpu") and not import_module("torch").cuda.is_available():
        pytest.skip("no CUDA device here")


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory):
    """A home for this session alone: no data or cache of the user takes part, and none is left behind."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ALFWORLD_DATA", "WEBSHOP_DATA", "SEARCH_QA_DATA", "TRIAL_RAY_CACHE", "XDG_CACHE_HOME"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """Folder of the smallest untrained model and its tokenizer, shared by all tests, none of which may change it."""
    from nano_model import save_nano_model

    folder = save_nano_model(tmp_path_factory.mktemp("model") / "nano")

    def contents():
        return {file: file.read_bytes() for file in folder.iterdir()}

    saved = contents()
    yield str(folder)
    assert saved == contents(), "a test changed the shared model"


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of tiny models, which no test may change."""
    from nano_model import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def exact_model_path(tmp_path_factory):
    """Folder of a model whose float64 gradients are exact; see ``nano_model.save_exact_model``."""
    from nano_model import save_exact_model

    return str(save_exact_model(tmp_path_factory.mktemp("model") / "exact"))


@pytest.fixture(scope="session")
def ray_session():
    """Ray with two logical CPUs; actors take fractions of them."""
    import ray

    from trial_ray.ray_internals import local_start

    # Ray's sockets live under this folder, and their paths must stay short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with local_start():
            ray.init(
                "local",
                num_cpus=2,
                object_store_memory=150_000_000,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=folder,
            )
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def algorithm_of(ray_session):
    """Makes the algorithm of a config, with the engines and env runners of the one before it where it asks for the same.

    There is one at a time; tests do not stop it, and leave it whole.
    """
    from trial_ray import GRPO

    algo = None

    def algorithm_of(config):
        nonlocal algo
        if algo is None:
            algo = GRPO(config=config)
        else:
            algo.reset(config.to_dict())
        return algo

    yield algorithm_of
    import ray

    # Commands that were tested in this process have ended their Ray with themselves.
    if algo is not None and ray.is_initialized():
        algo.stop()


@pytest.fixture(params=ORIGINS)
def origin(request):
    """Whose games, shop and recordings a test takes: ``own``, or (marked ``data``) ``published``."""
    return request.param


@pytest.fixture(scope="session")
def own_shop(tmp_path_factory):
    """Index folder of the generated shop that the own recordings are of."""
    from trial_envs.webshop.generator import open_generated

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("own_shop")))
        return open_generated(OWN_SHOP).folder


@pytest.fixture(scope="session")
def published_shop(tmp_path_factory):
    """Index folder of the 1,000-product shop; for tests that are marked ``data``."""
    from trial_envs.webshop.preparation import prepare

    return prepare(third_party.WEBSHOP_1K, tmp_path_factory.mktemp("published_shop") / "index")


@pytest.fixture
def shop_folder(origin, request):
    """Index folder of the shop of the origin."""
    return request.getfixturevalue(f"{origin}_shop")


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """A cache folder for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path
