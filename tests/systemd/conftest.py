"""A box with `weightcached install-units` done in it, and a model of two ranks that it serves. Made once."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import digest_of
from tests.support.unprivileged import ROOT
from tests.systemd.box import TREES, Box, missing, running_box
from tests.systemd.services import Service

MODEL = "/srv/model"
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "vocab_size": 4096,
}
"""About 0.1 GiB for each of two ranks."""


def install(box: Box) -> None:
    """As the documentation says, for a clone that may lie in /tmp, which the services do not see otherwise.

    Compiled, as pip leaves it: who runs the services could not write that, and would compile at each start.
    """
    rooms = [ROOT / room for room in ("client", "daemon", "loader", "protocol")]
    box.run("python", "-m", "compileall", "-q", *rooms)
    box.run(f"{sys.prefix}/bin/weightcached", "install-units")
    box.run("systemd-sysusers")
    box.run("systemd-tmpfiles", "--create", "weightcached.conf")
    trees = " ".join(map(str, TREES))
    for unit in ("weightcached@.service", "weightcached-exporter.service", "weightcached-engine-example.service"):
        box.write(f"/etc/systemd/system/{unit}.d/clone.conf", f"[Service]\nBindReadOnlyPaths={trees}\n")
    box.run("systemctl", "daemon-reload")


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    """Booted, and installed as the documentation says. Skips where there can be no box."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with running_box() as running:
        install(running)
        yield running


@pytest.fixture(scope="session")
def services(box: Box) -> tuple[Service, Service]:
    """Both ranks of the model, started through the target. Whoever stops one starts it again (see :func:`ranks`)."""
    tiny_llama(box.path(MODEL), **SHAPE)
    digest = digest_of(box.path(MODEL))
    settings = f"WEIGHTCACHED_MODEL={MODEL}\nWEIGHTCACHED_TP_SIZE=2\nWEIGHTCACHED_OPTIONS=--layout fused\n"
    box.write("/etc/weightcached/weightcached.env", settings)
    box.run("systemctl", "enable", "weightcached@0.service", "weightcached@1.service")
    box.run("systemctl", "start", "weightcached.target")
    first, second = (Service(box, str(rank), MODEL, digest, tp_rank=rank, tp_size=2) for rank in range(2))
    return first, second


@pytest.fixture
def ranks(services: tuple[Service, Service]) -> tuple[Service, Service]:
    """Both ranks, running and ready."""
    for service in services:
        service.systemctl("start")
    return services
