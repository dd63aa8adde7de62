"""What every test folder shares: tests that need root are skipped for others, and how hard hypothesis tries. Fixtures
live beside their tests.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

# No deadline for one example: a busy machine is not a bug. What never ends is pytest's timeout to find.
settings.register_profile("quick", deadline=None)
settings.register_profile(
    "thorough", deadline=None, max_examples=2_000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `root` unless we are root: only root can become another user or mount."""
    if os.geteuid() == 0:
        return
    needs_root = pytest.mark.skip(reason="needs root, to become another user")
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(needs_root)
