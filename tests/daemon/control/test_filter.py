"""Who comes in at each of the two sockets where the files' modes keep nobody out: ZeroMQ's filter by user, and behind
it the daemon's own look at each connection. Each is tried without the other.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import SCRIPTED, TIMEOUT_S, Daemon, arguments_for, scripted_environment
from tests.support.eventually import eventually
from tests.support.forked import in_child
from tests.support.unprivileged import NOBODY, command_as, folder_for_everyone
from weightcached.client.control.listening import Listener
from weightcached.daemon.claim import Claim, take
from weightcached.daemon.control.command_socket import CommandSocket
from weightcached.daemon.control.event_socket import EventSocket
from weightcached.protocol.control import (
    CONTROL_REQUESTS,
    ControlEvent,
    Decided,
    Describe,
    RankState,
    ReadDecision,
)
from weightcached.protocol.control_channel import ask_blocking
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import UntrustedClient
from weightcached.protocol.framing import encode_frame
from weightcached.protocol.messages import Message
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place, host_device
from weightcached.protocol.transaction import Outcome

pytestmark = pytest.mark.root

OTHER = 12345
OPEN_TO_ALL = 0o666
QUESTION = encode_frame(CONTROL_REQUESTS, ReadDecision(transaction="1" * 32))

SAID = {
    "commands": ["DEALER", b"12345678".hex(), QUESTION.hex()],
    "events": ["XSUB", (b"\1s" + b"0" * 32).hex()],
}
"""For each socket: who speaks to it, and what."""


@pytest.fixture
def claim() -> Iterator[Claim]:
    """Of a place whose directory anybody may enter."""
    with folder_for_everyone() as folder:
        claim = take(Place(folder / "run", "default", host_device(tp_size=1, tp_rank=0)), AllowList())
        listener = claim.listen(mode=OPEN_TO_ALL)
        yield claim
        listener.close()
        claim.unlink()
        claim.release()


class Bound:
    """One of the sockets, and how often it has done what somebody asked for."""

    def __init__(self, claim: Claim, which: str) -> None:
        self.done = 0
        self._place = claim.place
        self._context = zmq.Context()
        self._socket: CommandSocket | EventSocket
        if which == "commands":
            self.path = claim.place.control_path
            self._socket = CommandSocket(self._context, claim=claim, path=self.path, handle=self._decided)
        else:
            self.path = claim.place.events_path
            self._socket = EventSocket(self._context, claim=claim, path=self.path, snapshot=self._snapshot)
        self.path.chmod(OPEN_TO_ALL)

    async def _decided(self, request: Message) -> Message:
        self.done += 1
        return Decided(transaction="1" * 32, outcome=Outcome.OPEN, vault_id="3" * 32)

    def _snapshot(self) -> ControlEvent:
        self.done += 1
        return ControlEvent(
            kind="snapshot", nonce="2" * 32, sequence=0, place=str(self._place), time_s=1.0, state="ready"
        )

    async def close(self) -> None:
        closing = self._socket.close()
        if closing is not None:
            await closing
        self._context.destroy(linger=0)


@asynccontextmanager
async def bound(claim: Claim, which: str) -> AsyncIterator[Bound]:
    one = Bound(claim, which)
    try:
        yield one
    finally:
        await one.close()
        claim.unlink_beside()


def heard_first(path: Path) -> bytes:
    """The first byte that whoever connects is told; nothing where it is shown out."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(path))
        return connection.recv(1)


SPEAKS = """
import os, sys, zmq
path, kind, *said = sys.argv[1:]
speaker = zmq.Context().socket(getattr(zmq, kind))
speaker.set(zmq.RECONNECT_IVL, -1)
ended = speaker.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
speaker.connect(f"ipc://{path}")
try:
    speaker.send_multipart([bytes.fromhex(part) for part in said], zmq.NOBLOCK)
except zmq.Again:  # shown out already, and not to come again
    pass
print("shown out" if ended.poll(20_000) else "let in", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("which", SAID)
def test_zeromq_itself_says_nothing_to_another_user(claim: Claim, on_loop, which: str) -> None:
    """The daemon's own look has no turn meanwhile: the loop is held here."""

    async def look() -> None:
        async with bound(claim, which) as one:

            def as_another() -> None:
                assert heard_first(one.path) == b"", "it was greeted"

            in_child(as_another, uid=NOBODY)
            assert heard_first(one.path) == b"\xff"

    on_loop(look())


@pytest.mark.parametrize("which", SAID)
def test_where_zeromq_does_not_filter_the_daemon_lets_go_of_another_user(
    claim: Claim, on_loop, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Whose command is not carried out, and who gets no snapshot, though all of it arrives with the connection."""
    monkeypatch.setattr(zmq, "IPC_FILTER_UID", zmq.BACKLOG)  # which means nothing to what listens already

    async def look() -> None:
        async with bound(claim, which) as one:
            words = [sys.executable, "-c", SPEAKS, str(one.path), *SAID[which]]
            stranger = await asyncio.create_subprocess_exec(*command_as(NOBODY, words), stdout=subprocess.PIPE)
            told, _ = await stranger.communicate()
            assert (told, one.done) == (b"shown out\n", 0)
            ours = await asyncio.create_subprocess_exec(*words, stdout=subprocess.DEVNULL)
            await asyncio.to_thread(eventually, lambda: one.done == 1)
            ours.kill()
            await ours.wait()

    on_loop(look())


def test_root_and_the_daemons_own_user_come_in_at_both_sockets_of_a_daemon_without_rights() -> None:
    """And a third, whom that daemon serves weights to, at neither."""
    trusted = AllowList(uids={NOBODY})

    async def listen(place: Place) -> str:
        async with Listener(place, allowed=trusted) as listener:
            heard = await listener.hear(TIMEOUT_S)
        assert heard is not None
        return heard.event.kind

    def come_in() -> None:
        asked = ask_blocking(place, Describe(), RankState, deadline=Deadline.after(TIMEOUT_S), allowed=trusted)
        assert asked.state == "ready"
        assert asyncio.run(listen(place)) == "snapshot"

    def stay_out() -> None:
        with pytest.raises(UntrustedClient):
            ask_blocking(place, Describe(), RankState, deadline=Deadline.after(TIMEOUT_S), allowed=trusted)
        with pytest.raises(UntrustedClient):
            asyncio.run(listen(place))

    with folder_for_everyone() as folder:
        os.chown(folder, NOBODY, NOBODY)
        place = Place(folder / "run", "default", host_device(tp_size=1, tp_rank=0))
        model = tiny_llama(folder / "model")
        words = [*SCRIPTED, *arguments_for(model, folder / "run"), "--allow-uid", str(OTHER)]
        process = subprocess.Popen(
            command_as(NOBODY, words),
            env={**os.environ, **scripted_environment(folder / "run", {})},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        daemon = Daemon(process, place, model, {})
        try:
            daemon.wait_logged("state", state="ready")
            daemon.wait_logged("control plane")
            for path in (place.control_path, place.events_path):
                path.chmod(OPEN_TO_ALL)
            in_child(come_in)
            in_child(come_in, uid=NOBODY)
            in_child(stay_out, uid=OTHER)
        finally:
            daemon.stop()
