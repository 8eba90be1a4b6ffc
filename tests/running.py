"""Run a notebook through papermill, as a user does, from the repository's root or from ``notebooks/``."""

import os
import subprocess
import sys
from pathlib import Path

from ruitong_lib.paths import NOTEBOOKS, ROOT


def papermill(
    name: str, output: Path | str, *given: str, cwd: Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``name`` with papermill's own arguments ``given`` and further environment variables."""
    source = NOTEBOOKS / f"{name}.ipynb"
    path = source.relative_to(ROOT) if cwd == ROOT else source.name
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", str(path), str(output), *given]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **env}
    )
