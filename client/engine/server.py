"""Owns HTTP on loopback for one :class:`Service`: routes, limits, errors, and a stop that finishes what is under way.

    POST /generate  {"prompt": TEXT, "max_new_tokens": N}  → text, token_ids, prompt_tokens, finish_reason, seconds
    POST /embed     {"texts": [TEXT, …]}                   → embeddings: one list of floats a text
    GET  /healthz                                          → {"status": "ok"} while it serves
    GET  /status                                           → Service.status() with the seconds of the start

Errors are JSON, ``{"error": TEXT}``, with 400 (bad request), 404, 405, 409 (the model cannot do that), 411, 413 or 500.
A thread per connection; the service answers one at a time.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weightcached.client.engine.refusal import RequestRefused
from weightcached.client.engine.service import Service
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import DeploymentError

LOOPBACK = "127.0.0.1"
BODY_MAX_BYTES = 1024 * 1024
TEXTS_MAX = 256
IDLE_TIMEOUT_S = 10.0
"""For a client that sends nothing in the middle of its request, or does not take the answer."""

LINGER_S = 1.0

_log = logging.getLogger(__name__)


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class GenerateRequest(_Request):
    prompt: str
    max_new_tokens: int = Field(default=32, ge=1, le=1 << 20)


class EmbedRequest(_Request):
    texts: Annotated[list[str], Field(min_length=1, max_length=TEXTS_MAX)]


_R = TypeVar("_R", bound=_Request)


class EngineServer:
    """Listens from construction on (the port may be 0); serves between :meth:`start` and :meth:`stop`."""

    def __init__(self, service: Service, *, port: int, start_seconds: Mapping[str, float]) -> None:
        """Raises DeploymentError when the port cannot be had."""
        handler = type("Handler", (_Handler,), {"service": service, "start_seconds": dict(start_seconds)})
        try:
            self._http = _Server((LOOPBACK, port), handler)
        except OSError as error:
            raise DeploymentError(
                "cannot listen", found=error.strerror, where=f"{LOOPBACK}:{port}", next_step="choose another --port"
            ) from error
        self._thread = threading.Thread(target=self._http.serve_forever, name="http", daemon=True)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._http.server_address[1]}"

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, timeout_s: float) -> bool:
        """Takes no new request, lets those under way finish within ``timeout_s``, closes. Whether all of them did."""
        if self._thread.ident is not None:  # else nobody serves, and `shutdown` would wait for somebody to stop
            self._http.shutdown()
            self._thread.join()
        finished = self._http.wait_idle(timeout_s)
        self._http.server_close()
        return finished


class _Server(ThreadingHTTPServer):
    """Threads are daemons (an idle connection must not hold up the end), so requests under way are counted here."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._idle = threading.Condition()
        self._under_way = 0
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the base class's look-up of our own name, which takes seconds where a resolver does not answer."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def begin(self) -> None:
        with self._idle:
            self._under_way += 1

    def end(self) -> None:
        with self._idle:
            self._under_way -= 1
            self._idle.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        deadline = Deadline.after(timeout_s)
        with self._idle:
            return self._idle.wait_for(lambda: self._under_way == 0, deadline.remaining_s())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection's own failure (its peer went away in the middle of an answer) is a line, not a traceback."""
        _log.info("a connection failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One connection, one request (HTTP/1.0). ``service`` and ``start_seconds`` are set by the server's subclass."""

    server: _Server
    service: ClassVar[Service]
    start_seconds: ClassVar[dict[str, float]]
    timeout = IDLE_TIMEOUT_S
    server_version = "weightcached-engine"
    sys_version = ""

    def do_GET(self) -> None:
        self._route(
            {
                "/healthz": lambda: {"status": "ok"},
                "/status": lambda: {**self.service.status(), "start_seconds": self.start_seconds},
            },
            others={"/generate": "POST", "/embed": "POST"},
        )

    def do_POST(self) -> None:
        self._route({"/generate": self._generate, "/embed": self._embed}, others={"/healthz": "GET", "/status": "GET"})

    def _route(self, routes: Mapping[str, Callable[[], dict[str, Any]]], *, others: Mapping[str, str]) -> None:
        path = self.path.partition("?")[0]
        self.server.begin()
        try:
            if path in routes:
                self._reply(HTTPStatus.OK, routes[path]())
            elif path in others:
                self._reply(
                    HTTPStatus.METHOD_NOT_ALLOWED,
                    {"error": f"{path} takes {others[path]}"},
                    headers={"Allow": others[path]},
                )
            else:
                known = ", ".join(sorted({*routes, *others}))
                self._reply(HTTPStatus.NOT_FOUND, {"error": f"nothing at {path}; there are {known}"})
        except RequestRefused as error:
            self._reply(error.status, {"error": str(error)})
        except OSError:
            raise  # the connection's; nobody is there to be told
        except Exception:  # noqa: BLE001  # one request's failure must not end the engine; logged whole, told as 500
            _log.exception("a request failed", extra={"path": path})
            self._reply(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "the engine failed; its log has the reason"})
        finally:
            self.server.end()

    def _generate(self) -> dict[str, Any]:
        request = self._body(GenerateRequest)
        return dataclasses.asdict(self.service.generate(request.prompt, max_new_tokens=request.max_new_tokens))

    def _embed(self) -> dict[str, Any]:
        return {"embeddings": self.service.embed(self._body(EmbedRequest).texts)}

    def _body(self, kind: type[_R]) -> _R:
        """The request's body, read whole and validated. Raises RequestRefused before reading one that is too large."""
        stated = self.headers.get("Content-Length")
        if stated is None or not stated.isascii() or not stated.isdigit():
            raise RequestRefused("a Content-Length is needed", status=HTTPStatus.LENGTH_REQUIRED)
        if int(stated) > BODY_MAX_BYTES:
            raise RequestRefused(
                f"the body has {stated} bytes, at most {BODY_MAX_BYTES} are taken",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
        data = self.rfile.read(int(stated))
        if len(data) != int(stated):
            raise RequestRefused(f"the body ended after {len(data)} of {stated} bytes")
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise RequestRefused(_in_words(error)) from error

    def _reply(
        self, status: HTTPStatus, content: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
    ) -> None:
        data = json.dumps(content).encode() + b"\n"
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses by itself (bad request line, unknown method), in our form."""
        status = HTTPStatus(code)
        self._reply(status, {"error": message or status.phrase}, headers={"Connection": "close"})

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args, extra={"peer": self.address_string()})

    def finish(self) -> None:
        """Closing with unread data resets the connection before its peer has read a refusal: end our side first."""
        super().finish()
        deadline = Deadline.after(LINGER_S)
        try:
            self.connection.shutdown(socket.SHUT_WR)
            while not deadline.passed:
                self.connection.settimeout(max(deadline.remaining_s(), 0.001))
                if not self.connection.recv(65536):
                    break
        except OSError as error:
            _log.debug("a peer did not close its connection after the answer", extra={"reason": str(error)})


def _in_words(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, detail['loc'])) or 'body'}: {detail['msg']}" for detail in error.errors(include_url=False)
    )
