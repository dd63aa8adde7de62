"""Running a program among mounts of its own, which the kernel clears away when it ends. Needs root and util-linux."""

import json
import subprocess
import sys
from pathlib import Path


def in_mount_namespace(setup: str, program: str, cwd: Path) -> object:
    """Runs shell lines, then Python source where they end; returns the JSON document that it prints."""
    script = f'set -e\n{setup}\nexec "$@"'
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
