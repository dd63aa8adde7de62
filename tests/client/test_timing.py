import os
import subprocess
import sys
import time

import pytest

from weightcached.client.timing import Stages, process_age_s


def test_a_process_knows_its_age() -> None:
    program = "import time; from weightcached.client.timing import process_age_s as a; print(a(), time.time())"
    before = time.time()
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    age, at = map(float, said)
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert 0 < age <= at - before + 2 * tick


def test_stages_add_up_in_order() -> None:
    stages = Stages(already_s=1.0)
    for name in ("imports", "weights", "imports"):
        with stages.stage(name):
            time.sleep(0.01)
    assert list(stages.seconds) == ["python", "imports", "weights"]
    assert stages.seconds["python"] == 1.0
    assert stages.seconds["imports"] >= 0.02
    assert stages.total_s >= sum(stages.seconds.values())
    assert stages.as_fields()["total"] == pytest.approx(stages.total_s, abs=1e-5)


def test_a_stage_that_fails_is_counted() -> None:
    stages = Stages()
    with pytest.raises(ValueError, match="broken"), stages.stage("weights"):
        raise ValueError("broken")
    assert stages.seconds["weights"] > 0


def test_the_table_adds_up_to_its_total() -> None:
    stages = Stages(already_s=0.5)
    now = time.monotonic()
    stages.record("weights", began_at_s=now, ended_at_s=now + 2.0)
    stages.note("weights", "from the daemon")
    lines = stages.table().splitlines()
    rows = {line[: lines[0].index("seconds")].strip(): line for line in lines}
    numbers = {name: float(line[len(lines[0]) - 7 :].split()[0]) for name, line in rows.items() if name != "stage"}
    assert rows["weights"].endswith("from the daemon")
    assert numbers["total"] == pytest.approx(sum(numbers.values()) - numbers["total"], abs=0.005)


def test_this_process_is_older_than_nothing() -> None:
    assert process_age_s() > 0
