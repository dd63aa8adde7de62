"""What the driver says of itself."""

from __future__ import annotations

from kvikio import worse  # type: ignore[import-not-found]  # itself: on no path but a test's


def get(name: str) -> bool:
    if name != "is_gds_available":
        raise KeyError(name)
    return not worse("unavailable")
