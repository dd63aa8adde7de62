"""Alerts and dashboard ask for metrics, labels and values that there are: compared with what an exporter says."""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.daemons import Log
from tests.support.deployed import alerts, queries
from tests.support.reports import READY, samples
from tests.support.scraping import Site
from tests.support.unprivileged import ROOT
from weightcached.daemon.mapped import Mapped
from weightcached.daemon.metrics import render
from weightcached.daemon.seen import Seen
from weightcached.protocol.errors import DaemonUnreachable
from weightcached.protocol.places import Place

SCRAPED = {"instance", "job"}
"""Labels that the scraper adds."""
SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """Every name that a running exporter's /metrics can have."""
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name:
        arguments = ("exporter", "--listen", "127.0.0.1:0", "--runtime-dir", name, "--log-format", "json")
        process = subprocess.Popen(
            [sys.executable, "-m", "weightcached.daemon", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        log = Log(process.stderr)
        try:
            address = json.loads(log.wait_for(lambda line: '"listening"' in line))["address"]
            page = Site(address).ask("/metrics").text
        finally:
            process.terminate()
            process.wait()
            log.join()
    found = re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE)
    return {name + suffix for name, kind in found for suffix in SUFFIXES[kind]}


@pytest.fixture(scope="module")
def values() -> dict[str, dict[str, set[str]]]:
    """Metric → label → values, of a daemon with something in every field, one that is gone, and a host's processes."""
    here, gone = (Place(Path("/run/weightcached"), "default", device) for device in ("host-tp0of1", "host-tp1of2"))
    page = render([Seen(here, report=READY), Seen(gone, problem=DaemonUnreachable("gone"))], Mapped())
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, labels in samples(page.decode()):
        for label, value in labels:
            found[name][label].add(value)
    return found


@pytest.mark.parametrize("query", [*(rule["expr"] for rule in alerts()), *queries()])
def test_a_query_names_what_there_is(query: str, exposed: set[str], values: dict[str, dict[str, set[str]]]) -> None:
    names = set(re.findall(r"\bweightcached_\w+", query))
    assert names <= exposed
    assert names or re.match(r"up\{", query)
    for name, selector in re.findall(r"\b(weightcached_\w+)\{([^}]*)\}", query):
        for label, operator, wanted in re.findall(r'(\w+)(=~|=)"([^"]*)"', selector):
            if label in SCRAPED:
                continue
            assert label in values[name], f"{name} has no label {label}"
            if operator == "=" or "|" in wanted:
                assert set(wanted.split("|")) <= values[name][label], f"{name}: no {label} has this value"
    grouped = {
        label.strip() for inner in re.findall(r"\b(?:by|without) \(([^)]*)\)", query) for label in inner.split(",")
    }
    assert grouped <= SCRAPED | {"le"} | {label for name in names for label in values[name]}
