"""Which generation a lease is of: while one is staged, given up, swapped in, and when the daemon is lost in between."""

from collections.abc import Callable

import pytest

from tests.support.resources import memfd_mappings, open_fds
from tests.support.swaps import SEGMENTS, swap
from weightcached.client import WeightSet
from weightcached.protocol.errors import (
    DaemonNotReady,
)
from weightcached.protocol.messages import Event, Resume, Switch
from weightcached.protocol.places import Place
from weightcached.protocol.testing import (
    AnswerPings,
    AnswerSwitches,
    Close,
    Gate,
    HonestGrant,
    LyingDaemon,
    Open,
    Receive,
    Send,
    Stall,
    Step,
)

Attached = Callable[..., WeightSet]


def test_a_stage_that_is_given_up_switches_the_lease_back(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    script: list[Step] = [Receive(), grants[0].step(), AnswerSwitches(grants, current=grants[1])]
    with LyingDaemon(place.socket_path, script) as daemon, attached() as weights:
        weights.stage().close()
        assert weights.lease is not None
        weights.lease.ping()
        assert daemon.wires[0].messages[1:3] == [
            Switch(generation=None, version=None),
            Switch(generation=grants[0].message.generation, version=None),
        ]
        assert len(memfd_mappings()) == len(SEGMENTS)


def test_a_daemon_that_does_not_answer_is_not_waited_for_and_its_late_descriptors_are_closed(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    late, back = Gate(), Gate()
    script: list[Step] = [Receive(), grants[0].step(), Receive(), Stall(late), grants[1].step(), Receive(), Open(back)]
    script += [grants[0].step(), AnswerPings()]
    with LyingDaemon(place.socket_path, script) as daemon, attached() as weights:
        fds = len(open_fds())
        with pytest.raises(DaemonNotReady, match="nothing within"):
            weights.stage(timeout_s=0.1)
        late.open()
        back.wait()
        assert daemon.wires[0].messages[2] == Switch(generation=grants[0].message.generation)
        assert weights.lease is not None
        weights.lease.ping()  # answers come in order: both grants were taken by now
        assert len(open_fds()) == fds
        assert (weights["square"] == 1).all()
    late.close()
    back.close()


def test_a_grant_that_nobody_asked_for_ends_the_conversation_and_leaves_no_descriptor(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    script: list[Step] = [Receive(), grants[0].step(), grants[1].step(), Stall()]
    with LyingDaemon(place.socket_path, script, [Receive(), Close()]), attached() as weights:
        assert weights.lease is not None
        assert weights.lease.wait_lost(20)
        assert "was not asked" in str(weights.lease.reason)


def test_a_lease_lost_after_a_swap_is_resumed_for_the_generation_in_use(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    die = Gate()
    resumed = Send(grants[1].message)
    first: list[Step] = [Receive(), grants[0].step(), Receive(), grants[1].step(), Stall(die), Close()]
    with LyingDaemon(place.socket_path, first, [Receive(), resumed, AnswerPings()]) as daemon, attached() as weights:
        swap(weights)
        assert weights.lease is not None
        die.open()
        assert weights.lease.wait_lost(20)
        assert weights.lease.wait_for("connected", timeout_s=20)
        resume = daemon.wires[1].messages[0]
        assert isinstance(resume, Resume)
        assert (resume.generation, resume.manifest_sha256) == (
            grants[1].message.generation,
            grants[1].message.manifest_sha256,
        )
    die.close()


def test_a_lease_lost_between_staging_and_swapping_is_brought_to_the_generation_in_use(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    die = Gate()
    first: list[Step] = [Receive(), grants[0].step(), Receive(), grants[1].step(), Stall(die), Close()]
    second: list[Step] = [Receive(), Send(grants[0].message), AnswerSwitches(grants)]
    with LyingDaemon(place.socket_path, first, second) as daemon, attached() as weights:
        lease = weights.lease
        assert lease is not None
        with weights.stage() as staged:
            die.open()
            assert lease.wait_lost(20)
            assert lease.wait_for("connected", timeout_s=20)
            with weights.barrier.stopped() as stopped:
                staged.swap(stopped)
        lease.ping()
        assert daemon.wires[1].messages[1] == Switch(generation=grants[1].message.generation)
    die.close()


def published(grant: HonestGrant) -> Event:
    return Event(
        kind="published",
        generation=grant.message.generation,
        message="",
        version=grant.message.version,
        drops=("prefix_cache",),
    )


def test_a_follower_says_what_was_published_and_is_not_in_use(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    tell = Gate()
    script: list[Step] = [
        Receive(),
        grants[0].step(),
        Stall(tell),
        Send(published(grants[1])),
        AnswerSwitches(grants, current=grants[1]),
    ]
    with LyingDaemon(place.socket_path, script), attached() as weights:
        following = weights.follow()
        following._unheard = False  # this daemon does not answer Status
        assert following.wait(0)
        assert following.pending() is None
        assert not following.wait(0)
        tell.open()
        assert following.wait(20)
        found = following.pending()
        assert found is not None
        assert (found.generation, found.version, found.drops) == (
            grants[1].message.generation,
            grants[1].message.version,
            ("prefix_cache",),
        )
        swap(weights, generation=found.generation)
        assert following.pending() is None
    tell.close()
