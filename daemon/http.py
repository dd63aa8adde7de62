"""A very small HTTP server for the pages of ``pages.py``: GET and HEAD, one request a connection, under a deadline.

Owns the listening socket, the limits and the connections. At a loopback address it answers to no names but
``localhost``: a web page whose own name was pointed to this host (DNS rebinding) gets nothing to read. Runs on the
caller's event loop, and cannot delay what else runs there by more than the making of one page at a time: it waits for
nobody, and takes few connections. The snapshot behind a page is taken anew for each request. Imported late by the
keeper, which has bound its socket by then.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from weightcached.daemon.address import Address
from weightcached.daemon.pages import PAGES, TEXT, Reply, Snapshot, page

HEAD_MAX_BYTES = 8 * 1024
CONNECTIONS_MAX = 64
REQUEST_TIMEOUT_S = 5.0
"""For a whole request to arrive, and again for its answer to be taken."""

log = logging.getLogger(__name__)


class HttpServer:
    """From :meth:`start` until :meth:`close`. ``snapshot`` sees what there is to see, now."""

    def __init__(self, snapshot: Callable[[], Awaitable[Snapshot]], *, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._snapshot = snapshot
        self._timeout_s = timeout_s
        self._server: asyncio.Server | None = None
        self._only_local_names = True
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, address: Address) -> Address:
        """Listen; where (another port, if any would do). Raises OSError when the address cannot be had."""
        self._only_local_names = address.is_loopback
        self._server = await asyncio.start_server(self._accept, address.host, address.port, limit=HEAD_MAX_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return Address(address.host, port)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="http request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, reply = await self._answer(reader)
            writer.write(_encoded(reply, body=method != "HEAD"))
            async with asyncio.timeout(self._timeout_s):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            log.debug("an http request came to nothing", extra={"reason": repr(error)})
        except Exception:
            log.exception("an http request met an error of ours")
            writer.write(_encoded(_said(HTTPStatus.INTERNAL_SERVER_ERROR)))
            writer.close()
        finally:
            if not writer.transport.is_closing():
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Reply]:
        try:
            async with asyncio.timeout(self._timeout_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "GET", _said(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "GET", _said(HTTPStatus.BAD_REQUEST)
        method, path = words[0], words[1].partition("?")[0]
        if self._only_local_names and not all(map(_is_local, _hosts(head))):
            return method, _said(HTTPStatus.MISDIRECTED_REQUEST, "ask for an address or localhost, not for a name")
        if path not in PAGES:
            return method, _said(HTTPStatus.NOT_FOUND, f"there are {', '.join(PAGES)}")
        if method not in ("GET", "HEAD"):
            return method, _said(HTTPStatus.METHOD_NOT_ALLOWED)
        return method, page(path, await self._snapshot())

    async def close(self) -> None:
        """Listen no more, and end what is under way."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


def _hosts(head: bytes) -> list[str]:
    """What the request's ``Host`` headers say, without ports."""
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    values = (value.strip().decode("latin-1") for name, _, value in lines if name.strip().lower() == b"host")
    return [re.sub(r":\d*$", "", value) for value in values]


def _is_local(host: str) -> bool:
    """Whether it is no name that somebody else could have pointed to this host."""
    if host.lower() in ("localhost", ""):
        return True
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _said(status: HTTPStatus, more: str = "") -> Reply:
    return Reply(status, TEXT, f"{status.phrase.lower()}{': ' if more else ''}{more}\n".encode())


def _encoded(reply: Reply, *, body: bool = True) -> bytes:
    status = HTTPStatus(reply.status)
    head = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(reply.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        head.append("Allow: GET, HEAD")
    return "\r\n".join([*head, "", ""]).encode("ascii") + (reply.body if body else b"")
