"""Makes a sample: what this release leaves in a vault, for later releases to adopt.

`python -m tests.daemon.samples.make NAME` from the repository's root, once for a release; then the files are kept as
they are. A sample is a folder with `state` (the written part of each slot of the state memfd, behind its length in four
bytes), `manifest`, `segment.0`, and `names.json` (for each file the name in the vault and that of the memfd). What was
loaded is :func:`checkpoint`, by the real keeper and its worker.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.support.checkpoints import tiny_llama
from tests.support.manager import Manager
from weightcached.daemon.state_record import SLOT_NBYTES, StateFile
from weightcached.protocol.memory import names

FILES = {"state": "state", "m": "manifest", "s0": "segment.0"}


def checkpoint(directory: Path) -> Path:
    """What samples were loaded from: the same bytes each time."""
    return tiny_llama(directory, shards=2, tie_word_embeddings=True)


def main(name: str) -> None:
    """Load it with this release, and write down what its vault holds once its digest is known."""
    target = Path(__file__).with_name(name)
    target.mkdir()
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as folder, Manager(Path(folder)) as manager:
        served = manager.start(checkpoint(Path(folder) / "model"), Path(folder) / "run", real=True)
        served.wait_logged("content digest")
        served.report()
        served.stop()
        _depersonalise(manager.fd("state"))
        listed = {}
        for stored in manager.names:
            fd = manager.fd(stored)
            data = os.pread(fd, os.fstat(fd).st_size, 0)
            file = FILES[stored.rpartition(".")[2]]
            listed[file] = {"stored": stored, "memfd": names.name_of(fd)}
            (target / file).write_bytes(_written(data) if file == "state" else data)
        (target / "names.json").write_text(json.dumps(listed, indent=1) + "\n")


def _depersonalise(state_fd: int) -> None:
    """Nobody wants to know on which machine it was made. Written twice: each slot is written in turn."""
    state = StateFile.open(os.dup(state_fd))
    [generation] = state.record.generations
    provenance = generation.provenance.model_copy(update={"host": "sample", "path": "/models/sample"})
    generation = generation.model_copy(update={"provenance": provenance, "model_dir": "/models/sample"})
    for _ in range(2):
        state.write(state.record.model_copy(update={"generations": (generation,)}))
    state.close()


def _written(state: bytes) -> bytes:
    slots = (state[:SLOT_NBYTES].rstrip(b"\0"), state[SLOT_NBYTES:].rstrip(b"\0"))
    return b"".join(len(slot).to_bytes(4, "little") + slot for slot in slots)


if __name__ == "__main__":
    main(sys.argv[1])
