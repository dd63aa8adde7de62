"""Requests that are valid, and meant badly: every one gets an answer that can be sent, and a report stays a report.

And the other way round: every report that a daemon could send can be shown, in every form.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.protocol.test_fuzz_wire import REPORT
from tests.support.checkpoints import tiny_config
from tests.support.fuzzing import MIB, MSGPACK_VALUES, altered, ends_in, packed, plain
from tests.support.plans import cache_config
from tests.support.wires import HELLO
from weightcached.daemon import metrics, pages, status
from weightcached.daemon.leases import FallbackCount, LeaseBook
from weightcached.daemon.refusals import mismatch, refusal
from weightcached.daemon.seen import Seen
from weightcached.protocol.config import abbreviated
from weightcached.protocol.errors import ERRORS_BY_CODE, CacheConfigMismatch, ProtocolError
from weightcached.protocol.framing import Header, decode_body, encode_frame
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Hello, Message, Report
from weightcached.protocol.peers import Peer
from weightcached.protocol.places import Place

CONFIG = cache_config(tiny_config(), layout="hf")
ENTRIES = abbreviated(CONFIG.entries())
HONEST_HELLO: dict[str, Any] = {**plain(HELLO.model_dump()), "config": plain(ENTRIES)}
PLACE = Place(Path("/run/weightcached"), "default", "host-tp0of1")
COUNTS = st.integers(0, 2**63 - 1) | st.sampled_from([0, 1, 2**62, 2**63 - 1])


def received(number: int, fields: Any) -> Message | None:
    """The message, as it came over the wire."""
    dialect = CLIENT_TO_DAEMON if number in CLIENT_TO_DAEMON.types else DAEMON_TO_CLIENT
    body = packed(fields)
    return ends_in(
        ProtocolError, lambda: decode_body(dialect, Header(number, len(body), 0), body), memory_max_nbytes=64 * MIB
    )


@given(
    altered(HONEST_HELLO, MSGPACK_VALUES)
    | st.builds(
        lambda config: {**HONEST_HELLO, "config": config}, altered(HONEST_HELLO["config"], MSGPACK_VALUES, edits_max=6)
    )
)
@example({**HONEST_HELLO, "config": {f"{number}" * 100: 0 for number in range(400)}})
@example({**HONEST_HELLO, "config": {**HONEST_HELLO["config"], "model": {"$sha256": "0" * 64, "$nbytes": 1}}})
def test_a_config_that_differs_is_explained_in_a_frame(fields: Any) -> None:
    hello = received(1, fields)
    if isinstance(hello, Hello):
        answer = ends_in(ProtocolError, lambda: mismatch(CONFIG, hello), memory_max_nbytes=64 * MIB)
        if answer is not None:
            encode_frame(DAEMON_TO_CLIENT, answer)


@given(
    st.sampled_from(sorted(set(ERRORS_BY_CODE) - {CacheConfigMismatch.code})),
    st.text(max_size=20),
    st.integers(1, 5000),
)
def test_whatever_an_error_quotes_it_can_be_sent(code: str, text: str, times: int) -> None:
    text = (text + "\ud800") * times
    error = ERRORS_BY_CODE[code](text, expected=[text], found={"x": text}, where=text, next_step=text)
    encode_frame(DAEMON_TO_CLIENT, refusal(error))
    assert str(error).isprintable()


@given(st.lists(st.tuples(st.integers(1, 3), st.text(max_size=80), COUNTS), max_size=10))
@example([(1, "a", 2**63 - 1), (1, "b", 2**63 - 1)])  # found: from then on no status, no metrics, for anybody
def test_counts_that_engines_make_up_do_not_keep_others_from_a_report(said: list[tuple[int, str, int]]) -> None:
    fallbacks = FallbackCount()
    for uid, name, count in said:
        fallbacks.hear(Peer(uid, uid, uid), name, count)
    assert 0 <= fallbacks.total < 2**63
    book = LeaseBook()
    with ExitStack() as held:
        for uid, name, count in said:
            held.enter_context(book.held(peer=Peer(0, uid, 0), claimed_pid=count, name=name, generation=""))
        changed = {"disk_fallbacks": fallbacks.total, "leases": book.infos(), "lease_count": len(book)}
        encode_frame(DAEMON_TO_CLIENT, Report.model_validate({**dict(REPORT), **changed}))


def test_the_largest_report_fits_a_frame() -> None:
    book, text = LeaseBook(), "\U0001f4a9" * 4096
    with ExitStack() as held:
        for _ in range(2000):
            peer = Peer(0, 2**32 - 2, 0)
            held.enter_context(book.held(peer=peer, claimed_pid=2**63 - 1, name=text, generation=""))
        texts = {"last_error": text, "vault_reason": text, "unproven_reason": text, "model": text[:1024]}
        report = REPORT.model_copy(update={**texts, "leases": book.infos(), "lease_count": len(book)})
        assert len(encode_frame(DAEMON_TO_CLIENT, report)) < DAEMON_TO_CLIENT.body_max_bytes / 2


@given(altered(plain(REPORT.model_dump()), MSGPACK_VALUES))
@example({**plain(REPORT.model_dump()), "model": "\x1b[2J\n# HELP x\nx 1", "state": "\x1b]0;x\x07", "place": '"}\n'})
@example({**plain(REPORT.model_dump()), "load_seconds": {'a"}\nx 1\n#': 1.0}, "attaches": {"\x1b[2J": 2}})
def test_a_report_that_means_badly_is_shown_as_words(fields: Any) -> None:
    report = received(68, fields)
    if not isinstance(report, Report):
        return
    seen = [Seen(PLACE, report=report)]
    for line in status.render(seen):
        assert line.isprintable()
    snapshot = pages.Snapshot(tuple(seen))
    for path in ("/healthz", "/readyz"):
        assert pages.page(path, snapshot).body.count(b"\n") == 1
    document = json.loads(pages.page("/status.json", snapshot).body, parse_constant=_no_constant)
    assert document["daemons"][0]["pid"] == report.pid
    text = metrics.render(seen).decode()
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("weightcached_")
        assert all(
            sample.labels.get("place", "default/host-tp0of1") == "default/host-tp0of1" for sample in family.samples
        )


def _no_constant(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")
