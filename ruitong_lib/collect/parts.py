"""Part files of a long replay: a killed run goes on with the batch after the last one that was kept.

A part holds the finished batches since the part before. One is written only when ``SECONDS`` have passed, so a cell
that takes less leaves none, and a killed one loses no more than that. They lie in a folder beside the shard and go when
the shard is there.
"""

import os
import shutil
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 30.0  # of work that a killed run may lose


def folder_of(shard: Path) -> Path:
    """Return where the parts of a shard lie: ``.<label>.parts`` beside it."""
    return shard.with_name(f".{shard.stem}.parts")


def remove(folder: Path) -> None:
    """Remove the parts of a shard that is there, or that is to be collected anew."""
    shutil.rmtree(folder, ignore_errors=True)


class Parts:
    """The batches of one replay that are done.

    Parameters
    ----------
    folder
        See :func:`folder_of`.
    signature
        Hash of everything that the numbers depend on; a part with another one is not read.
    """

    def __init__(self, folder: Path, signature: str) -> None:
        """Read nothing yet."""
        self.folder, self.signature = folder, signature
        self.waiting: list[int] = []
        self.written = time.monotonic()

    def restore(self, out: Mapping[str, Any]) -> set[int]:
        """Fill ``out`` (name → array or tensor on the CPU, dims (prompt, …)) from the parts; return the prompts done.

        A part that is broken or belongs to something else counts as not there.
        """
        done: set[int] = set()
        for path in sorted(self.folder.glob("*.npz")):
            try:
                with np.load(path, allow_pickle=False) as part:
                    if part["signature"].item() != self.signature:
                        continue
                    rows = part["rows"]
                    arrays = {name: part[name] for name in out}
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                continue
            for name, array in arrays.items():
                np.asarray(out[name])[rows] = array
            done |= set(rows.tolist())
        return done

    def add(self, rows: list[int], out: Mapping[str, Any]) -> None:
        """Take a finished batch; write a part when the last one is ``SECONDS`` old."""
        self.waiting += rows
        if time.monotonic() - self.written < SECONDS:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{min(self.waiting):06d}.npz"
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            arrays: dict[str, Any] = {name: np.asarray(x)[self.waiting] for name, x in out.items()}
            np.savez(file, **arrays, signature=self.signature, rows=np.array(self.waiting))
        os.replace(temporary, path)
        self.waiting, self.written = [], time.monotonic()
