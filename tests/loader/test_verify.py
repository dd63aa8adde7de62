"""The process that hashes resident weights against their manifest: it finds a changed bit, and names whose it is."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from weightcached.loader.verify import NAMES_MAX, verify
from weightcached.protocol.config import CacheConfig, Parallel
from weightcached.protocol.errors import TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.testing import HonestGrant, TensorBytes, honest_grant, sealed_memory

CONFIG = CacheConfig(
    architecture="LlamaForCausalLM",
    layout="hf",
    layout_revision=1,
    parallel=Parallel(tp_size=1, tp_rank=0),
    model={"hidden_size": 8},
)


def tensor(seed: int, nbytes: int = 4096) -> TensorBytes:
    return TensorBytes("uint8", (nbytes,), bytes((seed + position) % 251 for position in range(nbytes)))


@pytest.fixture
def granted() -> Iterator[HonestGrant]:
    tensors = {f"layer.{number}": tensor(number) for number in range(30)} | {
        "empty": TensorBytes("uint8", (0,), b""),
        "large": tensor(7, 3_000_000),
    }
    with honest_grant(tensors, config=CONFIG, aliases={"tied": "layer.3"}, receipts="a" * 64) as granted:
        yield granted


def damaged(granted: HonestGrant, *offsets: int) -> OwnedFds:
    """The segment with one bit changed at each offset."""
    data = bytearray(granted.segment)
    for offset in offsets:
        data[offset] ^= 1
    return OwnedFds([sealed_memory(bytes(data))])


def test_honest_bytes_are_found_to_be_so(granted: HonestGrant) -> None:
    found = verify(granted.fds[0], [granted.fds[1]])
    assert found["differing"] == []
    assert found["differing_count"] == 0
    assert found["rows"] == 32  # an alias is not a place of its own
    assert found["nbytes"] == 30 * 4096 + 3_000_000


@pytest.mark.parametrize("offset", [0, 4095])
def test_one_bit_is_noticed_and_its_parameter_named(granted: HonestGrant, offset: int) -> None:
    with damaged(granted, 5 * 4096 + offset) as other:
        assert verify(granted.fds[0], [other[0]])["differing"] == ["layer.5"]
    with damaged(granted, len(granted.segment) - 1 - offset) as other:
        assert verify(granted.fds[0], [other[0]])["differing"] == ["large"]


def test_many_are_counted_and_some_named(granted: HonestGrant) -> None:
    with damaged(granted, *(number * 4096 for number in range(30))) as other:
        found = verify(granted.fds[0], [other[0]])
    assert found["differing_count"] == 30
    assert found["differing"] == [f"layer.{number}" for number in range(NAMES_MAX)]


def test_what_does_not_fit_together_is_refused(granted: HonestGrant) -> None:
    manifest, segment = granted.fds
    with pytest.raises(TransferError, match="number of segments"):
        verify(manifest, [])
    with pytest.raises(TransferError, match="segment 0 has another size"):
        verify(manifest, [manifest])
    with pytest.raises(TransferError, match="bad manifest"):
        verify(segment, [segment])


@pytest.mark.parametrize("good", [True, False])
def test_the_process_answers_with_one_line(granted: HonestGrant, good: bool) -> None:
    segment = granted.fds[1] if good else granted.fds[0]
    command = [sys.executable, "-P", "-m", "weightcached.loader.verify", "--die-with-parent", str(os.getpid())]
    command += ["--manifest", str(granted.fds[0]), "--segment", str(segment)]
    ended = subprocess.run(command, pass_fds=granted.fds, capture_output=True, text=True, timeout=60)
    answer = json.loads(ended.stdout)
    assert ended.stderr == ""
    if good:
        assert ended.returncode == 0
        assert answer["differing_count"] == 0
    else:
        assert ended.returncode == 1
        assert answer["error"]["code"] == "transfer"


def test_it_needs_no_torch() -> None:
    program = "import sys, weightcached.loader.verify; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"


def test_parameters_of_another_form_than_those_beside_are_named(granted: HonestGrant) -> None:
    others = {f"layer.{number}": tensor(number) for number in range(29)} | {
        "empty": TensorBytes("int8", (0,), b""),
        "large": TensorBytes("uint8", (3000, 1000), tensor(7, 3_000_000).data),
        "more": tensor(1),
    }
    with honest_grant(others, config=CONFIG, aliases={"tied": "layer.4"}, receipts="b" * 64) as other:
        found = verify(other.fds[0], [other.fds[1]], beside_fd=granted.fds[0])
    assert found["differing_count"] == 0
    assert set(found["formed_otherwise"]) == {
        "layer.29: not there",
        "empty: dtype uint8 here, int8 there",
        "large: shape (3000000,) here, (3000, 1000) there, stride (1,) here, (1000, 1) there",
        "tied: alias_of layer.3 here, layer.4 there",
        "more: not here",
    }
    assert found["formed_otherwise_count"] == 5


def test_another_place_is_no_other_form(granted: HonestGrant) -> None:
    turned = {"large": tensor(9, 3_000_000), "empty": TensorBytes("uint8", (0,), b"")}
    turned |= {f"layer.{number}": tensor(number + 1) for number in range(30)}
    with honest_grant(turned, config=CONFIG, aliases={"tied": "layer.3"}, receipts="b" * 64) as other:
        found = verify(other.fds[0], [other.fds[1]], beside_fd=granted.fds[0])
    assert (found["formed_otherwise_count"], found["same"]) == (0, False)


def test_equal_bytes_under_every_name_are_the_same_weights_wherever_they_lie(granted: HonestGrant) -> None:
    turned = {"large": tensor(7, 3_000_000), "empty": TensorBytes("uint8", (0,), b"")}
    turned |= {f"layer.{number}": tensor(number) for number in range(30)}
    for one, same in (({}, True), ({"layer.7": tensor(8)}, False)):
        with honest_grant(turned | one, config=CONFIG, aliases={"tied": "layer.3"}, receipts="b" * 64) as other:
            found = verify(other.fds[0], [other.fds[1]], beside_fd=granted.fds[0])
        assert (found["formed_otherwise_count"], found["same"]) == (0, same)
    assert not verify(granted.fds[0], [granted.fds[1]])["same"], "beside nothing"
