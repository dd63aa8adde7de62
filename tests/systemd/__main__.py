"""How long after `kill -9` is the keeper back under systemd? Not part of the suite.

    python -m tests.systemd --gib 8 --kills 11

Prints the median time from the kill to the moment when a client has the descriptors again, and that no weight was read.
The weights are zeros that take no room on the disk; the segment takes all of it in memory.
"""

import argparse
import json
import statistics
import struct
import sys
from pathlib import Path
from time import monotonic

from tests.support.checkpoints import tiny_config
from tests.support.daemons import digest_of
from tests.systemd.box import missing, running_box
from tests.systemd.conftest import install
from tests.systemd.services import Service

GIB = 2**30
MODEL = "/srv/zeros"


def write_zeros(directory: Path, nbytes: int) -> None:
    """A checkpoint of so many bytes in eight tensors, all zero: a hole in the file."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(tiny_config()))
    each = nbytes // 8 // 2048 * 2048
    header = {
        f"tensor.{number}": {
            "dtype": "BF16",
            "shape": [each // 2048, 1024],
            "data_offsets": [number * each, (number + 1) * each],
        }
        for number in range(8)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 8 * each)


def measure(gib: float, kills: int) -> None:
    """Boot, load, kill that often, and print."""
    with running_box() as box:
        install(box)
        write_zeros(box.path(MODEL), int(gib * GIB))
        box.write("/etc/weightcached/weightcached.env", f"WEIGHTCACHED_MODEL={MODEL}\n")
        service = Service(box, "0", MODEL, digest_of(box.path(MODEL)), layout="hf")
        service.systemctl("start")
        hello, before, seconds = service.hello(), service.report(), []
        grant = service.attach(hello)
        for _ in range(kills):
            killed_at = service.kill()
            grant = service.attach(hello, other_than=grant.nonce)
            seconds.append(monotonic() - killed_at)
        after, version = service.report(), box.systemd_version
        if (after.generation, after.bytes_read, after.starts - before.starts) != (before.generation, 0, kills):
            sys.exit(f"not adopted every time: {before} {after}")
    print(
        f"{after.resident_nbytes / GIB:.2f} GiB resident, {kills} kills, systemd {version}: kill to grant "
        f"median {statistics.median(seconds):.3f} s, {min(seconds):.3f} to {max(seconds):.3f} s, 0 bytes read"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.systemd", description=__doc__)
    parser.add_argument("--gib", type=float, default=0.1, help="size of the weights (default: 0.1)")
    parser.add_argument("--kills", type=int, default=11, help="default: 11")
    given = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(reason)
    measure(given.gib, given.kills)
