"""What is in `deploy/`, looked at by its own tools: hadolint, Docker Compose, Kubernetes' schemas, promtool.

Grafana has none that could be had: the dashboard's form is checked here, its queries by promtool.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deployed import DEPLOY, ROOT, alerts, dashboard, queries

HERE = Path(__file__).parent
KUBERNETES_VERSIONS = ("1.27.0", "1.37.0")
"""The oldest and the newest that the manifests are checked against."""


def tool(name: str, why_not: str) -> str:
    """The tool's path; skips where it is not installed."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed: {why_not}")
    return found


def run(*command: object, **environment: str) -> str:
    """Its output; an AssertionError with all it said when it fails."""
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def promtool() -> str:
    return tool("promtool", "make promtool")


def test_the_dockerfile() -> None:
    run(tool("hadolint", "no wheel for this machine"), "--failure-threshold", "info", DEPLOY / "Dockerfile")


def test_the_image_is_built_from_every_package_and_from_little_else() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in lines
    taken = {line[1:] for line in lines if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = {folder.split("/")[0] for folder in project["tool"]["setuptools"]["package-dir"].values()}
    assert taken == {*rooms, "pyproject.toml", "README.md", "LICENSE"}


def composed(**environment: str) -> dict[str, Any]:
    """The compose file, as Docker Compose reads it."""
    compose = tool("docker-compose", "no wheel for this machine")
    config: dict[str, Any] = json.loads(
        run(compose, "-f", DEPLOY / "docker-compose.yml", "config", "--format", "json", **environment)
    )
    return config


def test_the_compose_file() -> None:
    services = composed(MODELS="/srv/models", MODEL="a")["services"]
    assert set(services) == {"weights", "engine"}
    shared = [{one["source"] for one in services[name]["volumes"] if one["type"] == "volume"} for name in services]
    assert "runtime" in shared[0] & shared[1]
    assert "--weight-cache-mode=require" in services["engine"]["command"]


def test_the_compose_file_does_not_guess_a_model() -> None:
    with pytest.raises(AssertionError, match="MODEL"):
        composed(MODELS="/srv/models", MODEL="")


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_the_manifests(version: str) -> None:
    validate = tool("kubernetes-validate", "pip install kubernetes-validate")
    run(validate, "--strict", "--kubernetes-version", version, *sorted((DEPLOY / "kubernetes").iterdir()))


def documents() -> Iterator[dict[str, Any]]:
    for path in sorted((DEPLOY / "kubernetes").iterdir()):
        yield from yaml.safe_load_all(path.read_text())


def test_daemon_and_engine_share_directory_user_and_node() -> None:
    by_kind = {one["kind"]: one for one in documents()}
    daemon, engine = (by_kind[kind]["spec"]["template"]["spec"] for kind in ("DaemonSet", "Deployment"))
    assert daemon["securityContext"] == engine["securityContext"]
    assert daemon["nodeSelector"] == engine["nodeSelector"]
    volumes = [[one for one in pod["volumes"] if "hostPath" in one] for pod in (daemon, engine)]
    paths = [{one["name"]: one["hostPath"]["path"] for one in some} for some in volumes]
    assert paths[0] == paths[1] != {}
    assert "livenessProbe" not in daemon["containers"][0], "a container that is killed loses its vault"


def test_prometheus_reads_the_configuration(promtool: str) -> None:
    run(promtool, "check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    run(promtool, "check", "rules", "--lint=all", "--lint-fatal", DEPLOY / "prometheus" / "alerts.yml")


def test_prometheus_reads_the_job_for_a_cluster(promtool: str, tmp_path: Path) -> None:
    """Debian's promtool knows no discovery in clusters: everything else of the job is checked."""
    job = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())
    [discovery] = [scrape.pop("kubernetes_sd_configs") for scrape in job["scrape_configs"]]
    assert discovery == [{"role": "pod", "namespaces": {"names": ["weightcached"]}}]
    (tmp_path / "job.yml").write_text(yaml.safe_dump(job))
    run(promtool, "check", "config", tmp_path / "job.yml")


def test_every_alert_fires_when_it_should_and_not_else(promtool: str) -> None:
    run(promtool, "test", "rules", HERE / "alerts_test.yml")
    tested = (HERE / "alerts_test.yml").read_text()
    assert [rule["alert"] for rule in alerts() if tested.count(rule["alert"]) < 2] == []


def test_prometheus_reads_every_query_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries())]
    assert len(rules) > 20
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(promtool, "check", "rules", tmp_path / "rules.yml")


def test_the_dashboard_is_well_formed() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert taken.setdefault(cell, panel["title"]) == panel["title"], "two panels in one place"
    shown = [panel for panel in panels if panel["type"] != "row"]
    assert all(panel["description"] and panel["targets"] for panel in shown)
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert variables == {"datasource", "instance", "place"}
