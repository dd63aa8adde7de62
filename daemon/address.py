"""Where metrics are served: an address that was written down, checked before anything listens.

Owns parsing ``HOST:PORT`` and the rule that only this host is served unless the operator says otherwise: whoever can
connect learns model paths, versions and who attaches. Pure; no name is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weightcached.protocol.errors import InvalidOption

_PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """A literal IP address and a port; port 0 is any that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, option: str, remote_option: str, allow_remote: bool) -> Address:
        """From ``127.0.0.1:9410`` or ``[::1]:9410``. Raises InvalidOption, naming ``option``, for anything else, and
        for an address that others can reach unless ``allow_remote``, which ``remote_option`` sets.
        """
        import ipaddress  # only who serves metrics pays for it

        host, _, port = text.rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
        try:
            ip, number = ipaddress.ip_address(host), int(port)
        except ValueError as error:
            raise InvalidOption(
                f"{option} is not an address", expected="IP:PORT, such as 127.0.0.1:9410 or [::1]:9410", found=text
            ) from error
        if not (port.isascii() and port.isdigit() and number <= _PORT_MAX):
            raise InvalidOption(f"{option} has no port", expected=f"0 to {_PORT_MAX}", found=port)
        if not ip.is_loopback and not allow_remote:
            raise InvalidOption(
                f"{option} can be reached from other hosts, which learn model paths and who attaches",
                expected="a loopback address",
                found=text,
                next_step=f"say {remote_option} as well if that is meant",
            )
        return cls(str(ip), number)

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        import ipaddress

        return ipaddress.ip_address(self.host).is_loopback

    def shifted(self, ranks: int) -> Address:
        """The address for a daemon so many ranks further: each needs a port of its own. Raises InvalidOption when there
        is no such port.
        """
        if self.port == 0 or ranks == 0:
            return self
        if self.port + ranks > _PORT_MAX:
            raise InvalidOption(
                "not every rank has a port", expected=f"at most {_PORT_MAX}", found=f"{self.port} + {ranks}"
            )
        return replace(self, port=self.port + ranks)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
