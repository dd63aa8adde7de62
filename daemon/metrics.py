"""What Prometheus is told: daemons' reports as metric families. Pure; every figure comes from a ``Report``, or from
:class:`~weightcached.daemon.mapped.Mapped` and :class:`~weightcached.daemon.gpus.Gpu` where the exporter has looked at
the host's processes and GPUs.

Owns names, units, labels and help texts. A family is one line of a table below. Every sample carries ``place``
(``default/host-tp0of1``), so that one query serves a daemon's own endpoint and an exporter's. Labels take few values:
states, stages, codes of the error tree. Imported by whoever serves metrics, late: the keeper has bound by then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from weightcached.daemon.gpus import Gpu
from weightcached.daemon.mapped import Mapped
from weightcached.daemon.seen import Seen
from weightcached.daemon.states import SERVING, State
from weightcached.protocol.messages import Durations, GenerationInfo, Report, Standing, VaultState

PREFIX = "weightcached_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Reading = Callable[[Report], float | None]
_Readings = Callable[[Report], Mapping[str, float]]

_GAUGES: dict[str, tuple[str, _Reading]] = {
    "ready": ("1 while engines are granted weights.", lambda r: r.state in SERVING),
    "resident_bytes": ("Bytes of the weights that are served.", lambda r: r.resident_nbytes),
    "own_memory_bytes": ("Anonymous memory of the keeper itself.", lambda r: r.own_memory_nbytes),
    "generations": ("Generations that are held, quarantined ones included.", lambda r: r.generations),
    "quarantined_generations": (
        "Generations that are held and not served, because adopting them failed too often.",
        lambda r: len(r.quarantined),
    ),
    "quarantined_bytes": ("Bytes of quarantined generations.", lambda r: r.quarantined_nbytes),
    "unexplained_bytes": (
        "Bytes of weights that are held and neither served nor leased.",
        lambda r: r.unexplained_nbytes,
    ),
    "connections": ("Open connections, leases included.", lambda r: r.connections),
    "heartbeat_age_seconds": ("Since the most silent engine was heard; 0 without any.", lambda r: r.heartbeat_age_s),
    "proven": ("1 when the files on disk were seen to be what is served.", lambda r: r.proven),
    "adoption_attempts": (
        "Adoptions begun since the last one that ended; at three the generation that was looked at is quarantined.",
        lambda r: r.adoption_attempts,
    ),
    "adoption_seconds": (
        "From this keeper's start until it served what it adopted; absent where it loaded.",
        lambda r: r.adoption_seconds,
    ),
    "load_read_bytes": ("Bytes read from files by this keeper's load; 0 where it adopted.", lambda r: r.bytes_read),
    "progress_done_bytes": ("Bytes done of the stage that is going on.", lambda r: r.bytes_done),
    "progress_total_bytes": ("Bytes of the stage that is going on; 0 for one without.", lambda r: r.bytes_total),
    "progress_bytes_per_second": ("Rate of the stage that is going on, over some seconds.", lambda r: r.bytes_per_s),
    "uptime_seconds": ("Since this keeper started.", lambda r: r.uptime_s),
}

_LABELLED_GAUGES: dict[str, tuple[str, str, _Readings]] = {
    "state": ("1 for the keeper's state, 0 for the others.", "state", lambda r: _one_of(State, r.state)),
    "vault": (
        "1 for what happens to the weights when the keeper dies, 0 for the others.",
        "state",
        lambda r: _one_of(get_args(VaultState), r.vault),
    ),
    "leases": (
        "Open leases: of engines that are heard (connected), and of engines that have missed several signs of life "
        "(detached).",
        "state",
        lambda r: {"connected": r.lease_count - r.detached, "detached": r.detached},
    ),
    "held_bytes": (
        "Bytes of weights that are held by standing: what is served, earlier ones, and what waits for a decision.",
        "standing",
        lambda r: _by_standing(r, lambda one: one.resident_nbytes),
    ),
    "held_leases": (
        "Open leases by the standing of the generation that they hold.",
        "standing",
        lambda r: _by_standing(r, lambda one: one.leases),
    ),
    "load_stage_seconds": ("Seconds of each stage of this keeper's load.", "stage", lambda r: r.load_seconds),
    "load_rate_bytes_per_second": (
        "Average rate of each stage of this keeper's last load that had bytes.",
        "stage",
        lambda r: r.load_rates,
    ),
}

_COUNTERS: dict[str, tuple[str, _Reading]] = {
    "restarts": ("Keepers that came after the first one, over the life of the vault.", lambda r: max(0, r.starts - 1)),
    "adoptions": ("Adoptions of weights from the vault, over its life.", lambda r: r.adoptions),
    "disk_fallbacks": (
        "Times that engines said they had loaded from disk because they found no daemon.",
        lambda r: r.disk_fallbacks,
    ),
}

_LABELLED_COUNTERS: dict[str, tuple[str, str, _Readings]] = {
    "attaches": (
        "Attaches and resumptions by outcome: granted, resumed, unproven, or the code of the refusal.",
        "outcome",
        lambda r: {"granted": 0, "resumed": 0, **r.attaches},
    ),
    "protocol_errors": (
        "Conversations that ended because of what a client sent or did not take, by code.",
        "code",
        lambda r: {"protocol": 0, **r.protocol_errors},
    ),
    "adoption_refusals": (
        "What came back from the vault and was not adopted, by the code of the reason.",
        "code",
        lambda r: r.adoption_refusals,
    ),
}

_HISTOGRAMS: dict[str, tuple[str, Callable[[Report], Durations | None]]] = {
    "attach_seconds": ("From an engine's Hello to the grant that answers it.", lambda r: r.attach_durations),
    "load_seconds": ("Loads that succeeded, the worker's start included.", lambda r: r.load_durations),
}

_INFOS: dict[str, tuple[str, Callable[[Report], dict[str, str]]]] = {
    "build": ("The daemon's release.", lambda r: {"version": r.daemon_version}),
    "model": (
        "What is served.",
        lambda r: {
            "model": r.model,
            "layout": r.layout,
            "dtype": r.dtype,
            "quantization": r.quantization,
            "memory": r.memory,
            "tp_rank": str(r.tp_rank),
            "tp_size": str(r.tp_size),
            "generation": r.generation or "",
            "version": r.version or "",
        },
    ),
}

_HOST_GAUGES: dict[str, tuple[str, Callable[[Mapped], float]]] = {
    "host_unexplained_bytes": (
        "Bytes of weights that processes of this host map and that no daemon holds: engines that use a generation "
        "which is gone.",
        lambda mapped: mapped.nbytes,
    ),
    "host_unexplained_processes": ("Processes that map such weights.", lambda mapped: mapped.processes),
    "host_hidden_processes": (
        "Processes that the exporter may not look into: what they map is not in these figures.",
        lambda mapped: mapped.hidden,
    ),
}


_GPU_GAUGES: dict[str, tuple[str, Callable[[Gpu], float]]] = {
    "gpu_total_bytes": ("Bytes of memory that the GPU has.", lambda gpu: gpu.total_nbytes),
    "gpu_used_bytes": ("Bytes of it that are in use, by whomever.", lambda gpu: gpu.used_nbytes),
    "gpu_cached_bytes": ("Bytes of it that daemons say they hold.", lambda gpu: gpu.cached_nbytes),
    "gpu_unexplained_bytes": (
        "Bytes of it that NVML says are held by processes which no daemon knows: engines that use weights which are "
        "gone, or other programs.",
        lambda gpu: gpu.unexplained_nbytes,
    ),
    "gpu_unexplained_processes": ("Such processes.", lambda gpu: len(gpu.strangers)),
    "gpu_untold_processes": ("Those of them of which NVML does not say how much they hold.", lambda gpu: gpu.untold),
}


def _by_standing(report: Report, of: Callable[[GenerationInfo], int]) -> dict[str, float]:
    sums = dict.fromkeys(get_args(Standing), 0.0)
    for one in report.held:
        sums[one.standing] += of(one)
    return sums


def _one_of(names: Sequence[str] | type[State], current: str) -> dict[str, float]:
    return {str(name): float(name == current) for name in names}


class Families(Collector):
    """What was seen at one moment, ready to be rendered. ``mapped``: what processes map that no daemon holds; ``gpus``:
    the same of GPUs.
    """

    def __init__(self, seen: Sequence[Seen], mapped: Mapped | None = None, gpus: Sequence[Gpu] = ()) -> None:
        self._reports = [(str(one.place), one.report) for one in seen if one.report is not None]
        self._seen = seen
        self._mapped = mapped
        self._gpus = gpus

    def collect(self) -> Iterator[Metric]:
        """Every family, those without a sample included: who asks learns what there is."""
        yield self._up()
        yield self._problems()
        for name, (help_text, reading) in _GAUGES.items():
            yield self._gauge(name, help_text, reading)
        for name, (help_text, label, readings) in _LABELLED_GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["place", label])
            self._fill(gauge, readings)
            yield gauge
        for name, (help_text, reading) in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=["place"])
            for place, report in self._reports:
                counter.add_metric([place], reading(report) or 0)
            yield counter
        for name, (help_text, label, readings) in _LABELLED_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=["place", label])
            self._fill(counter, readings)
            yield counter
        yield from self._histograms()
        yield from self._infos()
        yield from self._of_the_host()
        yield from self._of_gpus()

    def _up(self) -> Metric:
        family = GaugeMetricFamily(PREFIX + "up", "1 when the place's daemon has answered.", labels=["place"])
        for one in self._seen:
            family.add_metric([str(one.place)], float(one.report is not None))
        return family

    def _problems(self) -> Metric:
        help_text = "1 for a place whose daemon has not answered, with the code of the reason."
        family = GaugeMetricFamily(PREFIX + "problem", help_text, labels=["place", "code"])
        for one in self._seen:
            if one.problem is not None:
                family.add_metric([str(one.place), one.problem.code], 1.0)
        return family

    def _gauge(self, name: str, help_text: str, reading: _Reading) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=["place"])
        for place, report in self._reports:
            if (value := reading(report)) is not None:
                family.add_metric([place], float(value))
        return family

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, readings: _Readings) -> None:
        for place, report in self._reports:
            for label, value in readings(report).items():
                family.add_metric([place, label], float(value))

    def _histograms(self) -> Iterator[Metric]:
        for name, (help_text, reading) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, help_text, labels=["place"])
            for place, report in self._reports:
                if (durations := reading(report)) is not None:
                    family.add_metric([place], _buckets(durations), durations.total_s)
            yield family

    def _infos(self) -> Iterator[Metric]:
        for name, (help_text, reading) in _INFOS.items():
            family = InfoMetricFamily(PREFIX + name, help_text, labels=["place"])
            for place, report in self._reports:
                family.add_metric([place], reading(report))
            yield family

    def _of_the_host(self) -> Iterator[Metric]:
        if self._mapped is not None:
            for name, (help_text, reading) in _HOST_GAUGES.items():
                yield GaugeMetricFamily(PREFIX + name, help_text, value=float(reading(self._mapped)))

    def _of_gpus(self) -> Iterator[Metric]:
        if not self._gpus:
            return
        up = GaugeMetricFamily(PREFIX + "gpu_up", "1 when NVML has answered for the GPU.", labels=["gpu"])
        for gpu in self._gpus:
            up.add_metric([gpu.uuid], float(gpu.problem is None))
        yield up
        for name, (help_text, reading) in _GPU_GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["gpu"])
            for gpu in self._gpus:
                if gpu.problem is None:
                    gauge.add_metric([gpu.uuid], float(reading(gpu)))
            yield gauge


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    """Bounds with cumulative counts, as Prometheus has them."""
    bounds = [*(repr(bound) for bound in durations.bounds_s), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(durations.counts)), strict=True))


def render(seen: Sequence[Seen], mapped: Mapped | None = None, gpus: Sequence[Gpu] = ()) -> bytes:
    """The text format, of type :data:`CONTENT_TYPE`."""
    return generate_latest(Families(seen, mapped, gpus))
