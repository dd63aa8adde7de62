"""What every test folder shares: tests that need root are skipped for others. Fixtures live beside their tests."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `root` unless we are root: only root can become another user or mount."""
    if os.geteuid() == 0:
        return
    needs_root = pytest.mark.skip(reason="needs root, to become another user")
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(needs_root)
