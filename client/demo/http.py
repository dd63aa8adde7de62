"""Owns the demo's side of an engine's HTTP: JSON to loopback, one request a connection."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 120.0


def connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None = None) -> None:
    """Sends the request and does not wait for its answer."""
    data = None if body is None else json.dumps(body).encode()
    connection.request(method, path, body=data, headers={"Content-Type": "application/json"})


def request(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer's JSON. Raises OSError or http.client.HTTPException for a connection that fails, ValueError for any
    status but 200."""
    connection = connect(url)
    try:
        ask(connection, method, path, body)
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise ValueError(f"{method} {path} answered {response.status}: {data[:200]!r}")
        parsed: dict[str, Any] = json.loads(data)
        return parsed
    finally:
        connection.close()
