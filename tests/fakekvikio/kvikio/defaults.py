"""The settings that the loader touches: the mode in which reads may be done by other means."""

from __future__ import annotations

from typing import Any

from kvikio import CompatMode  # type: ignore[import-not-found]  # itself: on no path but a test's

_settings: dict[str, Any] = {"compat_mode": CompatMode.AUTO}


class _Set:
    """Set at once, and as before when left."""

    def __init__(self, name: str, value: Any) -> None:
        self._before = (name, _settings[name])
        _settings[name] = value

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        name, value = self._before
        _settings[name] = value


def set(name: str, value: Any) -> _Set:
    return _Set(name, value)


def get(name: str) -> Any:
    return _settings[name]
