"""What is in `deploy/`, read by tests."""

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def alerts() -> list[dict[str, Any]]:
    """The alerting rules."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "weightcached.json").read_text())
    return found


def queries() -> list[str]:
    """Every query of the dashboard, its variables replaced as Grafana would."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    for variable, text in (("$__rate_interval", "1m"), ("$instance", ".*"), ("$place", ".*")):
        found = [query.replace(variable, text) for query in found]
    return found
