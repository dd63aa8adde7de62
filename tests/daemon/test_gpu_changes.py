"""Weights on a GPU are changed under an engine, where a shard lies in several segments: pushed, and swapped in.

On the driver that needs no GPU. The worker is the real one, the trainer is in this process.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from tests.daemon.test_staging import push_and_finish
from tests.support.checkpoints import tiny_llama
from tests.support.fakecuda import GRANULARITY, FakeCuda
from tests.support.gpu_daemons import digests_from_disk, gpu_daemon
from tests.support.gpu_engine import gpu_engine
from tests.support.plain import tensors_of
from tests.support.staging import await_change, begin_push, decide, push_begun
from weightcached.protocol.memory.cuda import physical


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_what_is_pushed_is_swapped_in_at_the_same_addresses(
    fake_cuda: FakeCuda, runtime_dir: Path, tmp_path: Path
) -> None:
    """All of it, and then a part of it on top."""
    model = tiny_llama(tmp_path / "model", hidden_size=256, vocab_size=2048, intermediate_size=1024)
    limit: dict[str, Any] = {physical.LARGEST_VARIABLE: str(GRANULARITY)}
    first, tensors = digests_from_disk(model), tensors_of(model)
    all_new = {name: (tensor.float() + 1).to(tensor.dtype) for name, tensor in tensors.items()}
    part = {name: (tensor.float() + 2).to(tensor.dtype) for name, tensor in tensors.items() if ".1." in name}
    with gpu_daemon(fake_cuda, model, runtime_dir, **limit) as served:
        before = served.wait_until("ready")
        assert len(fake_cuda.memory()) > 2
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda", want="current") as engine:
            engine.answer()
            assert engine.ask("digests") == first
            addresses, expected = engine.ask("addresses"), first
            for pushed, partial in ((all_new, False), (part, True)):
                transaction = begin_push(served, partial=partial)
                with push_begun(served, transaction) as push:
                    version = push_and_finish(push, pushed)
                    assert await_change(served, transaction).state == "prepared"
                    decided = decide(served, transaction, commit=True)
                assert decided.version == version
                had = engine.ask("swap")
                assert (had["version"], had["resident_bytes"]) == (version, before.resident_nbytes)
                expected = {**expected, **{name: digest(tensor) for name, tensor in pushed.items()}}
                assert engine.ask("digests") == expected
                assert engine.ask("differing") == []
                assert engine.ask("addresses") == addresses
    assert fake_cuda.used_nbytes() == 0
    assert fake_cuda.leaks() == {}
