"""A ``Report`` to change, and metrics read back as a scraper reads them."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from weightcached.protocol.messages import Durations, GenerationInfo, LeaseInfo, Report


def held(generation: str, **changes: Any) -> GenerationInfo:
    """A generation as it is reported."""
    fields: dict[str, Any] = {
        "generation": generation,
        "version": "digest:" + "b" * 64,
        "receipts_version": "receipts:" + "c" * 64,
        "standing": "current",
        "origin": "/models/a",
        "digest": "b" * 64,
        "resident_nbytes": 1 << 30,
        "leases": 3,
        "pinned": False,
        "age_s": 60.0,
    }
    return GenerationInfo(**{**fields, **changes})


READY = Report(
    daemon_version="1.2.3",
    pid=11,
    place="default/host-tp0of1",
    socket_path="/run/weightcached/default/host-tp0of1.sock",
    model="/models/a",
    layout="fused",
    tp_rank=0,
    tp_size=1,
    dtype="auto",
    quantization="fp8",
    memory="host",
    state="ready",
    stage="ready",
    bytes_done=0,
    bytes_total=0,
    bytes_per_s=0.0,
    resident_nbytes=1 << 30,
    own_memory_nbytes=25 << 20,
    generation="a" * 32,
    version="digest:" + "b" * 64,
    fingerprint="c" * 64,
    digest="b" * 64,
    leases=(LeaseInfo(pid=12, uid=0, name="engine", age_s=5.0, silent_s=4.0),),
    lease_count=5,
    last_error=None,
    uptime_s=60.0,
    load_seconds={"load": 2.0, "verify": 0.5},
    bytes_read=3 << 30,
    attaches={"granted": 7, "content_mismatch": 2},
    vault="kept",
    proven=True,
    generations=2,
    held=(held("a" * 32), held("e" * 32, standing="previous", resident_nbytes=5 << 20, leases=2)),
    quarantined=("d" * 32,),
    quarantined_nbytes=1 << 20,
    starts=4,
    adoptions=3,
    adoption_seconds=0.25,
    heartbeat_age_s=4.0,
    disk_fallbacks=6,
    connections=8,
    detached=2,
    protocol_errors={"protocol": 9, "slow_reader": 1},
    adoption_refusals={"transfer": 1},
    adoption_attempts=1,
    unexplained_nbytes=1 << 20,
    attach_durations=Durations(bounds_s=(0.001, 0.1), counts=(4, 2, 1), total_s=3.5),
    load_durations=Durations(bounds_s=(1.0, 10.0), counts=(0, 1, 0), total_s=2.5),
    load_rates={"load weights": 1.5e9},
)
"""A daemon with something in every field."""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """(name, labels) → value, of a ``/metrics`` page. Fails on a page that Prometheus could not read."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, f"{family.name} has no help"
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{sample.name}{sample.labels} twice"
            found[key] = sample.value
    return found


def value(found: Samples, name: str, **labels: Any) -> float | None:
    """Of ``weightcached_NAME`` with these labels, ``place`` left out where there is one place; ``None`` if absent."""
    wanted = {key: str(text) for key, text in labels.items()}
    matching = []
    for (full, pairs), number in found.items():
        have = dict(pairs)
        if "place" not in labels:
            have.pop("place", None)
        if full == f"weightcached_{name}" and have == wanted:
            matching.append(number)
    assert len(matching) < 2, f"{name} has {len(matching)} samples with {labels}"
    return matching[0] if matching else None
