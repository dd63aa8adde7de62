"""A worker that follows a script: for tests of what the keeper does with good, bad and dead workers. No torch, no
numpy.

The script is JSON in ``WEIGHTCACHED_TEST_WORKER``. Without any step it loads honestly: one segment of
``segment_nbytes`` bytes, a one, what tells the checkpoint's bytes from others', and zeros, and a manifest with one row.
Keys:

- ``segment_nbytes``: size of the segment (default 4096); all of it is memory in use
- ``receipts``: true to take the checkpoint's real receipts (default), false for made-up ones that are not trusted
- ``kill_at``, ``exit_at``, ``raise_at``, ``hang_at``, ``fail_at``: a point (``start``, ``job``, ``planned``,
  ``memory``, ``progress``) at which to SIGKILL oneself, end as if all were well, raise, wait for ever, or report
  ``fail`` (fields of ``Failed``)
- ``kill_said``: a file that names the point at which to SIGKILL oneself, or is empty
- ``eat_at``: a point at which to use up memory until the kernel objects
- ``release``: a FIFO; with it ``hang_at`` waits for a byte, or until its last writer has closed it, then goes on
- ``only_attempts``: do the above only in the first so many attempts, counted by lines in the file ``attempts``
- ``spoil_from_attempt``: do the above only from that attempt on, counted in the same way
- ``manifest``: ``unsealed``, ``short`` (another size than announced) or ``missing``
- ``flip``: a byte of the segment that becomes another than the manifest's digest is of
- ``keep_mapping``: ``worker`` keeps a writable mapping until it exits, ``child`` leaves it to a process of its own
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import xxhash

from weightcached.protocol.channel import Channel
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.content import open_weights, take_receipts, weight_files
from weightcached.protocol.manifest import ManifestMeta, NameAccounting, Row, encode_manifest
from weightcached.protocol.memory import host, names
from weightcached.protocol.messages import AccountingCounts
from weightcached.protocol.processes import die_with_parent
from weightcached.protocol.worker_messages import (
    KEEPER_TO_WORKER,
    WORKER_TO_KEEPER,
    Done,
    Failed,
    Job,
    Memory,
    Planned,
    Progress,
)

SCRIPT: dict[str, Any] = json.loads(os.environ.get("WEIGHTCACHED_TEST_WORKER", "{}"))
KILL_SAID = Path(SCRIPT["kill_said"]).read_text() if "kill_said" in SCRIPT else None
NBYTES: int = SCRIPT.get("segment_nbytes", 4096)


def misbehaving() -> bool:
    """Whether this attempt is one of those that the script spoils."""
    if "attempts" not in SCRIPT:
        return True
    with open(SCRIPT["attempts"], "a+", encoding="ascii") as file:
        file.write("attempt\n")
        file.seek(0)
        attempt = len(file.readlines())
    first, last = SCRIPT.get("spoil_from_attempt", 1), SCRIPT.get("only_attempts", attempt)
    return bool(first <= attempt <= last)


SPOILED = misbehaving()


def point(name: str, channel: Channel) -> None:
    """A point of the script: maybe the last one."""
    if not SPOILED:
        return
    if name in (SCRIPT.get("kill_at"), KILL_SAID):
        os.kill(os.getpid(), signal.SIGKILL)
    if SCRIPT.get("exit_at") == name:
        os._exit(0)
    if SCRIPT.get("raise_at") == name:
        raise RuntimeError(f"as the script says, at {name}")
    if SCRIPT.get("eat_at") == name:
        eaten = [b"\1" * (16 << 20) for _ in range(4096)]
        raise RuntimeError(f"{len(eaten)} meals, and nobody objected")
    if SCRIPT.get("hang_at") == name:
        hang(channel)
    if SCRIPT.get("fail_at") == name:
        channel.send(Failed(**SCRIPT["fail"]))
        sys.exit(1)


def hang(channel: Channel) -> None:
    """Wait for the release, or else until the keeper is gone."""
    if "release" in SCRIPT:
        with open(SCRIPT["release"], "rb") as fifo:
            fifo.read(1)
        return
    poll = select.poll()
    poll.register(channel.connection, 0)  # nothing but the end of the connection
    poll.poll()
    sys.exit(2)


def receipts_of(model_dir: str) -> tuple[str, bool, bool, str]:
    if not SCRIPT.get("receipts", True):
        return "0" * 64, False, False, "made up"
    with open_weights(weight_files(model_dir)) as weights:
        receipts = take_receipts(weights)
    return receipts.sha256, receipts.trusted, receipts.is_young(), receipts.rule


def written_of(model_dir: str) -> bytes:
    """What the segment begins with."""
    hasher = xxhash.xxh3_64()
    for path in sorted(Path(model_dir).glob("*.safetensors")):
        hasher.update(path.read_bytes())
    return (b"\1" + hasher.digest())[:NBYTES]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--yield", action="store_true", help="taken, and makes no difference to what a script does")
    channel = Channel(
        socket.socket(fileno=parser.parse_args().fd), outgoing=WORKER_TO_KEEPER, incoming=KEEPER_TO_WORKER
    )
    point("start", channel)
    job = channel.receive().message
    assert isinstance(job, Job)
    die_with_parent(job.keeper_pid)
    point("job", channel)
    counts = AccountingCounts(expected=1, loaded=1, ignored=0, unexpected=0)
    sha256, trusted, young, rule = receipts_of(job.model_dir)
    written = written_of(job.model_dir)
    channel.send(
        Planned(
            segments_nbytes=(NBYTES,),
            bytes_to_read=NBYTES,
            receipts=sha256,
            receipts_trusted=trusted,
            receipts_young=young,
            receipts_rule=rule,
            accounting=counts,
        )
    )
    point("planned", channel)
    frame = channel.receive()
    memory = frame.message
    assert isinstance(memory, Memory)
    segment = frame.fds.take(0)
    point("memory", channel)
    channel.send(Progress(stage="read", bytes_done=0, bytes_total=NBYTES))
    if NBYTES:
        os.posix_fallocate(segment, 0, NBYTES)
    os.pwrite(segment, written, 0)
    channel.send(Progress(stage="read", bytes_done=NBYTES // 2, bytes_total=NBYTES))
    point("progress", channel)
    if SPOILED and "flip" in SCRIPT:
        os.pwrite(segment, b"\xff", SCRIPT["flip"])
    keep_mapping(segment)
    report(channel, job, memory, written)


def keep_mapping(segment: int) -> None:
    """Leave a writable mapping alive past Done, as the script says."""
    keeper_of_it = SCRIPT.get("keep_mapping")
    if keeper_of_it == "worker":
        globals()["kept"] = mmap.mmap(segment, NBYTES)
    elif keeper_of_it == "child":
        program = f"import mmap, sys; m = mmap.mmap({segment}, {NBYTES}); print(flush=True); sys.stdin.read()"
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[segment],
            stdin=os.open(SCRIPT["child_stdin"], os.O_RDONLY),
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        child.stdout.readline()


def digest_of_segment(written: bytes) -> bytes:
    """Of that, and zeros."""
    hasher, zeros = xxhash.xxh3_128(written), bytes(1 << 20)
    for left in range(NBYTES - len(written), 0, -len(zeros)):
        hasher.update(zeros[:left])
    return hasher.digest()


def report(channel: Channel, job: Job, memory: Memory, written: bytes) -> None:
    config = CacheConfig.model_validate(job.config)
    seconds = {"read": 0.001}
    meta = ManifestMeta(
        generation=job.generation,
        version=memory.version,
        receipts_version=memory.receipts_version,
        fingerprint=config.fingerprint,
        config=config.model_dump(),
        digest=memory.digest,
        segments_nbytes=(NBYTES,),
        bytes_read=NBYTES,
        bytes_kept=NBYTES,
        seconds=seconds,
    )
    row = Row("weight", 0, 0, NBYTES, (NBYTES,), (1,), "uint8", digest_of_segment(written))
    data = encode_manifest(meta, [row], NameAccounting(expected=("weight",), loaded=("weight",)))
    fd = host.allocate(len(data), name=names.manifest_name(job.generation))
    os.pwrite(fd, data, 0)
    lie = SCRIPT.get("manifest") if SPOILED else None
    if lie != "unsealed":
        host.seal(fd)
    announced = len(data) + (1 if lie == "short" else 0)
    done = Done(
        manifest_nbytes=announced, resident_nbytes=NBYTES, bytes_read=NBYTES, bytes_kept=NBYTES, seconds=seconds
    )
    channel.send(done, [] if lie == "missing" else [fd])


if __name__ == "__main__":
    assert Path(__file__).is_file()
    main()
