"""What a trainer may not do, and what partial pushes keep: each fault is refused by name, and the reason reaches it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loader.pushed.test_pushing import LLAMA, other_values
from tests.support.checkpoints import tiny_llama
from tests.support.execution import load
from tests.support.plain import tensors_of
from tests.support.pushing import BASE_VERSION, Pushing, loaded_base, pushing
from tests.support.workers import TIMEOUT_S
from weightcached.client.publish.rank import RankPush
from weightcached.loader.pushed.receiving import Deliverer, Delivery
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import (
    CheckpointError,
    ProtocolError,
    PushMismatch,
    StageLost,
    TransferError,
    UnusableValue,
)
from weightcached.protocol.push_messages import Bucket, Finish, Piece

RANK: dict[str, Any] = {"layout": "fused", "tp_size": 2, "tp_rank": 1}
QUERY = "model.layers.0.self_attn.q_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("served"), **LLAMA)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_values(tmp_path_factory.mktemp("trained"), **LLAMA)


def say(push: Pushing, message: Bucket | Finish) -> None:
    """As a trainer that does not go by the rules."""
    worker = push.trainer._worker
    assert worker is not None
    worker.send(message)


def piece(push: Pushing, name: str, **changes: Any) -> Piece:
    """A true piece of the first box, but for its bytes."""
    number = list(push.trainer.table).index(name)
    box = push.trainer.table[name].boxes[0]
    fields = {"tensor": number, "start": box.start, "shape": box.shape, "offset": 0, "xxh3": "0" * 32}
    return Piece(**{**fields, **changes})


FAULTS: dict[str, tuple[Callable[[Pushing], Bucket | Finish], type[Exception], str]] = {
    "a digest that is not that of the bytes": (
        lambda push: Bucket(number=0, pieces=(piece(push, QUERY),)),
        TransferError,
        "not what the trainer wrote",
    ),
    "a box that this rank does not need": (
        lambda push: Bucket(number=0, pieces=(piece(push, QUERY, start=(0, 0)),)),
        PushMismatch,
        "not inside",
    ),
    "a box of other axes": (
        lambda push: Bucket(number=0, pieces=(piece(push, QUERY, start=(0,), shape=(1,)),)),
        PushMismatch,
        "not inside",
    ),
    "nothing of a tensor": (
        lambda push: Bucket(number=0, pieces=(piece(push, QUERY, shape=(0, 64)),)),
        PushMismatch,
        "not inside",
    ),
    "an element twice": (
        lambda push: Bucket(number=0, pieces=(piece(push, QUERY), piece(push, QUERY))),
        PushMismatch,
        "twice",
    ),
    "a tensor that there is not": (
        lambda push: Bucket(number=0, pieces=(piece(push, QUERY, tensor=10_000),)),
        PushMismatch,
        "of no tensor",
    ),
    "a piece past the bucket's end": (
        lambda push: Bucket(number=0, pieces=(piece(push, QUERY, offset=64 * 1024 - 64),)),
        ProtocolError,
        "does not lie in its bucket",
    ),
    "a piece that is not aligned": (
        lambda push: Bucket(number=0, pieces=(piece(push, QUERY, offset=1),)),
        ProtocolError,
        "does not lie in its bucket",
    ),
    "a bucket that there is not": (
        lambda push: Bucket(number=3, pieces=()),
        ProtocolError,
        "not its own",
    ),
    "fewer pieces than it says": (lambda push: Finish(pieces=1), ProtocolError, "pieces are missing"),
    "a push that is not whole": (lambda push: Finish(pieces=0), PushMismatch, "were not pushed"),
}


@pytest.mark.parametrize(("fault", "error", "said"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_ends_the_push_with_its_reason(
    served: Path, fault: Callable[[Pushing], Bucket | Finish], error: type[Exception], said: str
) -> None:
    config = build_config(served, **RANK)
    with loaded_base(served, config) as base, pushing(served, config, base) as push:
        say(push, fault(push))
        with pytest.raises(error, match=said):
            push.trainer.filled()
        assert type(push.outcome.exception()) is error


@pytest.mark.parametrize(
    ("version", "changed"),
    [(BASE_VERSION, True), ("digest:" + "2" * 64, True), ("digest:" + "2" * 64, False), (BASE_VERSION, False)],
)
def test_only_a_push_that_left_every_byte_may_have_the_version_that_is_served(
    served: Path, trained: Path, version: str, changed: bool
) -> None:
    config, name = build_config(served, **RANK), "model.norm.weight"
    with loaded_base(served, config) as base, pushing(served, config, base, partial=True) as push:
        push.push({name: tensors_of(trained if changed else served)[name]})
        push.trainer.finish()
        assert push.trainer.filled().unchanged is not changed
        push.trainer.assign(version)
        if version == BASE_VERSION and not changed:
            assert push.outcome.result(TIMEOUT_S).assigned_version == version
        else:
            with pytest.raises(ProtocolError, match="not of what it has pushed"):
                push.outcome.result(TIMEOUT_S)


def test_a_bucket_that_is_written_after_it_was_handed_over(
    served: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is digested is what becomes resident, so it does not matter when."""
    config, hand_over = build_config(served, **RANK), RankPush.hand_over

    def and_write(push: RankPush) -> None:
        if push._current is not None:
            push._buckets[push._current][0] ^= 1
        hand_over(push)

    monkeypatch.setattr(RankPush, "hand_over", and_write)
    with loaded_base(served, config) as base, pushing(served, config, base) as push:
        push.push({QUERY: tensors_of(trained)[QUERY]})
        with pytest.raises(TransferError, match="not what the trainer wrote"):
            push.finish()


def test_a_trainer_that_goes_away(served: Path, trained: Path) -> None:
    config = build_config(served, **RANK)
    with loaded_base(served, config) as base, pushing(served, config, base) as push:
        push.push({QUERY: tensors_of(trained)[QUERY]})
        push.trainer.close()
        assert isinstance(push.outcome.exception(60), StageLost)


def test_a_tensor_that_was_begun_has_to_be_whole(served: Path, trained: Path) -> None:
    config = build_config(served, **RANK)
    with loaded_base(served, config) as base, pushing(served, config, base, partial=True) as push:
        (box,) = push.trainer.boxes(QUERY)
        half = (slice(box[0].start, box[0].stop - 1), box[1])
        push.push_box(QUERY, half, tensors_of(trained)[QUERY][half])
        with pytest.raises(PushMismatch, match="pushed in part"):
            push.finish()


def partial_push(served: Path, trained: Path, names: list[str], **options: Any) -> dict[str, bytes]:
    """Push these tensors of ``trained`` on top of ``served``; every row's bytes."""
    config, tensors = build_config(served, **options), tensors_of(trained)
    with loaded_base(served, config) as base, pushing(served, config, base, partial=True) as push:
        push.push({name: tensors[name] for name in names})
        push.finish()
        return push.data


@pytest.mark.parametrize("options", [RANK, {**RANK, "dtype": "float32"}], ids=["as they are", "converted"])
def test_the_other_parts_of_a_fused_parameter_stay(
    served: Path, trained: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The query of a fused query, key and value, and a whole row-parallel one; everything else is copied."""
    names = [QUERY, "model.layers.1.mlp.down_proj.weight"]
    tensors = {**tensors_of(served), **{name: tensors_of(trained)[name] for name in names}}
    expected = load(written(tmp_path, served, tensors), **options)
    assert partial_push(served, trained, names, **options) == dict(expected.data)


def test_what_is_quantized_is_pushed_whole(served: Path, trained: Path, tmp_path: Path) -> None:
    options = {**RANK, "quantization": "fp8"}
    with pytest.raises(PushMismatch, match=f"{KEY}.*without|without.*{KEY}"):
        partial_push(served, trained, [QUERY], **options)
    names = [QUERY, KEY, KEY.replace("k_proj", "v_proj")]
    tensors = {**tensors_of(served), **{name: tensors_of(trained)[name] for name in names}}
    expected = load(written(tmp_path, served, tensors), **options)
    assert partial_push(served, trained, names, **options) == dict(expected.data)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_cannot_be_quantized_is_the_trainers_to_mend(served: Path, value: float) -> None:
    """And not the checkpoint's, where a load's would be."""
    tensors = tensors_of(served)
    tensors[KEY][-1, -1] = value
    config = build_config(served, **RANK, quantization="fp8")

    def push_all(push: Pushing) -> None:
        push.push(tensors)
        push.finish()

    with (
        loaded_base(served, config) as base,
        pushing(served, config, base) as push,
        pytest.raises(UnusableValue, match=f"{KEY}.*next step: mend that tensor at the trainer, and push again"),
    ):
        push_all(push)


def test_nothing_pushed_is_everything_kept(served: Path, trained: Path) -> None:
    assert partial_push(served, trained, [], **RANK) == dict(load(served, **RANK).data)


def written(directory: Path, served: Path, tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_bytes((served / "config.json").read_bytes())
    return directory


def test_headers_that_are_gone(served: Path, tmp_path: Path) -> None:
    config = build_config(served, **RANK)
    with (
        loaded_base(served, config) as base,
        pytest.raises(CheckpointError, match="headers of the daemon's checkpoint"),
        pushing(tmp_path / "gone", config, base),
    ):
        pass


def test_a_trainer_waits_while_the_worker_has_every_bucket(
    served: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is free until the worker says so: what is pushed meanwhile waits, and takes no more memory."""
    config, tensors = build_config(served, **RANK), tensors_of(trained)
    may_deliver, deliver = threading.Event(), Deliverer.deliver

    def deliver_when_told(deliverer: Deliverer, delivery: Delivery) -> None:
        assert may_deliver.wait(TIMEOUT_S)
        deliver(deliverer, delivery)

    monkeypatch.setattr(Deliverer, "deliver", deliver_when_told)
    with loaded_base(served, config) as base, pushing(served, config, base, bucket_nbytes=4096, bucket_count=2) as push:
        pusher = threading.Thread(target=push.push, args=(tensors,))
        pusher.start()
        pusher.join(0.5)
        assert pusher.is_alive(), "it did not wait"
        assert not push.trainer._free
        may_deliver.set()
        pusher.join(TIMEOUT_S)
        assert not pusher.is_alive()
        push.finish()
    assert push.data == dict(load(trained, **RANK).data)
