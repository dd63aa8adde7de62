"""The example engine as it is shipped, on the real engine: it waits for its keeper, and does not notice its death."""

import pytest

from tests.support.daemons import digest_of
from tests.systemd.box import Box, missing
from tests.systemd.services import Service, looping
from weightcached.client.demo.checkpoint import make_checkpoint
from weightcached.client.engine.options import DEFAULT_PORT

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

EXAMPLE = "weightcached-engine-example.service"
MODEL = "/srv/demo"
KILLS = 3


def test_the_example_generates_the_same_tokens_while_its_keeper_dies(box: Box) -> None:
    make_checkpoint(box.path(MODEL), nbytes=20_000_000)
    box.write(
        "/etc/weightcached/demo.env",
        f"WEIGHTCACHED_MODEL={MODEL}\nWEIGHTCACHED_TP_SIZE=1\nWEIGHTCACHED_TP_RANK=0\nWEIGHTCACHED_OPTIONS=\n",
    )
    # Another model than that of the other tests, with an instance of its own.
    text = "[Unit]\nWants=weightcached@demo.service\n[Service]\nEnvironmentFile=/etc/weightcached/demo.env\n"
    box.write(f"/run/systemd/system/{EXAMPLE}.d/demo.conf", text)
    box.run("systemctl", "daemon-reload")
    keeper = Service(box, "demo", MODEL, digest_of(box.path(MODEL)), layout="hf")
    try:
        with box.started("journalctl", "-f", "-n", "all", "-o", "cat", "-u", EXAMPLE) as journal:
            box.run("systemctl", "start", EXAMPLE)  # which starts the keeper, and returns when it is ready
            journal.log.wait_for(lambda line: f"http://127.0.0.1:{DEFAULT_PORT}" in line)
        assert [lease.name for lease in keeper.report().leases] == ["weightcached-engine"]
        pid, hello = box.show(EXAMPLE, "MainPID"), keeper.hello()
        nonce = keeper.attach(hello).nonce
        with looping(box, "generate_loop.py", DEFAULT_PORT) as loop:
            for _ in range(KILLS):
                keeper.kill()
                nonce = keeper.attach(hello, other_than=nonce).nonce
                loop.await_more(1)
        answers = [each["token_ids"] for each in loop.done]
        assert len(answers) > KILLS
        assert all(answer == answers[0] for answer in answers)
        assert len(answers[0]) == 16
        assert box.show(EXAMPLE, "MainPID") == pid
    finally:
        box.run("systemctl", "stop", EXAMPLE, keeper.unit)
