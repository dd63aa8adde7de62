"""A trainer publishes to two real ranks: both serve what it pushed, or both what they served.

What engines read is compared with the naive reference over a checkpoint of the tensors that were pushed.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.commanding import Changer, standings
from tests.support.daemons import Daemon
from tests.support.forked import in_child
from tests.support.groups import left_behind, versions, waiting
from tests.support.plain import tensors_of
from tests.support.referenced import raw
from tests.support.resources import memfd_mappings, open_fds
from weightcached.client import attach
from weightcached.client.control import rollback
from weightcached.client.publish import publish, stage
from weightcached.loader.reference import Reference
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import InvalidOption, PushMismatch, UpdateConflict

BUCKETS = {"bucket_nbytes": 64 * 1024, "bucket_count": 2}


def trained(model: Path, step: float) -> dict[str, torch.Tensor]:
    return {name: (tensor.float() * step + step).to(tensor.dtype) for name, tensor in tensors_of(model).items()}


def where(ranks: list[Daemon]) -> dict[str, Any]:
    return {"runtime_dir": ranks[0].place.runtime_dir, "timeout_s": 120.0, **BUCKETS}


def referenced(ranks: list[Daemon], tensors: Mapping[str, torch.Tensor], directory: Path) -> list[dict[str, bytes]]:
    """Each rank's parameters, by name, as a load of these tensors would have them. Writes the checkpoint."""
    directory.mkdir()
    (directory / "config.json").write_bytes((ranks[0].model_dir / "config.json").read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    made = []
    for rank in range(len(ranks)):
        config = build_config(directory, layout="fused", tp_size=len(ranks), tp_rank=rank)
        with Reference(directory, config) as reference:
            made.append({name: raw(reference.parameter(name)) for name, _ in reference.missing(())})
    return made


def require_served(ranks: list[Daemon], tensors: Mapping[str, torch.Tensor], version: str, tmp_path: Path) -> None:
    """Engines at both ranks get this version, and it is what a load of these tensors would be."""
    expected = referenced(ranks, tensors, tmp_path / version.partition(":")[2][:16])
    for rank, (served, parameters) in enumerate(zip(ranks, expected, strict=True)):
        options: dict[str, Any] = {"layout": "fused", "tp_size": len(ranks), "tp_rank": rank, "mode": "require"}
        with attach(served.model_dir, runtime_dir=served.place.runtime_dir, want="current", **options) as weights:
            assert weights.version == version
            assert weights.keys() == parameters.keys()
            for name, tensor in weights.items():
                assert raw(tensor) == parameters[name], (rank, name)


def test_all_ranks_serve_what_was_published(ranks: list[Daemon], model: Path, tmp_path: Path) -> None:
    before, tensors = versions(ranks), trained(model, 2.0)
    version = publish(tensors, trainer="the test", **where(ranks))
    assert versions(ranks) == [version, version] != before
    require_served(ranks, tensors, version, tmp_path)
    rollback(runtime_dir=ranks[0].place.runtime_dir)
    assert versions(ranks) == before


def test_a_part_of_the_weights_changes(ranks: list[Daemon], model: Path, tmp_path: Path) -> None:
    first, second = trained(model, 3.0), trained(model, 4.0)
    publish(iter(first.items()), **where(ranks))
    changed = {name: second[name] for name in second if "layers.1" in name or name.endswith("q_proj.weight")}
    version = publish(changed, partial=True, **where(ranks))
    require_served(ranks, {**first, **changed}, version, tmp_path)


def test_a_push_that_leaves_every_byte_changes_nothing_and_what_one_rank_alone_needs_changes_both(
    ranks: list[Daemon], model: Path, tmp_path: Path
) -> None:
    """What can be rolled back to stays, and no engine is told to change over."""
    older, tensors = trained(model, 2.5), trained(model, 3.5)
    publish(older, **where(ranks))
    version = publish(tensors, **where(ranks))
    before = [Changer(one).state() for one in ranks]
    for given, partial in (({}, True), (dict([next(iter(tensors.items()))]), True), (tensors, False)):
        assert publish(given, partial=partial, **where(ranks)) == version
        after = [Changer(one).state() for one in ranks]
        assert [standings(one) for one in after] == [standings(one) for one in before]
    assert (waiting(ranks), left_behind(ranks)) == ([], [])

    name = "model.layers.0.mlp.down_proj.weight"
    changed = {**tensors, name: torch.cat([tensors[name][:, :24], older[name][:, 24:]], dim=1)}  # rank 1's columns
    newer = publish({name: changed[name]}, partial=True, **where(ranks))
    require_served(ranks, changed, newer, tmp_path)
    rollback(runtime_dir=ranks[0].place.runtime_dir)
    assert versions(ranks) == [version, version]


def test_only_what_a_rank_needs_is_asked_for(ranks: list[Daemon], model: Path, tmp_path: Path) -> None:
    tensors = trained(model, 5.0)
    with stage(**where(ranks)) as publication:
        assert set(publication.names) == set(tensors)
        down = publication.boxes("model.layers.0.mlp.down_proj.weight")
        assert down == {
            "host-tp0of2": [(slice(0, 32), slice(0, 24))],
            "host-tp1of2": [(slice(0, 32), slice(24, 48))],
        }
        for name in publication.names:
            for box in {str(box): box for boxes in publication.boxes(name).values() for box in boxes}.values():
                publication.push(name, box, tensors[name][box])
        version = publication.commit()
    require_served(ranks, tensors, version, tmp_path)


def test_shards_of_the_trainers_own_are_pushed_as_they_are(ranks: list[Daemon], model: Path, tmp_path: Path) -> None:
    """As of FSDP: rows of every tensor, dealt over three."""
    tensors = trained(model, 6.0)
    with stage(**where(ranks)) as publication:
        for shard in range(3):
            for name, tensor in tensors.items():
                rows = -(-tensor.shape[0] // 3)
                mine = slice(min(shard * rows, tensor.shape[0]), min((shard + 1) * rows, tensor.shape[0]))
                publication.push(name, [mine], tensor[mine])
        version = publication.commit()
    require_served(ranks, tensors, version, tmp_path)


def test_leaving_without_a_commit_changes_nothing(ranks: list[Daemon], model: Path) -> None:
    before = versions(ranks)
    with stage(**where(ranks)) as publication:
        for name, tensor in trained(model, 7.0).items():
            publication.push(name, tensor)
    assert versions(ranks) == before
    assert waiting(ranks) == []


def test_what_is_missing_is_named_and_nothing_changes(ranks: list[Daemon], model: Path) -> None:
    before, tensors = versions(ranks), trained(model, 8.0)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(PushMismatch, match=r"model\.layers\.0\.self_attn\.k_proj\.weight"):
        publish(tensors, **where(ranks))
    assert versions(ranks) == before
    assert waiting(ranks) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.layers.0.qkv_proj.weight", torch.zeros(4), "has no tensor"),
        ("model.norm.weight", torch.zeros(32), "another dtype"),
        ("model.norm.weight", torch.zeros(31, dtype=torch.bfloat16), "another shape"),
        ("model.norm.weight", "weights", "no tensor"),
        ("model.norm.weight", torch.zeros(32, dtype=torch.bfloat16, device="meta"), "no values.*meta device"),
        ("model.norm.weight", torch.zeros(32, dtype=torch.bfloat16).to_sparse(), "no values.*sparse_coo"),
    ],
)
def test_what_the_checkpoint_does_not_have_is_refused(ranks: list[Daemon], name: str, value: Any, said: str) -> None:
    before = versions(ranks)
    with pytest.raises(PushMismatch, match=said):
        publish({name: value}, partial=True, **where(ranks))
    assert versions(ranks) == before
    assert waiting(ranks) == []


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("trainer", "x" * 2000, "trainer's name is too long"),
        ("keep", -1, "earlier generations"),
    ],
)
def test_options_that_no_rank_would_take_are_refused_before_anything_is_open(
    ranks: list[Daemon], option: str, value: Any, said: str
) -> None:
    with pytest.raises(InvalidOption, match=said):
        publish({}, partial=True, **{**where(ranks), option: value})
    assert waiting(ranks) == []


def test_of_two_trainers_the_second_is_told(ranks: list[Daemon], model: Path) -> None:
    tensors = trained(model, 9.0)
    with stage(**where(ranks)) as publication:
        with pytest.raises(UpdateConflict):
            publish(tensors, **where(ranks))
        for name, tensor in tensors.items():
            publication.push(name, tensor)
        version = publication.commit()
    assert versions(ranks) == [version, version]


def test_a_tensor_may_change_when_push_returns(ranks: list[Daemon], model: Path, tmp_path: Path) -> None:
    tensors = trained(model, 10.0)
    with stage(**where(ranks)) as publication:
        for name, tensor in tensors.items():
            used_again = tensor.clone()
            publication.push(name, used_again)
            used_again.zero_()
        version = publication.commit()
    require_served(ranks, tensors, version, tmp_path)


def test_nothing_is_pushed_before_the_block_after_its_commit_or_when_it_is_left(
    ranks: list[Daemon], model: Path
) -> None:
    tensors = trained(model, 11.0)
    publication = stage(**where(ranks))
    with pytest.raises(ValueError, match="not begun, or is over"):
        publication.push("model.norm.weight", tensors["model.norm.weight"])
    with publication:
        for name, tensor in tensors.items():
            publication.push(name, tensor)
        version = publication.commit()
        with pytest.raises(ValueError, match="not begun, or is over"):
            publication.commit()
    with pytest.raises(ValueError, match="not begun, or is over"):
        publication.boxes("model.norm.weight")
    assert versions(ranks) == [version, version]


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_nbytes": 0},
        {"bucket_nbytes": 4096},
        {"bucket_nbytes": 100_000},
        {"bucket_count": 0},
        {"bucket_count": 1 << 20},
    ],
    ids=str,
)
def test_buckets_that_no_daemon_takes_are_refused_before_one_is_asked(
    options: dict[str, Any], runtime_dir: Path
) -> None:
    with pytest.raises(InvalidOption, match=rf"bucket.*expected: .*found: {next(iter(options.values()))}"):
        stage(runtime_dir=runtime_dir, **options)


def test_a_forked_child_has_nothing_of_the_push_which_goes_on_in_its_parent(
    ranks: list[Daemon], model: Path, tmp_path: Path
) -> None:
    """As a data loader's, in the middle of it: no connection, no bucket, and a word for whoever pushes there."""
    tensors = trained(model, 12.0)
    first, *others = tensors
    with stage(**where(ranks)) as publication:
        publication.push(first, tensors[first])
        connections = [
            open_fds()[channel.connection.fileno()]
            for push in publication._begun
            for channel in (push._daemon, push._worker)
            if channel is not None
        ]
        assert len(set(connections)) == 2 * len(ranks)
        assert sum("weightcached:bucket" in line for line in memfd_mappings()) == BUCKETS["bucket_count"] * len(ranks)

        def child() -> None:
            assert not set(connections) & set(open_fds().values())
            assert not any("weightcached:bucket" in line for line in memfd_mappings())
            with pytest.raises(ValueError, match="forked"):
                publication.push(others[0], tensors[others[0]])
            publication.__exit__(None, None, None)
            in_child(lambda: None)  # whose child closes nothing twice

        in_child(child)
        for name in others:
            publication.push(name, tensors[name])
        version = publication.commit()
    require_served(ranks, tensors, version, tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((3, torch.zeros(4)), "has no tensor 3"),
        ((["model.norm.weight"], torch.zeros(4)), "has no tensor"),
        (("model.norm.weight", 3, torch.zeros(4)), r"no box of .*found: 3"),
        (("model.norm.weight", [slice(0, 1.5)], torch.zeros(4)), "no box of"),
        (("model.norm.weight", [slice("a", None)], torch.zeros(4)), "no box of"),
    ],
    ids=["a number", "a list", "an element", "half an element", "text"],
)
def test_names_and_boxes_of_another_type_are_refused(ranks: list[Daemon], given: Any, said: str) -> None:
    with stage(**where(ranks)) as publication, pytest.raises(PushMismatch, match=said):
        publication.push(*given)


def test_tensors_without_names_are_refused_and_nothing_changes(ranks: list[Daemon]) -> None:
    before = versions(ranks)
    with pytest.raises(PushMismatch, match=r"no name.*found: Tensor"):
        publish([torch.zeros(4)], partial=True, **where(ranks))  # type: ignore[list-item]
    assert (versions(ranks), waiting(ranks)) == (before, [])


class Interrupted(BaseException):
    """What a signal's handler raises here."""


def test_a_trainer_that_waits_for_another_s_change_may_be_interrupted(ranks: list[Daemon]) -> None:
    """It leaves at once, and not when it could have begun."""
    before, main = versions(ranks), threading.main_thread().ident

    def interrupt(*_: object) -> None:
        raise Interrupted

    handler = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(1.0, lambda: signal.pthread_kill(main or 0, signal.SIGUSR1))
    try:
        with stage(**where(ranks)):
            timer.start()
            with pytest.raises(Interrupted):
                stage(**where(ranks), wait=True).__enter__()
            left_s = time.monotonic()
        assert time.monotonic() - left_s < 60
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, handler)
    assert (versions(ranks), waiting(ranks)) == (before, [])
