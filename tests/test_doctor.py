"""ruitong doctor: what a person reads, and what a program reads."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from ruitong_lib import doctor, provenance
from ruitong_lib.collect import devices

RUITONG = [sys.executable, "-m", "ruitong_lib.cli"]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    done = subprocess.run([*RUITONG, "doctor", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_names_the_hardware_and_the_versions(document: dict[str, Any]) -> None:
    assert document["packages"]["torch"] == torch.__version__
    assert {"transformers", "xarray", "ruitong"} <= set(document["packages"])
    assert document["python"] == ".".join(map(str, sys.version_info[:3]))
    assert document["hardware"]
    assert [d["device"] for d in document["devices"]] == ["cpu", "npu", "cuda", "rocm", "xpu", "mps"]
    assert {"git", "system", "environment", "missing", "findings"} <= set(document)


def test_json_names_the_cpus_isa_and_threads(document: dict[str, Any]) -> None:
    cpu = document["devices"][0]
    assert cpu["status"] == "ok"
    assert cpu["label"] == devices.cpu_label()
    assert cpu["isa"] == devices.cpu_facts()["isa"]
    assert cpu["cores"] >= cpu["threads"] >= 1
    assert cpu["torch_kernels"] == torch.backends.cpu.get_cpu_capability()


def test_json_says_what_to_do_about_a_device_that_is_not_here(document: dict[str, Any]) -> None:
    for d in document["devices"]:
        assert (d["status"] == "ok") == ("do" not in d)
        if d["status"] == "absent":
            assert d["device"] in d["do"]


def test_text_is_one_line_a_finding_and_its_advice() -> None:
    done = subprocess.run([*RUITONG, "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert all(line.startswith(("ok", "absent", "missing", "note", "         → ")) for line in lines)
    assert all(line == line.rstrip() for line in lines)
    (cpu,) = [line for line in lines if line.startswith("ok       cpu ")]
    assert "threads; ISA " in cpu
    assert all(isa in cpu for isa in devices.cpu_facts()["isa"])


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    version = provenance.version
    monkeypatch.setattr(provenance, "version", lambda p: "" if p == "torchao" else version(p))
    found = doctor.report(doctor.examine())
    assert {"what": "torchao", "do": "make venv, or pip install -e .", "needed": True} in found["missing"]
    json.dumps(found, allow_nan=False)


def test_an_accelerator_names_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"kind": "cuda", "name": "NVIDIA H200", "properties": {"total_memory": 150 * 10**9}, "driver": {}}
    true = devices.resolve
    monkeypatch.setattr(devices, "resolve", lambda kind: torch.device("cuda:0") if kind == "cuda" else true(kind))
    monkeypatch.setattr(devices, "driver", lambda device: card)
    found = doctor.report(doctor.examine())
    assert found["hardware"] == "NVIDIA H200 (141 GB)"
    cuda = next(d for d in found["devices"] if d["device"] == "cuda")
    assert cuda == {"device": "cuda", "status": "ok", "label": "NVIDIA H200 (141 GB)", **card}


def test_a_backend_that_breaks_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    true = devices.resolve

    def resolve(kind: str) -> torch.device:
        if kind == "xpu":
            raise OSError("libsycl.so.8: cannot open shared object file")
        return true(kind)

    monkeypatch.setattr(devices, "resolve", resolve)
    found = {f.what: f for f in doctor.examine()}
    assert found["xpu"].do == "OSError: libsycl.so.8: cannot open shared object file"
    assert found["mps"].status in {"absent", "ok"}
