"""An engine with a loader of its own hears where it has to use it: where the contract allows the disk, only there."""

import logging
import socket
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from tests.support.daemons import Daemon
from weightcached.client.own_loader import attach_or_none
from weightcached.protocol.errors import DaemonAbsent, DaemonUnreachable, InvalidOption
from weightcached.protocol.places import Place


def fallbacks(place: Place) -> float:
    labels = {"place": str(place)}
    return REGISTRY.get_sample_value("weightcached_client_disk_fallbacks_total", labels) or 0.0


def test_an_absent_place_is_told_and_counted_and_nothing_is_loaded(
    model: Path, place: Place, log: pytest.LogCaptureFixture
) -> None:
    before = fallbacks(place)
    assert attach_or_none(model, runtime_dir=place.runtime_dir) is None
    assert fallbacks(place) == before + 1
    warnings = [record.getMessage() for record in log.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert str(place.socket_path) in warnings[0]
    assert str(model) in warnings[0]


def test_off_is_no_fallback_and_require_is_an_error(model: Path, place: Place, log: pytest.LogCaptureFixture) -> None:
    before = fallbacks(place)
    assert attach_or_none(model, mode="off", runtime_dir=place.runtime_dir) is None
    with pytest.raises(DaemonAbsent):
        attach_or_none(model, mode="require", runtime_dir=place.runtime_dir)
    with pytest.raises(InvalidOption):
        attach_or_none(model, mode="perhaps", runtime_dir=place.runtime_dir)  # type: ignore[arg-type]
    assert fallbacks(place) == before
    assert log.records == []


def test_a_daemon_that_died_is_no_fallback(model: Path, place: Place) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place.socket_path))
    with pytest.raises(DaemonUnreachable):
        attach_or_none(model, runtime_dir=place.runtime_dir)


def test_where_a_daemon_is_its_weights_are_had(settled_model: Path, steady_daemon: Daemon) -> None:
    weights = attach_or_none(settled_model, runtime_dir=steady_daemon.place.runtime_dir)
    assert weights is not None
    with weights:
        assert weights.source == "daemon"
