"""Settings of every test, and one small Ray for the whole session.

Property tests draw the same examples everywhere and have no deadline on a busy machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

WEBSHOP_1K = Path(__file__).parents[1].parent / "shared" / "data" / "webshop_1k"

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray with two logical CPUs; actors take fractions of them."""
    import ray

    # Ray's sockets live under this folder, and their paths must stay short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        start_ray(folder)
        yield
        ray.shutdown()


def start_ray(folder: str, attempts: int = 3) -> None:
    """Start Ray, again where a busy machine took longer than the 30 s for which Ray waits."""
    import ray

    for attempt in range(1, attempts + 1):
        try:
            ray.init(
                num_cpus=2,
                object_store_memory=150_000_000,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=folder,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == attempts or "timed out" not in str(error):
                raise


@pytest.fixture(scope="session")
def webshop_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Index folder of the 1,000-product shop; prepared once."""
    from trial_envs.webshop.preparation import prepare

    if not WEBSHOP_1K.is_dir():
        pytest.skip("the 1,000-product shop is not on this machine")
    return prepare(WEBSHOP_1K, tmp_path_factory.mktemp("webshop") / "index")


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder for this test alone, and no data named by the user's variables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    return tmp_path
