"""How a command connects to Ray: which errors are whose, and what a busy machine is given."""

import pytest
import ray

from trial_ray.errors import ConfigError, InfrastructureError
from trial_ray.experiments.ray_session import ray_session

TIMED_OUT = "The current node timed out during startup. This could happen because"


@pytest.fixture
def starts(monkeypatch):
    """What every attempt to start raises; what the attempts were given."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    seen = []

    def fail(*errors):
        def init(**arguments):
            seen.append(arguments)
            if len(seen) <= len(errors):
                raise errors[len(seen) - 1]

        monkeypatch.setattr(ray, "init", init)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        return seen

    return fail


def test_a_slow_start_is_tried_again(starts, caplog):
    seen = starts(Exception(TIMED_OUT), Exception(TIMED_OUT))
    with ray_session():
        pass
    assert len(seen) == 3
    assert seen[0]["address"] == "local"
    assert "attempt 3 of 3" in caplog.text


@pytest.mark.parametrize(("message", "attempts"), [(TIMED_OUT, 3), ("no such file", 1)])
def test_a_ray_that_does_not_start_is_an_infrastructure_error(starts, message, attempts):
    seen = starts(*[Exception(message)] * 3)
    with pytest.raises(InfrastructureError, match=f"did not start on this machine: {message[:20]}"), ray_session():
        pass
    assert len(seen) == attempts


def test_a_cluster_that_takes_no_connection_is_the_users_to_name(starts, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:6379")
    seen = starts(ConnectionError("Could not find any running Ray instance."))
    with (
        pytest.raises(ConfigError, match=r"RAY_ADDRESS is 10\.1\.2\.3:6379, .* Could not find any running"),
        ray_session(),
    ):
        pass
    assert "address" not in seen[0]
