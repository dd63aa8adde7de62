"""Owns the error for a request that cannot be answered as it is: the sender's to fix, not the engine's."""

from __future__ import annotations

from http import HTTPStatus


class RequestRefused(Exception):
    """The request was not carried out and changed nothing. ``status`` is what HTTP answers."""

    def __init__(self, message: str, *, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status
