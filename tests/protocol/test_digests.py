"""The content digest: what it tells apart, when it is computed, remembered, believed."""

import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from blake3 import blake3

from tests.support.checkpoints import settled as settle
from tests.support.mounts import in_mount_namespace
from tests.support.unprivileged import NOBODY, command_as, folder_for_everyone
from tests.support.weight_directories import make, receipts_of
from weightcached.protocol.content import open_weights, weight_files
from weightcached.protocol.digest_cache import DigestCache, cache_directory
from weightcached.protocol.digests import digest_of, main
from weightcached.protocol.errors import CheckpointChanged, CheckpointError, InvalidOption, MissingShard
from weightcached.protocol.hashing import content_digest
from weightcached.protocol.index_file import INDEX_NAME
from weightcached.protocol.sidecar import SIDECAR_NAME, Sidecar, read_sidecar, write_sidecar

DEADLINE_S = 20
FILES = {"model-1.safetensors": b"one" * 1000, "model-2.safetensors": b"two", "config.json": b"{}"}
INDEX = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
COMMAND = [sys.executable, "-m", "weightcached.protocol.digests"]


def checkpoint(directory: Path) -> Path:
    return make(directory, FILES, INDEX)


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Gives checkpoints of equal content that nobody has touched for two seconds: one wait for all tests here."""
    root = tmp_path_factory.mktemp("settled")
    directories = [checkpoint(root / str(number)) for number in range(48)]
    settled_at_ns = max(receipts_of(directory).settled_at_ns for directory in directories)
    time.sleep(max(0, settled_at_ns - time.time_ns()) / 1e9)
    return iter(directories).__next__


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache")


def digest_by_hand(directory: Path) -> str:
    with open_weights(weight_files(directory)) as weights:
        return content_digest(weights)


# What the digest is


def test_the_digest_is_the_documented_combination(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    combined = blake3(derive_key_context="weightcached checkpoint content, version 1")
    for name in sorted(["model-1.safetensors", "model-2.safetensors", INDEX_NAME]):
        data = (directory / name).read_bytes()
        combined.update(struct.pack("<I", len(name)) + name.encode() + struct.pack("<Q", len(data)))
        combined.update(blake3(data).digest())
    assert digest_by_hand(directory) == combined.hexdigest()


def test_the_digest_is_the_same_in_every_release(tmp_path: Path) -> None:
    """Sidecars and caches outlive us: when this fails, the context string needs a new version."""
    directory = make(tmp_path / "model", {"model.safetensors": bytes(range(256)) * 40_000})
    assert digest_by_hand(directory) == "878b69a0cacb4db1e00ae407928063630bbf35a51a10e8789dcd8b13a4cca6aa"


def test_one_bit_a_name_or_a_line_of_the_index_makes_another_digest(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    flipped = checkpoint(tmp_path / "flipped")
    data = bytearray(FILES["model-1.safetensors"])
    data[-1] ^= 1
    (flipped / "model-1.safetensors").write_bytes(data)
    swapped = make(tmp_path / "swapped", FILES, {"a": "model-2.safetensors", "b": "model-1.safetensors"})
    renamed = make(tmp_path / "renamed", {"model-3.safetensors": FILES["model-1.safetensors"]})
    plain = make(tmp_path / "plain", {"model.safetensors": FILES["model-1.safetensors"]})
    everything = [directory, flipped, swapped, renamed, plain]
    assert len({digest_by_hand(each) for each in everything}) == len(everything)


def test_bytes_cannot_move_from_one_file_to_the_next_unnoticed(tmp_path: Path) -> None:
    digests = set()
    for cut in range(4):
        files = {"model-1.safetensors": b"abc"[:cut], "model-2.safetensors": b"abc"[cut:]}
        digests.add(digest_by_hand(make(tmp_path / str(cut), files, INDEX)))
    assert len(digests) == 4


def test_the_same_bytes_have_the_same_digest_wherever_they_lie(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    shutil.copytree(directory, tmp_path / "copy")
    (tmp_path / "copy" / "consolidated.safetensors").write_bytes(b"not part of it")
    (tmp_path / "link").symlink_to(directory)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in directory.iterdir():
        (snapshot / path.name).symlink_to(path)
    places = [directory, tmp_path / "copy", tmp_path / "link", snapshot]
    assert len({digest_by_hand(place) for place in places}) == 1


# Remembering


def test_a_digest_is_computed_once_and_then_remembered(settled: Callable[[], Path], cache: DigestCache) -> None:
    directory = settled()
    first, second = digest_of(directory, cache), digest_of(directory, cache)
    assert (first.source, first.settled, first.remembered, first.warnings) == ("computed", True, True, ())
    assert (second.source, second.settled, second.remembered, second.warnings) == ("cache", True, True, ())
    assert first.hex == second.hex == digest_by_hand(directory)
    assert first.nbytes == sum((directory / name).stat().st_size for name in (*INDEX.values(), INDEX_NAME))
    assert cache.directory is not None
    assert [path.suffix for path in cache.directory.iterdir()] == [".json"], "locks and halves are cleared away"


def test_a_chmod_costs_a_computation_and_changes_nothing(settled: Callable[[], Path], cache: DigestCache) -> None:
    directory = settled()
    first = digest_of(directory, cache)
    (directory / "model-1.safetensors").chmod(0o640)
    second = digest_of(directory, cache)
    assert second.source == "computed"
    assert first.hex == second.hex
    assert first.receipts != second.receipts


def test_files_just_written_are_digested_but_not_remembered(tmp_path: Path, cache: DigestCache) -> None:
    directory = checkpoint(tmp_path / "model")
    for _ in range(2):
        digest = digest_of(directory, cache)
        assert (digest.source, digest.settled, digest.remembered) == ("computed", False, False)
        assert digest.warnings


@pytest.mark.root
def test_where_receipts_prove_nothing_every_digest_is_computed(settled: Callable[[], Path], tmp_path: Path) -> None:
    program = f"""
import json
from pathlib import Path
from weightcached.protocol.digests import DigestCache, digest_of
cache = DigestCache(Path("{tmp_path}/cache"))
answers = [digest_of("ram/model", cache, also_trusted=names) for names in ([], [], ["ramfs"], ["ramfs"], [])]
print(json.dumps([(answer.source, answer.settled) for answer in answers]))
"""
    setup = f"mkdir ram; mount -t ramfs ramfs ram; cp -r {settled()} ram/model; sleep 2"
    computed = ["computed", False]
    answers = [computed, computed, ["computed", True], ["cache", True], computed]
    assert in_mount_namespace(setup, program, tmp_path) == answers


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"schema": 1}', b"[" * 60_000, b"\xff", None], ids=lambda damage: repr(damage)[:20]
)
def test_a_damaged_entry_is_made_again(settled: Callable[[], Path], cache: DigestCache, damage: bytes | None) -> None:
    directory = settled()
    first = digest_of(directory, cache)
    assert cache.directory is not None
    (entry,) = cache.directory.iterdir()
    good = entry.read_bytes()
    entry.write_bytes(good.replace(b'"receipts": "', b'"receipts": "0') if damage is None else damage)
    again = digest_of(directory, cache)
    assert (again.source, again.hex) == ("computed", first.hex)
    assert len(again.warnings) == 1
    assert entry.read_bytes() == good
    assert digest_of(directory, cache).source == "cache"


def test_a_cache_that_others_can_write_is_refused(settled: Callable[[], Path], cache: DigestCache) -> None:
    assert cache.directory is not None
    cache.directory.mkdir()
    for mode in (0o775, 0o757):
        cache.directory.chmod(mode)
        with pytest.raises(InvalidOption) as caught:
            digest_of(settled(), cache)
        assert caught.value.where == cache.directory
        assert caught.value.next_step


@pytest.mark.root
def test_a_cache_of_somebody_else_is_refused(settled: Callable[[], Path], cache: DigestCache) -> None:
    assert cache.directory is not None
    cache.directory.mkdir()
    os.chown(cache.directory, NOBODY, NOBODY)
    with pytest.raises(InvalidOption, match="somebody else"):
        digest_of(settled(), cache)


def test_without_a_place_for_the_cache_the_digest_is_still_right(settled: Callable[[], Path], tmp_path: Path) -> None:
    directory = settled()
    (tmp_path / "file").write_bytes(b"")
    for nowhere in (None, tmp_path / "file" / "cache"):
        digest = digest_of(directory, DigestCache(nowhere))
        assert (digest.source, digest.settled, digest.remembered) == ("computed", True, False)
        assert digest.hex == digest_by_hand(directory)
        assert len(digest.warnings) == 1


@pytest.mark.root
@pytest.mark.parametrize("options", ["nr_inodes=1", "nr_inodes=2", "nr_blocks=1"])
def test_a_full_disk_costs_only_the_memory(settled: Callable[[], Path], tmp_path: Path, options: str) -> None:
    """No room for the lock, for the entry, and for the entry's bytes."""
    directory = settled()
    program = f"""
import json, os
from pathlib import Path
from weightcached.protocol.digests import DigestCache, digest_of
digest = digest_of("{directory}", DigestCache(Path("cache")))
print(json.dumps([digest.hex, digest.source, digest.remembered, digest.warnings, os.listdir("cache")]))
"""
    fill = "head -c 1M /dev/zero >cache/filler 2>/dev/null || true" if options == "nr_blocks=1" else "true"
    setup = f"mkdir cache; mount -t tmpfs -o mode=755,{options} tmpfs cache; {fill}"
    answer = in_mount_namespace(setup, program, tmp_path)
    assert isinstance(answer, list)
    found, source, remembered, warnings, left = answer
    assert (found, source, remembered) == (digest_by_hand(directory), "computed", False)
    assert ["No space left" in warning for warning in warnings] == [True]
    assert [name for name in left if name != "filler"] == []


@pytest.mark.root
def test_a_cache_that_can_only_be_read_is_read(settled: Callable[[], Path]) -> None:
    """An engine without rights beside a daemon of root's: it takes what is there, and what is not costs it a pass."""
    known, unknown = settled(), settled()
    with folder_for_everyone() as folder:
        for directory in (known, unknown):
            shutil.copytree(directory, folder / directory.name)
        copies = [folder / known.name, folder / unknown.name]
        for copy in copies:
            settle(copy)
        cached = digest_of(copies[0], DigestCache(folder / "cache"))
        assert cached.remembered
        answers = []
        for copy in copies:
            command = command_as(NOBODY, [*COMMAND, str(copy), "--json", "--cache-dir", str(folder / "cache")])
            answers.append(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
        assert [(answer["source"], answer["remembered"]) for answer in answers] == [
            ("cache", True),
            ("computed", False),
        ]
        assert {answer["digest"] for answer in answers} == {cached.hex}


def test_where_digests_are_remembered(tmp_path: Path) -> None:
    everything = {"WEIGHTCACHED_CACHE_DIR": "/named", "XDG_CACHE_HOME": "/xdg"}
    assert cache_directory("/option", environ=everything, uid=0) == Path("/option")
    assert cache_directory(environ=everything, uid=0) == Path("/named")
    assert cache_directory(environ={"XDG_CACHE_HOME": "/xdg"}, uid=0) == Path("/var/cache/weightcached")
    assert cache_directory(environ={"XDG_CACHE_HOME": "/xdg"}, uid=1000) == Path("/xdg/weightcached")
    home = Path(os.path.expanduser("~"))
    for relative in ({}, {"XDG_CACHE_HOME": "here"}):
        assert cache_directory(environ=relative, uid=1000) == home / ".cache/weightcached"


# One after the other

HOLDER = """
import sys
from pathlib import Path
from weightcached.protocol.digest_cache import DigestCache
warnings = []
with DigestCache(Path(sys.argv[1])).opened(warnings) as shelf, shelf.turn(sys.argv[2]) as locked:
    print(shelf == locked, warnings, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Holder:
    """A process that wants the turn of one entry, and has it until it is told to let go, or killed."""

    process: subprocess.Popen[bytes]

    def await_turn(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"True []\n"

    def let_go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture
def hold() -> Iterator[Callable[[Path, str], Holder]]:
    processes = ExitStack()

    def start(directory: Path, receipts: str) -> Holder:
        command = [sys.executable, "-c", HOLDER, str(directory), receipts]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        processes.enter_context(process)
        processes.callback(process.kill)
        return Holder(process)

    with processes:
        yield start


def wait_until_in_line(pid: int) -> None:
    """Returns when the kernel shows ``pid`` waiting for a lock; it offers no event for that."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        if any(words[1] == "->" and words[2] == "FLOCK" and int(words[5]) == pid for words in locks):
            return
        time.sleep(0.005)
    pytest.fail(f"process {pid} does not wait for its turn")


def test_who_asks_while_another_computes_waits_and_reads(
    settled: Callable[[], Path], cache: DigestCache, hold: Callable[[Path, str], Holder]
) -> None:
    directory = settled()
    assert cache.directory is not None
    holder = hold(cache.directory, receipts_of(directory).sha256)
    holder.await_turn()
    command = [*COMMAND, str(directory), "--json", "--cache-dir", str(cache.directory)]
    askers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    for asker in askers:
        wait_until_in_line(asker.pid)
    holder.let_go()
    answers = [json.loads(asker.communicate(timeout=DEADLINE_S)[0]) for asker in askers]
    assert sorted(answer["source"] for answer in answers) == ["cache", "cache", "computed"]
    assert {answer["digest"] for answer in answers} == {digest_by_hand(directory)}
    assert [path.suffix for path in cache.directory.iterdir()] == [".json"]


def test_the_turn_of_a_killed_process_passes_on(
    settled: Callable[[], Path], cache: DigestCache, hold: Callable[[Path, str], Holder]
) -> None:
    directory = settled()
    assert cache.directory is not None
    receipts = receipts_of(directory).sha256
    holder = hold(cache.directory, receipts)
    holder.await_turn()
    command = [*COMMAND, str(directory), "--json", "--cache-dir", str(cache.directory)]
    asker = subprocess.Popen(command, stdout=subprocess.PIPE)
    wait_until_in_line(asker.pid)
    (cache.directory / f"{receipts}.new").write_bytes(b"half an en")
    holder.process.kill()
    assert json.loads(asker.communicate(timeout=DEADLINE_S)[0])["source"] == "computed"
    assert digest_of(directory, cache).source == "cache"
    assert [path.suffix for path in cache.directory.iterdir()] == [".json"]


def test_a_turn_inherited_in_line_keeps_later_ones_waiting(
    settled: Callable[[], Path], cache: DigestCache, hold: Callable[[Path, str], Holder]
) -> None:
    """The first holder clears its lock file away; who waited behind it must not be left with a file without a name."""
    directory = settled()
    assert cache.directory is not None
    first = hold(cache.directory, receipts_of(directory).sha256)
    first.await_turn()
    second = hold(cache.directory, receipts_of(directory).sha256)
    wait_until_in_line(second.process.pid)
    first.let_go()
    second.await_turn()
    command = [*COMMAND, str(directory), "--json", "--cache-dir", str(cache.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as asker:
        wait_until_in_line(asker.pid)
        second.let_go()
        assert json.loads(asker.communicate(timeout=DEADLINE_S)[0])["remembered"]


def test_a_lock_is_nobody_elses_to_hold(
    settled: Callable[[], Path], cache: DigestCache, hold: Callable[[Path, str], Holder]
) -> None:
    assert cache.directory is not None
    hold(cache.directory, receipts_of(settled()).sha256).await_turn()
    (lock,) = cache.directory.iterdir()
    assert lock.stat().st_mode & 0o777 == 0o600


# Changes


def test_a_file_that_changes_while_it_is_read_is_an_error(settled: Callable[[], Path], cache: DigestCache) -> None:
    directory = settled()

    def edit(done: int) -> None:
        with open(directory / "model-2.safetensors", "r+b") as file:
            file.write(b"t")

    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointChanged, match=r"model-2\.safetensors"):
        digest_of(directory, cache, progress=edit)
    assert len(os.listdir("/proc/self/fd")) == fds
    assert cache.directory is not None
    assert list(cache.directory.iterdir()) == []


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_signal(tmp_path: Path, cache: DigestCache) -> None:
    directory = make(tmp_path / "model", {"model.safetensors": bytes(9 << 20)})
    with pytest.raises(CheckpointChanged, match="nbytes"):
        digest_of(directory, cache, progress=lambda done: os.truncate(directory / "model.safetensors", 5 << 20))


def test_a_digest_can_be_tied_to_files_seen_before(settled: Callable[[], Path], cache: DigestCache) -> None:
    directory = settled()
    seen = receipts_of(directory).sha256
    assert digest_of(directory, cache, expect_receipts=seen).source == "computed"
    (directory / "model-2.safetensors").chmod(0o600)
    with pytest.raises(CheckpointChanged):
        digest_of(directory, cache, expect_receipts=seen)


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    directory = make(tmp_path / "model", {"model.safetensors": bytes(9 << 20)})
    told: list[int] = []
    with open_weights(weight_files(directory)) as weights:
        content_digest(weights, progress=told.append)
    assert told == [4 << 20, 8 << 20, 9 << 20]


# The sidecar


def without_weights(directory: Path, place: Path) -> Path:
    """What a container sees that mounts only ``config.json`` and the sidecar."""
    place.mkdir()
    for name in ("config.json", SIDECAR_NAME):
        shutil.copy(directory / name, place / name)
    return place


def write(directory: Path, cache: DigestCache) -> int:
    return main([str(directory), "--json", "--write-sidecar", "--cache-dir", str(cache.directory)])


def test_a_sidecar_counts_while_its_receipts_match(
    settled: Callable[[], Path], cache: DigestCache, tmp_path: Path
) -> None:
    directory = settled()
    assert write(directory, cache) == 0
    elsewhere = DigestCache(tmp_path / "empty")
    believed = digest_of(directory, elsewhere)
    assert (believed.source, believed.hex, believed.settled) == ("sidecar", digest_by_hand(directory), True)
    data = (directory / "model-2.safetensors").read_bytes()
    (directory / "model-2.safetensors").write_bytes(data[::-1])
    changed = digest_of(directory, elsewhere)
    assert (changed.source, changed.hex) == ("computed", digest_by_hand(directory))
    assert changed.hex != believed.hex


def test_a_sidecar_speaks_for_weights_that_cannot_be_seen(tmp_path: Path, cache: DigestCache) -> None:
    directory = checkpoint(tmp_path / "model")
    assert write(directory, cache) == 0
    place = without_weights(directory, tmp_path / "container")
    (place / INDEX_NAME).write_bytes((directory / INDEX_NAME).read_bytes())
    digest = digest_of(place, cache)
    assert (digest.source, digest.receipts, digest.hex) == ("sidecar", None, digest_by_hand(directory))
    assert digest.nbytes == receipts_of(directory).nbytes
    assert write(place, cache) == 1, "there is nothing to state a digest of"


def test_a_sidecar_of_files_just_written_carries_no_receipts(tmp_path: Path, cache: DigestCache) -> None:
    directory = checkpoint(tmp_path / "model")
    assert write(directory, cache) == 0
    sidecar = read_sidecar(directory)
    assert sidecar is not None
    assert sidecar.receipts is None
    assert digest_of(directory, cache).source == "computed"


def test_without_weights_and_sidecar_there_is_no_digest(tmp_path: Path, cache: DigestCache) -> None:
    with pytest.raises(MissingShard):
        digest_of(make(tmp_path / "model", {"config.json": b"{}"}), cache)


GOOD_SIDECAR = {"schema": 1, "digest": "a" * 64, "receipts": None, "nbytes": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 60_000,
        json.dumps({**GOOD_SIDECAR, "schema": 2}),
        json.dumps({**GOOD_SIDECAR, "more": 1}),
        json.dumps({**GOOD_SIDECAR, "digest": "A" * 64}),
        json.dumps({**GOOD_SIDECAR, "digest": None}),
        json.dumps({**GOOD_SIDECAR, "receipts": "b"}),
        json.dumps({**GOOD_SIDECAR, "nbytes": True}),
        json.dumps({**GOOD_SIDECAR, "nbytes": -1}),
    ],
    ids=lambda text: text[:90],
)
def test_a_sidecar_that_is_not_ours_is_a_warning_beside_weights_and_an_error_without(
    settled: Callable[[], Path], cache: DigestCache, tmp_path: Path, text: str
) -> None:
    directory = settled()
    (directory / SIDECAR_NAME).write_text(text)
    digest = digest_of(directory, cache)
    assert digest.source == "computed"
    assert [SIDECAR_NAME in warning for warning in digest.warnings] == [True]
    with pytest.raises(CheckpointError) as caught:
        digest_of(without_weights(directory, tmp_path / "container"), cache)
    assert caught.value.where == tmp_path / "container" / SIDECAR_NAME


@pytest.mark.parametrize("fault", ["writable by others", pytest.param("of somebody else", marks=pytest.mark.root)])
def test_a_sidecar_that_others_could_have_written_proves_nothing_about_files_that_can_be_read(
    settled: Callable[[], Path], cache: DigestCache, tmp_path: Path, fault: str
) -> None:
    """Its receipts match: whoever owns the directory knows them. A daemon would vouch for a digest that is not its
    weights' own.
    """
    directory = settled()
    stated = Sidecar("a" * 64, receipts_of(directory).sha256, 1)
    path = write_sidecar(directory, stated)
    assert digest_of(directory, DigestCache(tmp_path / "other")).hex == stated.digest
    if fault == "of somebody else":
        os.chown(path, 65534, 65534)
    else:
        path.chmod(0o664)
    digest = digest_of(directory, cache)
    assert (digest.source, digest.hex) == ("computed", digest_by_hand(directory))
    assert "others could have written it" in digest.warnings[0]
    # Where there are no weights it says what is wanted, which is nobody else's business.
    assert digest_of(without_weights(directory, tmp_path / "container"), cache).hex == stated.digest


@pytest.mark.parametrize("kind", ["hard link", "link", "FIFO", "file"])
def test_what_is_planted_where_a_sidecar_is_written_aside_is_not_written_to(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("somebody's")
    directory = tmp_path / "model"
    directory.mkdir()
    aside = directory / f".{SIDECAR_NAME}.{os.getpid()}"
    plant: dict[str, Callable[[], object]] = {
        "hard link": lambda: os.link(victim, aside),
        "link": lambda: aside.symlink_to(victim),
        "FIFO": lambda: os.mkfifo(aside),
        "file": lambda: aside.write_text("planted"),
    }
    plant[kind]()
    sidecar = Sidecar("a" * 64, None, 1)
    write_sidecar(directory, sidecar)
    assert read_sidecar(directory) == sidecar
    assert victim.read_text() == "somebody's"
    assert [path.name for path in directory.iterdir()] == [SIDECAR_NAME]


def test_a_sidecar_comes_back_as_it_was_written(tmp_path: Path) -> None:
    for sidecar in (Sidecar("a" * 64, "b" * 64, 0), Sidecar("c" * 64, None, 1 << 50)):
        assert write_sidecar(tmp_path, sidecar) == tmp_path / SIDECAR_NAME
        assert read_sidecar(tmp_path) == sidecar
    assert [path.name for path in tmp_path.iterdir()] == [SIDECAR_NAME]


# The command


def test_the_command_prints_one_line(
    settled: Callable[[], Path], cache: DigestCache, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = settled()
    options = [str(directory), "--cache-dir", str(cache.directory)]
    assert main(options) == 0
    assert capsys.readouterr() == (f"{digest_by_hand(directory)}  {directory}\n", "")
    receipts = receipts_of(directory)
    assert main([*options, "--json", "--expect-receipts", receipts.sha256]) == 0
    output = capsys.readouterr()
    assert output.out.count("\n") == 1
    answer = json.loads(output.out)
    assert answer.pop("seconds") >= 0
    assert answer == {
        "digest": digest_by_hand(directory),
        "path": str(directory),
        "receipts": receipts.sha256,
        "rule": receipts.rule,
        "settled": True,
        "source": "cache",
        "nbytes": receipts.nbytes,
        "remembered": True,
        "sidecar": None,
        "warnings": [],
    }


def test_the_commands_exit_codes(
    settled: Callable[[], Path], cache: DigestCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = settled(), make(tmp_path / "bad", {"model.bin": b""})
    options = ["--json", "--cache-dir", str(cache.directory)]
    results = []
    for more in (
        [str(good)],
        [str(bad)],
        [str(good), "--trust-filesystem", "unheard-of"],
        [str(tmp_path / "absent")],
        [str(good), "--expect-receipts", "0" * 64],
    ):
        status = main([*more, *options])
        answer = json.loads(capsys.readouterr().out)
        results.append((status, answer["error"]["code"] if "error" in answer else None))
    assert results == [
        (0, None),
        (1, "pickle_refused"),
        (64, "invalid_option"),
        (64, "invalid_option"),
        (3, "checkpoint_changed"),
    ]
    assert main([str(bad)]) == 1
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="64"):
        main([str(good), "--expect-receipts", "short"])


def test_the_command_ends_with_its_parent(
    settled: Callable[[], Path], cache: DigestCache, hold: Callable[[Path, str], Holder]
) -> None:
    directory = settled()
    assert cache.directory is not None
    hold(cache.directory, receipts_of(directory).sha256).await_turn()
    program = """
import os, subprocess, sys
child = subprocess.Popen([*sys.argv[1:], "--low-priority", "--die-with-parent", str(os.getpid())])
print(child.pid, flush=True)
child.wait()
"""
    command = [sys.executable, "-c", program, *COMMAND, str(directory), "--cache-dir", str(cache.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = os.pidfd_open(pid)
        try:
            wait_until_in_line(pid)
            parent.send_signal(signal.SIGKILL)
            assert select.select([child], [], [], DEADLINE_S)[0] == [child]
        finally:
            os.close(child)
