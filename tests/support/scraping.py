"""Asking an HTTP endpoint of ours, over real sockets."""

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any

from tests.support.reports import Samples, samples

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass(frozen=True)
class Site:
    """What listens at ``address`` (``127.0.0.1:9410``)."""

    address: str

    def ask(self, path: str, *, method: str = "GET") -> Answer:
        connection = http.client.HTTPConnection(self.address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read().decode())
        finally:
            connection.close()

    def metrics(self) -> Samples:
        return samples(self.ask("/metrics").text)

    def status(self) -> list[dict[str, Any]]:
        """The daemons of ``/status.json``."""
        daemons: list[dict[str, Any]] = json.loads(self.ask("/status.json").text)["daemons"]
        return daemons

    def connect(self) -> socket.socket:
        """A bare connection, the caller's to close."""
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)

    def say(self, data: bytes) -> bytes:
        """What is answered to these bytes, up to the end."""
        with self.connect() as connection:
            connection.sendall(data)
            with connection.makefile("rb") as stream:
                return stream.read()
