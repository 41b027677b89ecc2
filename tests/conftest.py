"""What every test shares: one seed for the whole run, printed, so that a failure can be replayed with it."""

import os
import random

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    derandomize=False,
    max_examples=100,
    print_blob=True,
    # How long an example takes says more about the machine's other work than about the test.
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ci")

_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --seed; without it the environment's KV_SEED counts, and without that a fresh number."""
    parser.addoption("--seed", type=int, default=None, help="replay a run with the seed that it printed")


def pytest_configure(config: pytest.Config) -> None:
    """Settle the seed before anything draws from it, Hypothesis included."""
    seed = config.getoption("--seed")
    if seed is None:
        seed = int(os.environ.get("KV_SEED") or random.SystemRandom().randrange(2**32))
    config.stash[_SEED] = seed
    if config.getoption("hypothesis_seed", default=None) is None:
        config.option.hypothesis_seed = str(seed)


def pytest_report_header(config: pytest.Config) -> str:
    """Print the seed even when everything passes."""
    return f"seed: {config.stash[_SEED]} (replay with --seed or KV_SEED)"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return the run's seed."""
    return request.config.stash[_SEED]


@pytest.fixture
def rng(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """Return a generator that depends on the seed and on the test, and not on which tests ran before."""
    return random.Random(f"{seed}/{request.node.nodeid}")
