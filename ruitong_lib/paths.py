"""Where the workbench keeps its files: the same from the repo root, ``notebooks/``, papermill and JupyterLab.

``RUITONG_OUTPUTS`` moves everything that is generated; ``RUITONG_CACHE`` moves the unpacked embedded model.
"""

import os
from pathlib import Path

import platformdirs

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PARAMS = ROOT / "params"
PROMPTS = PARAMS / "prompts"


def outputs(folder: str = "") -> Path:
    """Return the folder for generated files, an absolute path.

    Parameters
    ----------
    folder
        Where to write; empty for ``RUITONG_OUTPUTS``, and ``outputs/`` of the repository without that.
        A relative folder is taken from the current directory.
    """
    return Path(folder or os.environ.get("RUITONG_OUTPUTS") or ROOT / "outputs").resolve()


def cache() -> Path:
    """Return the user's cache folder for what can be made again (``RUITONG_CACHE`` moves it)."""
    return Path(os.environ.get("RUITONG_CACHE") or platformdirs.user_cache_path("ruitong"))


def found(path: str) -> Path:
    """Return a path that a user gave: from the current directory, else from the repository's root.

    A notebook's current directory is its own folder in JupyterLab and the shell's under papermill, so
    ``params/demo.yml`` has to mean the same in both.
    """
    here = Path(path)
    return here if here.exists() or here.is_absolute() or not (ROOT / path).exists() else ROOT / path
