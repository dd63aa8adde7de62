"""The notify protocol (sd_notify(3), FDSTORE and all) as words: what a datagram says, and what it may say.

Owns encoding, decoding with every check that needs no system call, and the form of addresses and names. Sends and
receives nothing. ``notify.py`` speaks it, ``supervisor/`` understands it; systemd does both. One word is ours: with
``X_WEIGHTCACHED_KEPT=1`` and the writing end of a pipe a keeper asks which descriptors are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightcached.protocol.errors import InvalidEnvironment

DATAGRAM_MAX_BYTES = 4096
"""What systemd reads of one datagram."""
DESCRIPTORS_MAX = 253
"""What the kernel passes in one message."""
NAME_MAX_LENGTH = 255
NAMELESS = "stored"
"""What a descriptor is called that was stored without a name, or under one that cannot be used."""

MANAGED_VARIABLES = (
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_PIDFDID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
)
"""What a service manager says to one process and to nobody that it starts."""
SUPERVISOR_VARIABLE = "WEIGHTCACHED_SUPERVISOR"
"""Set by `weightcached supervise` to its own pid: the parent whose child sees it answers questions about its store."""
KEPT_QUERY = "X_WEIGHTCACHED_KEPT"

_SOCKET_ADDRESS_MAX_BYTES = 107
_FLAGS = ("READY", "STOPPING", "FDSTORE", "FDSTOREREMOVE", "BARRIER", KEPT_QUERY)
_TEXTS = ("STATUS", "FDNAME", "ERRNO", "WATCHDOG")
_ERRNO_MAX = 4095


class BadDatagram(ValueError):
    """Not a datagram that can be acted upon. Its message is the reason, for a log line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """What one datagram says. A barrier and a query come alone; to store and to remove exclude each other."""

    ready: bool = False
    stopping: bool = False
    alive: bool = False
    """A sign of life for the watchdog."""
    hung: bool = False
    """The sender asks to be treated as if the watchdog had run out."""
    status: str | None = None
    errno: int | None = None
    store: bool = False
    remove: bool = False
    name: str = NAMELESS
    barrier: bool = False
    kept_query: bool = False


def encode(fields: Mapping[str, str]) -> bytes:
    """One datagram. ValueError for a value that would end its line, or for more than is read of a datagram."""
    for key, value in fields.items():
        if "\n" in value or "\0" in value:
            raise ValueError(f"the value of {key} would end its line: {value!r}")
    data = "\n".join(f"{key}={value}" for key, value in fields.items()).encode()
    if len(data) > DATAGRAM_MAX_BYTES:
        raise ValueError(f"{len(data)} bytes for a datagram of which {DATAGRAM_MAX_BYTES} are read")
    return data


def decode(data: bytes, *, descriptors: int) -> Notification:
    """What a datagram says that came with so many descriptors. Words that are not ours to know are passed over.

    Pure, for any bytes. Raises BadDatagram and nothing else.
    """
    if len(data) > DATAGRAM_MAX_BYTES:
        raise BadDatagram(f"over {DATAGRAM_MAX_BYTES} bytes")
    values = _known_values(data)
    flags = {key for key in _FLAGS if key in values}
    for key in flags:
        if values[key] != "1":
            raise BadDatagram(f"{key} is not 1")
    watchdog = values.get("WATCHDOG")
    if watchdog not in (None, "1", "trigger"):
        raise BadDatagram("WATCHDOG is neither 1 nor trigger")
    _check_descriptors(values, flags, descriptors)
    return Notification(
        ready="READY" in flags,
        stopping="STOPPING" in flags,
        alive=watchdog == "1",
        hung=watchdog == "trigger",
        status=values.get("STATUS"),
        errno=_errno(values.get("ERRNO")),
        store="FDSTORE" in flags,
        remove="FDSTOREREMOVE" in flags,
        name=usable_name(values.get("FDNAME", NAMELESS)),
        barrier="BARRIER" in flags,
        kept_query=KEPT_QUERY in flags,
    )


def _known_values(data: bytes) -> dict[str, str]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise BadDatagram("not UTF-8") from None
    if "\0" in text:
        raise BadDatagram("a NUL character")
    values: dict[str, str] = {}
    for line in text.split("\n"):
        key, separator, value = line.partition("=")
        if separator and key in (*_FLAGS, *_TEXTS):
            if key in values:
                raise BadDatagram(f"{key} stands twice")
            values[key] = value
    return values


def _check_descriptors(values: Mapping[str, str], flags: set[str], descriptors: int) -> None:
    for alone in ("BARRIER", KEPT_QUERY):
        if alone in flags:
            if len(values) > 1:
                raise BadDatagram(f"{alone} does not stand alone")
            if descriptors != 1:
                raise BadDatagram(f"{alone} with {descriptors} descriptors instead of one")
            return
    if {"FDSTORE", "FDSTOREREMOVE"} <= flags:
        raise BadDatagram("to store and to remove at once")
    if "FDSTOREREMOVE" in flags and "FDNAME" not in values:
        raise BadDatagram("FDSTOREREMOVE without a name")
    if "FDSTORE" in flags and not descriptors:
        raise BadDatagram("FDSTORE without a descriptor")
    if "FDSTORE" not in flags and descriptors:
        raise BadDatagram(f"{descriptors} descriptors with nothing to do")


def _errno(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 4 and int(value) <= _ERRNO_MAX):
        raise BadDatagram("ERRNO is no error number")
    return int(value)


def name_is_usable(name: str) -> bool:
    """Whether a descriptor can be called that: printable ASCII without the colon that separates names."""
    return 0 < len(name) <= NAME_MAX_LENGTH and all(" " <= character <= "~" and character != ":" for character in name)


def usable_name(name: str) -> str:
    """The name, or the one for nameless descriptors, as systemd does it: a descriptor is kept rather than lost."""
    return name if name_is_usable(name) else NAMELESS


def socket_address(text: str) -> str:
    """The address to connect to for a ``NOTIFY_SOCKET``: a path, or an abstract name behind ``@``.

    Raises InvalidEnvironment.
    """
    length = len(text.encode("utf-8", "surrogateescape"))
    if "\0" in text or not 1 < length <= _SOCKET_ADDRESS_MAX_BYTES or text[0] not in "/@":
        raise InvalidEnvironment(
            "NOTIFY_SOCKET is not the address of a Unix socket",
            expected=f"/path or @name, at most {_SOCKET_ADDRESS_MAX_BYTES} bytes",
            found=ascii(text),
        )
    return "\0" + text[1:] if text[0] == "@" else text


def watchdog_interval_s(environment: Mapping[str, str], *, pid: int) -> float | None:
    """How often process ``pid`` has to give a sign of life, or None. Raises InvalidEnvironment."""
    text = environment.get("WATCHDOG_USEC")
    if text is None or environment.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) > 0):
        raise InvalidEnvironment("WATCHDOG_USEC is not an interval", expected="microseconds, over 0", found=ascii(text))
    return int(text) / 1e6
