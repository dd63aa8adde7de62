"""A daemon whose weights a trainer pushes: what is prepared, what is granted, and what each party's end leaves behind.

The worker is the real one; the trainer is the client's `RankPush` in this process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import TIMEOUT_S, Daemon, ask, daemon, scripted_daemon, start, supervised_daemon
from tests.support.plain import tensors_of
from tests.support.resources import open_fds
from tests.support.staging import (
    await_change,
    begin_push,
    decide,
    describe,
    drop,
    finish,
    push_all,
    push_begun,
)
from tests.support.unprivileged import NOBODY, command_as
from weightcached.client import attach
from weightcached.client.publish import publish, stage
from weightcached.client.publish.rank import RankPush
from weightcached.client.publish.values import Box, Given
from weightcached.protocol.assigned import is_assigned
from weightcached.protocol.errors import (
    CheckpointMismatch,
    DaemonUnreachable,
    InsufficientMemory,
    PushMismatch,
    UpdateConflict,
    WorkerDied,
)
from weightcached.protocol.messages import GiveUp, Refused

SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_key_value_heads": 2}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tiny_llama(tmp_path / "model", **SHAPE), tmp_path / "run") as served:
        served.wait_until("ready")
        yield served


def trained(served: Daemon, step: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: (tensor.float() + step).to(tensor.dtype) for name, tensor in tensors_of(served.model_dir).items()}


def worker_of(served: Daemon) -> psutil.Process:
    children = psutil.Process(served.pid).children()
    (worker,) = [one for one in children if "weightcached.loader.worker" in one.cmdline()]
    return worker


def whole(push: RankPush, name: str, tensors: Mapping[str, torch.Tensor]) -> tuple[Given, Box]:
    box = tuple(slice(0, extent) for extent in tensors[name].shape)
    return Given(push.table[name], tensors[name], box), box


def push_and_finish(push: RankPush, tensors: Mapping[str, torch.Tensor]) -> str:
    push_all(push, tensors)
    return finish(push)


def test_what_was_pushed_is_served_once_it_is_committed(served: Daemon) -> None:
    tensors, transaction = trained(served), begin_push(served)
    before = describe(served)
    with push_begun(served, transaction) as push:
        push_all(push, tensors)
        version = finish(push)
        info = await_change(served, transaction)
        assert (info.state, info.generation) == ("prepared", push.staged.generation), info
        assert describe(served).current == before.current
        assert decide(served, transaction, commit=True).version == version
    after = describe(served)
    assert after.current == push.staged.generation
    found = after.generation(after.current)
    assert found is not None
    assert is_assigned(found.version)
    assert (found.version, found.receipts_version, found.origin) == (version, version, "pushed by the trainer")
    assert served.report().model == found.origin
    with attach(served.model_dir, runtime_dir=served.place.runtime_dir, want="current", mode="require") as weights:
        assert weights.version == version
        for name, tensor in tensors.items():
            assert torch.equal(weights[name], tensor), name
    assert before.current is not None
    drop(served, before.current)
    with pytest.raises(CheckpointMismatch, match="current"):
        attach(served.model_dir, runtime_dir=served.place.runtime_dir, mode="require")


def test_a_trainer_that_dies_gives_up_its_stage_and_nothing_else(served: Daemon) -> None:
    before, transaction = describe(served), begin_push(served)
    with push_begun(served, transaction) as push:
        push.push("model.norm.weight", *whole(push, "model.norm.weight", trained(served)))
        push.hand_over()
    info = await_change(served, transaction)
    assert (info.state, info.error_code) == ("failed", "stage_lost")
    served.wait_logged("change decided", transaction=transaction, outcome="aborted")
    after = describe(served)
    assert (after.current, after.state, len(after.generations)) == (before.current, "ready", 1)
    assert after.open is None, "the next trainer would have to wait for nobody"
    report = served.report()
    assert (report.model, report.last_error) == (str(served.model_dir), None)
    with push_begun(served, begin_push(served)) as push:
        push_and_finish(push, trained(served))


def test_a_trainer_that_gives_up_says_why_and_that_is_why_its_change_failed(served: Daemon) -> None:
    """By the client's whole way, whose coordinator gives the change up, too: what the rank says is not its doing."""
    options: dict[str, Any] = {"runtime_dir": served.place.runtime_dir, "partial": True}

    def why() -> str:
        change = describe(served).change
        assert change is not None
        assert (change.state, change.error_code) == ("failed", "stage_lost")
        return str(change.error)

    with pytest.raises(PushMismatch, match="has no tensor"):
        publish({"qkv_proj.weight": torch.zeros(4)}, **options)
    assert "it has given up: PushMismatch: the checkpoint that is served has no tensor 'qkv_proj.weight'" in why()
    with pytest.raises(ZeroDivisionError), stage(**options):
        _ = 1 / 0
    assert "it has given up: ZeroDivisionError: division by zero" in why()
    with stage(**options):
        pass
    assert "it has given up: it was left without a commit" in why()
    channel = served.connect()
    refused = ask(channel, GiveUp(reason="nothing was begun"))
    channel.close()
    assert isinstance(refused, Refused)
    assert "nothing is pushed on this connection" in refused.message


def test_a_change_that_no_trainer_begins_to_push_for_is_given_up(tmp_path: Path) -> None:
    """As by one that is stopped before: the next need not wait for it."""
    program = (
        "import sys, weightcached.daemon.making as making; making.STAGE_TIMEOUT_S = 1.0\n"
        "from weightcached.daemon.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    model = tiny_llama(tmp_path / "model", **SHAPE)
    served = start(model, tmp_path / "run", command=(sys.executable, "-c", program))
    try:
        served.wait_until("ready")
        transaction = begin_push(served)
        served.wait_logged("change decided", transaction=transaction, outcome="aborted")
        state = describe(served)
        assert state.change is not None
        assert (state.open, state.change.error_code) == (None, "stage_lost")
        with pytest.raises(UpdateConflict, match="no change waits"), push_begun(served, transaction):
            pass
        with push_begun(served, begin_push(served)) as push:
            push_and_finish(push, trained(served))
    finally:
        served.stop()


def test_a_worker_that_dies_is_told_to_its_trainer(served: Daemon) -> None:
    transaction = begin_push(served)
    with push_begun(served, transaction) as push:
        worker_of(served).kill()
        with pytest.raises(WorkerDied, match="SIGKILL"):
            push_and_finish(push, trained(served))
    assert await_change(served, transaction).error_code == "worker_died"


def test_a_keeper_that_dies_ends_the_push(served: Daemon) -> None:
    transaction = begin_push(served)
    with push_begun(served, transaction) as push:
        served.stop(signal.SIGKILL)
        with pytest.raises(DaemonUnreachable):
            push_and_finish(push, trained(served))


def test_what_the_worker_refuses_is_told_to_its_trainer(served: Daemon) -> None:
    tensors, transaction = trained(served), begin_push(served)
    del tensors["model.norm.weight"]
    with push_begun(served, transaction) as push, pytest.raises(PushMismatch, match=r"missing: model\.norm\.weight"):
        push_and_finish(push, tensors)
    assert await_change(served, transaction).error_code == "push_mismatch"
    assert decide(served, transaction, commit=False).outcome == "aborted"


def test_an_abort_ends_the_push(served: Daemon) -> None:
    transaction = begin_push(served)
    with push_begun(served, transaction) as push:
        decide(served, transaction, commit=False)
        with pytest.raises(UpdateConflict, match="given up"):
            push_and_finish(push, trained(served))


def test_a_second_trainer_is_refused(served: Daemon) -> None:
    transaction = begin_push(served)
    with pytest.raises(UpdateConflict):
        begin_push(served)
    with push_begun(served, transaction) as push:
        with pytest.raises(UpdateConflict), push_begun(served, transaction):
            pass
        with pytest.raises(UpdateConflict), push_begun(served, "0" * 32):
            pass
        push_and_finish(push, trained(served))
        assert await_change(served, transaction).state == "prepared"


def test_memory_is_admitted_with_the_buckets(served: Daemon) -> None:
    transaction = begin_push(served)
    with (
        pytest.raises(InsufficientMemory, match=r"beside 1 generation of .*next step: free memory .*generations"),
        push_begun(served, transaction, bucket_nbytes=1 << 30, bucket_count=63),
    ):
        pass
    assert await_change(served, transaction).error_code == "insufficient_memory"


def test_a_partial_push_is_on_top_of_what_is_served(served: Daemon) -> None:
    """Twice: the second takes from what was pushed first."""
    expected = tensors_of(served.model_dir)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
        transaction, tensors = begin_push(served, partial=True), trained(served)
        with push_begun(served, transaction) as push:
            push_all(push, {name: tensors[name]})
            version = finish(push)
            await_change(served, transaction)
            decide(served, transaction, commit=True)
        expected[name] = tensors[name]
        with attach(served.model_dir, runtime_dir=served.place.runtime_dir, want=version, mode="require") as weights:
            for each, tensor in expected.items():
                assert torch.equal(weights[each], tensor), each


def test_equal_weights_onto_equal_weights_have_an_equal_version(served: Daemon, tmp_path: Path) -> None:
    versions = set()
    for step in (1.0, 1.0, 2.0):
        transaction = begin_push(served)
        with push_begun(served, transaction) as push:
            push_all(push, trained(served, step))
            versions.add(finish(push))
            assert await_change(served, transaction).state == "prepared"
            decide(served, transaction, commit=False)
    assert len(versions) == 2


def test_pushed_weights_outlive_the_keeper(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", **SHAPE)
    with supervised_daemon(model, tmp_path / "run") as served:
        served.wait_until("ready")
        transaction = begin_push(served)
        with push_begun(served, transaction) as push:
            push_all(push, trained(served))
            version = finish(push)
            assert await_change(served, transaction).state == "prepared"
            decide(served, transaction, commit=True)
        lines = len(served.log.lines)
        served.kill_keeper()
        served.wait_ready_again(lines)
        assert describe(served).current == push.staged.generation
        assert served.report().model == "pushed by the trainer"
        with attach(model, runtime_dir=served.place.runtime_dir, want="current", mode="require") as weights:
            assert weights.version == version
            for name, tensor in trained(served).items():
                assert torch.equal(weights[name], tensor), name


def kinds_of_fds(served: Daemon) -> Counter[str]:
    """What the keeper holds open, numbers and ids aside."""
    return Counter(re.sub(r"[0-9a-f]{32}|\d+", "…", name) for name in open_fds(served.pid).values())


def test_pushes_leave_nothing_behind(served: Daemon) -> None:
    """Neither descriptors in the keeper, nor processes, nor memory of stages: committed, given up or failed."""

    def push_once(step: float, end: str) -> None:
        transaction = begin_push(served)
        with push_begun(served, transaction) as push:
            if end != "given up":
                push_and_finish(push, trained(served, step))
                assert await_change(served, transaction).state == "prepared"
                decide(served, transaction, commit=end == "committed")
        await_change(served, transaction)
        decide(served, transaction, commit=end == "committed")  # again, or where the daemon has by itself

    push_once(0.0, "committed")  # what is held from here on: one previous generation
    before = kinds_of_fds(served)
    for step, end in enumerate(("committed", "given up", "aborted", "committed"), 1):
        push_once(float(step), end)
    assert len(describe(served).generations) == 2
    after = kinds_of_fds(served)
    # A question's connection may be on its way out at either moment: of four stages, more would be left.
    assert after["socket:[…]"] <= before["socket:[…]"] + 1
    assert {**after, "socket:[…]": 0} == {**before, "socket:[…]": 0}
    assert not [one for one in psutil.Process(served.pid).children() if "loader.worker" in " ".join(one.cmdline())]


@pytest.mark.root
def test_only_root_and_the_daemon_itself_may_push(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", **SHAPE)
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as directory,
        scripted_daemon(model, Path(directory) / "run", "--allow-uid", str(NOBODY)) as served,
    ):
        served.wait_until("ready")
        os.chmod(directory, 0o755)
        transaction = begin_push(served)
        program = (
            "import sys; from pathlib import Path; from weightcached.client.publish.rank import RankPush\n"
            "from weightcached.protocol.deadline import Deadline; from weightcached.protocol.peers import AllowList\n"
            "from weightcached.protocol.places import Place\n"
            "RankPush.begin(Place(Path(sys.argv[1]), 'default', 'host-tp0of1'), transaction=sys.argv[2], name='x',\n"
            "    bucket_nbytes=65536, bucket_count=1, allowed=AllowList(), deadline=Deadline.after(60))"
        )
        command = command_as(NOBODY, [sys.executable, "-c", program, str(Path(directory) / "run"), transaction])
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert ended.returncode == 1, ended
        assert "this user may not push weights" in ended.stderr
        assert describe(served).state == "updating"
        decide(served, transaction, commit=False)
