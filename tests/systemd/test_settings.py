"""One instance with settings of its own: a store that is too small, options that cannot be used, who is served, and the
end of it all by `weightcached release`.
"""

import sys

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import digest_of
from tests.systemd.box import Box, missing
from tests.systemd.services import Service, attach_in_box

pytestmark = [pytest.mark.root, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

MODEL = "/srv/small"


@pytest.fixture(scope="module")
def small(box: Box) -> Service:
    """An instance that is no rank's number: its file says which rank, and a name that tells it apart."""
    tiny_llama(box.path(MODEL))
    settings = ("MODEL=" + MODEL, "TP_SIZE=1", "TP_RANK=0", "OPTIONS=--layout fused --name small")
    box.write("/etc/weightcached/small.env", "".join(f"WEIGHTCACHED_{each}\n" for each in settings))
    return Service(box, "small", MODEL, digest_of(box.path(MODEL)), name="small")


def test_a_store_that_is_too_small_is_said_and_weights_are_served(small: Service) -> None:
    with small.overridden("FileDescriptorStoreMax=3"):
        small.systemctl("start")
        report = small.report()
        assert (report.state, report.vault) == ("ready", "dropped")
        assert report.vault_reason is not None
        assert "raise FileDescriptorStoreMax=" in report.vault_reason
        assert "vault: dropped" in small.show("StatusText")
        assert small.show("NFileDescriptorStore") == "2", (
            "the listener and the state; nothing is left of half a generation"
        )
        first = small.attach(small.hello())
        small.kill()
        second = small.attach(small.hello(), other_than=first.nonce)
        assert second.generation != first.generation
    small.systemctl("restart")
    report = small.report()
    assert (report.state, report.vault) == ("ready", "kept")


def test_engines_of_the_group_are_served_and_others_are_not(small: Service) -> None:
    small.systemctl("start")
    generation = small.report().generation
    assert attach_in_box(small, user="nobody", group="weightcached") == f"daemon {generation}"
    assert attach_in_box(small, user="nobody", group="nogroup").startswith("UntrustedClient: ")


def test_released_is_not_started_again_and_engines_load_from_disk(small: Service) -> None:
    small.systemctl("start")
    release = (f"{sys.prefix}/bin/weightcached", "release", "--name", "small", "--allow-uid", "weightcached")
    done = small.box.run(*release)
    assert "small/host-tp0of1: gave up 1 generation," in done.stdout
    small.systemctl("stop")  # a start that was under way would show as a failure to stop, or as another result
    assert (small.show("ActiveState"), small.show("Result"), small.show("NRestarts")) == ("inactive", "success", "0")
    assert small.show("NFileDescriptorStore") == "0"
    assert not small.place.socket_path.exists()
    assert attach_in_box(small).startswith("disk ")
    small.systemctl("start")
    small.systemctl("stop")
    assert small.place.socket_path.is_socket()
    assert "removed the socket file" in small.box.run(*release).stdout
    assert not small.place.socket_path.exists()


def test_options_that_cannot_be_used_fail_once(small: Service) -> None:
    small.box.write("/etc/weightcached/odd.env", "WEIGHTCACHED_MODEL=/srv/small\nWEIGHTCACHED_OPTIONS=--nonsense\n")
    unit = "weightcached@odd.service"
    assert small.box.run("systemctl", "start", unit, ok=False).returncode != 0
    found = {key: small.box.show(unit, key) for key in ("ActiveState", "Result", "ExecMainStatus", "NRestarts")}
    assert found == {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "64", "NRestarts": "0"}
    assert "invalid int value: 'odd'" in small.box.log(unit) or "--nonsense" in small.box.log(unit)
