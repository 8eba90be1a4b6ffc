"""Devices and their switches: drivers are faked here, one per vendor, as their own Python modules answer."""

import contextlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from ruitong_lib import RuitongError, provenance, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import devices, switches
from ruitong_lib.collect.transformers import collect

GIB = 2**30
CPU = torch.device("cpu")


def card(name: str, gib: float = 0, /, **fields: Any) -> types.SimpleNamespace:
    """A driver's properties; ``gib`` 0 leaves the memory out, as some backends do."""
    more = {"total_memory": int(gib * GIB)} if gib else {}
    return types.SimpleNamespace(name=name, **more, **fields)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a fake driver behind a torch device type."""

    def use(kind: str, properties: Any, **functions: Any) -> Any:
        found = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: properties.name,
            **functions,
        }
        module = types.SimpleNamespace(**{n: f for n, f in found.items() if f is not None})
        true = torch.get_device_module

        def get_device_module(device: Any = None) -> Any:
            asked = getattr(device, "type", None) or str(device).partition(":")[0]
            return module if asked == kind else true(device)

        monkeypatch.setattr(torch, "get_device_module", get_device_module)
        # torch knows the word npu only once torch_npu is loaded
        return types.SimpleNamespace(type="npu", index=0) if kind == "npu" else torch.device(kind, 0)

    return use


A100_40 = card(
    "NVIDIA A100-SXM4-40GB", 39.39, major=8, minor=0, multi_processor_count=108, uuid="GPU-1", gcnArchName=""
)
A100_PCIE = card("NVIDIA A100-PCIE-40GB", 39.59, major=8, minor=0)
A100_80 = card("NVIDIA A100-SXM4-80GB", 79.14, major=8, minor=0)


class TestLabel:
    @pytest.mark.parametrize(
        ("kind", "properties", "expected"),
        [
            ("cuda", A100_40, "NVIDIA A100-SXM4-40GB (40 GB, sm_80)"),
            ("cuda", A100_PCIE, "NVIDIA A100-PCIE-40GB (40 GB, sm_80)"),
            ("cuda", A100_80, "NVIDIA A100-SXM4-80GB (80 GB, sm_80)"),
            ("cuda", card("NVIDIA A100", 39.39, major=8, minor=0), "NVIDIA A100 (40 GB, sm_80)"),
            ("cuda", card("NVIDIA A100", 79.32, major=8, minor=0), "NVIDIA A100 (80 GB, sm_80)"),
            ("cuda", card("NVIDIA H100 80GB HBM3", 79.65, major=9, minor=0), "NVIDIA H100 80GB HBM3 (80 GB, sm_90)"),
            ("cuda", card("NVIDIA H200", 139.8, major=9, minor=0), "NVIDIA H200 (141 GB, sm_90)"),
            ("cuda", card("NVIDIA L40S", 44.4, major=8, minor=9), "NVIDIA L40S (48 GB, sm_89)"),
            ("cuda", card("NVIDIA Next", 1000.4, major=13, minor=1), "NVIDIA Next (1000 GB, sm_131)"),
            ("npu", card("Ascend910B1", 60.97), "Ascend910B1 (64 GB)"),
            ("npu", card("Ascend910B2", 61.28), "Ascend910B2 (64 GB)"),
            ("npu", card("Ascend910B3", 61.28), "Ascend910B3 (64 GB)"),
            ("npu", card("Ascend910B4", 29.6), "Ascend910B4 (32 GB)"),
            ("npu", card("Ascend910B4-1", 61.28), "Ascend910B4-1 (64 GB)"),
            # torch_npu fills the fields of other vendors' cards with None
            ("npu", card("Ascend910_9382", 61.3, major=None, gcnArchName=None), "Ascend910_9382 (910C, 64 GB)"),
            ("npu", card("Ascend910_9362", 61.3), "Ascend910_9362 (910C, 64 GB)"),
            ("npu", card("Ascend310P3", 43.24), "Ascend310P3 (48 GB)"),
            ("xpu", card("Intel(R) Data Center GPU Max 1550", 128), "Intel Data Center GPU Max 1550 (128 GB)"),
            ("npu", card("Ascend910B3"), "Ascend910B3"),  # no memory
            ("npu", card(" "), "npu"),  # torch_npu's name where the driver gives none
        ],
    )
    def test_tells_skus_apart(self, driver: Any, kind: str, properties: Any, expected: str) -> None:
        assert devices.label(driver(kind, properties)) == expected

    @pytest.mark.parametrize(
        ("properties", "expected"),
        [
            (
                card("AMD Instinct MI300X", 191.98, major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-"),
                "AMD Instinct MI300X (192 GB, gfx942)",
            ),
            (card("AMD Instinct MI308X", 191.7, gcnArchName="gfx942"), "AMD Instinct MI308X (192 GB, gfx942)"),
            (card("AMD Instinct MI350X", 287.9, gcnArchName="gfx950:sramecc+"), "AMD Instinct MI350X (288 GB, gfx950)"),
            (card("", 23.9, gcnArchName="gfx1100"), "gfx1100 (24 GB)"),  # some cards have no name
            (card("", 23.9), "rocm (24 GB)"),
        ],
    )
    def test_rocm(self, driver: Any, monkeypatch: pytest.MonkeyPatch, properties: Any, expected: str) -> None:
        monkeypatch.setattr(torch.version, "hip", "7.0")
        device = driver("cuda", properties)
        assert devices.label(device) == expected
        assert devices.kind_of(device) == "rocm"
        assert devices.kind_of(CPU) == "cpu"

    def test_mps(self, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        device = driver("mps", None, get_device_properties=None, get_device_name=None)
        monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2 Max")
        monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda: 38)
        assert devices.label(device) == "Apple M2 Max"
        assert devices.driver(device)["cores"] == 38

    def test_a_backend_that_says_nothing(self, driver: Any) -> None:
        assert devices.label(driver("npu", None, get_device_properties=None, get_device_name=None)) == "npu"

    def test_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = devices.cpu_facts()
        assert devices.hardware("cpu") == devices.label(CPU) == devices.cpu_label()
        assert facts["cores"] >= 1
        assert devices.cpu_label().startswith(facts["model"])
        texts = {
            "model name\t: Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz\nflags\t: fpu avx2 avx512f amx_bf16\n": (
                "Intel Xeon Platinum 8480+ (amx_bf16)"
            ),
            "model name : AMD EPYC 9654 96-Core Processor\nflags : avx512f avx512_bf16\n": (
                "AMD EPYC 9654 96-Core Processor (avx512_bf16)"
            ),
            "processor : 0\nFeatures : fp asimd sve\nCPU implementer : 0x48\nCPU part : 0xd01\n": (
                "aarch64 0x48/0xd01 (sve)"
            ),
        }
        monkeypatch.setattr(devices.platform, "processor", lambda: "aarch64")
        for text, label in texts.items():
            monkeypatch.setattr(Path, "read_text", lambda self, text=text, **k: text)
            monkeypatch.setattr(Path, "is_file", lambda self: True)
            assert devices.cpu_label() == label

    def test_the_drivers_answer_is_kept_whole_without_serial_numbers(self, driver: Any) -> None:
        class Broken(types.SimpleNamespace):
            @property
            def memory_clock_rate(self) -> int:
                raise RuntimeError("not supported")

        found = devices.driver(driver("cuda", Broken(**vars(A100_40), pci_bus_id=65, L2_cache_size=41943040, x=(1, 2))))
        assert found["kind"] == "cuda"
        assert found["name"] == "NVIDIA A100-SXM4-40GB"
        assert found["properties"]["L2_cache_size"] == 41943040
        assert found["properties"]["multi_processor_count"] == 108
        assert found["properties"]["x"] == "(1, 2)"
        assert not {"uuid", "pci_bus_id"} & set(found["properties"])
        json.dumps(found)

    @pytest.mark.parametrize(
        ("kind", "text", "version"),
        [
            (
                "cuda",
                "NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  Release Build\nGCC version 12.2.0",
                "580.65.06",
            ),
            ("rocm", "6.12.12\n", "6.12.12"),
        ],
    )
    def test_version_of_the_kernel_module(
        self, monkeypatch: pytest.MonkeyPatch, kind: str, text: str, version: str
    ) -> None:
        monkeypatch.setattr(Path, "is_file", lambda self: True)
        monkeypatch.setattr(Path, "read_text", lambda self, **k: text)
        assert devices._driver_version(kind) == {"kernel_module": version}


class TestResolve:
    def test_index(self, driver: Any) -> None:
        driver("cuda", A100_80)
        assert devices.resolve("cuda") == torch.device("cuda:0")
        assert devices.resolve("cuda:1") == torch.device("cuda:1")
        with pytest.raises(RuitongError, match=r"device 'cuda:2' is not here: cuda has 2 device\(s\), 0 to 1"):
            devices.resolve("cuda:2")

    def test_rocm_and_cuda_are_not_mixed_up(self, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        driver("cuda", A100_80)
        with pytest.raises(RuitongError, match="'rocm' needs a ROCm build of torch; this one is built for CUDA"):
            devices.resolve("rocm")
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert devices.resolve("rocm:1") == torch.device("cuda:1")
        with pytest.raises(RuitongError, match="'cuda' is here an AMD card: ask for 'rocm'"):
            devices.resolve("cuda")

    def test_auto(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not torch.accelerator.is_available():
            assert devices.resolve("auto") == CPU
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
        assert devices.resolve("auto") == torch.device("xpu:0")

    def test_what_is_missing_is_named(self, driver: Any) -> None:
        driver("npu", card("Ascend910B3"), is_available=lambda: False)
        with pytest.MonkeyPatch.context() as m:
            m.setattr(devices.importlib.util, "find_spec", lambda name: object())
            with pytest.raises(RuitongError, match=r"no device is visible\. Check npu-smi info"):
                devices.resolve("npu")
        with pytest.raises(RuitongError, match="needs torch_npu, which is not installed"):
            devices.resolve("npu")
        driver("xpu", card("Arc"), is_available=lambda: False)
        with pytest.raises(RuitongError, match=r"'xpu' is not here: torch .*Check xpu-smi"):
            devices.resolve("xpu")


class TestCheckPrecision:
    @pytest.mark.parametrize(
        ("kind", "properties", "functions", "precision", "message"),
        [
            # torch.cuda counts emulation unless told not to
            (
                "cuda",
                card("Tesla V100-SXM2-16GB", 15.77, major=7, minor=0),
                {"is_bf16_supported": lambda including_emulation=True: including_emulation},
                "bf16",
                "precision 'bf16' needs bf16, which the driver of Tesla V100-SXM2-16GB",
            ),
            ("npu", card("Ascend910A", 31), {"is_bf16_supported": lambda: False}, "bf16", "of Ascend910A"),
            (
                "npu",
                card("Ascend310P3", 43.2),
                {"is_bf16_supported": lambda: False},
                "w8a8",
                "would be emulated or cast",
            ),
            ("npu", card("Ascend910B3", 61), {}, "tf32", "a device that multiplies float32 in TF32"),
            ("cuda", card("Tesla V100", 16), {"is_tf32_supported": lambda: False}, "tf32", "which Tesla V100"),
            ("npu", card("Ascend910B3", 61), {}, "fp64", "run the oracle with -p device cpu"),
        ],
    )
    def test_refused_before_anything_is_loaded(
        self, driver: Any, kind: str, properties: Any, functions: Any, precision: str, message: str
    ) -> None:
        with pytest.raises(RuitongError, match=message):
            switches.check_precision(precision, driver(kind, properties, **functions))

    @pytest.mark.parametrize(
        ("kind", "functions", "precision"),
        [
            ("cuda", {"is_bf16_supported": lambda including_emulation=True: True}, "bf16"),
            ("cuda", {"is_tf32_supported": lambda: True}, "tf32"),
            ("npu", {"is_bf16_supported": lambda: True}, "bf16"),
            ("npu", {"is_bf16_supported": lambda: False}, "fp16"),
            ("xpu", {}, "bf16"),  # a driver that does not say
        ],
    )
    def test_allowed(self, driver: Any, kind: str, functions: Any, precision: str) -> None:
        switches.check_precision(precision, driver(kind, card("Some card", 64), **functions))

    def test_asks_about_the_device_and_not_about_the_current_one(self, driver: Any) -> None:
        asked: list[torch.device | None] = [None]

        @contextlib.contextmanager
        def current(device: torch.device) -> Any:
            asked.append(device)
            yield
            asked.append(None)

        driver("cuda", A100_80, device=current, is_tf32_supported=lambda: asked[-1] == torch.device("cuda:1"))
        switches.check_precision("tf32", torch.device("cuda:1"))
        assert len(asked) == 3

    def test_cpu(self, tiny_folder: Path) -> None:
        for precision in ("fp64", "fp32", "bf16", "fp16", "w8a8"):
            switches.check_precision(precision, CPU)
        with pytest.raises(RuitongError, match="precision 'tf32' needs"):
            collect(Cell(model="/nowhere", prompts="core-4", scoring="both", precision="tf32"))


def float32_state() -> dict[str, Any]:
    return provenance.torch_flags()["float32_precision"] | {"old": torch.get_float32_matmul_precision()}


class TestMatmulPrecision:
    @pytest.mark.parametrize("user", ["highest", "high", "medium"])
    def test_full_products_whatever_the_user_set_and_put_back(self, user: str) -> None:
        default = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision(user)
            before = float32_state()
            with switches.matmul_precision("fp32", CPU) as bits:
                assert bits == switches.product_bits(CPU) == 23
                assert set(float32_state().values()) == {"ieee", "none", "highest"}
            assert float32_state() == before
            with pytest.raises(ZeroDivisionError), switches.matmul_precision("bf16", CPU):
                1 / 0  # noqa: B018
            assert float32_state() == before
        finally:
            torch.set_float32_matmul_precision(default)

    @pytest.mark.skipif("amx" not in devices.cpu_label(), reason="only AMX rounds float32 products on a CPU")
    def test_the_probe_sees_rounded_products(self) -> None:
        default = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("medium")
            assert switches.product_bits(CPU) == 7  # bf16
        finally:
            torch.set_float32_matmul_precision(default)
        assert switches.product_bits(CPU) == 23

    @pytest.mark.parametrize("bits", [7, 10, 11, 16, 22])
    def test_the_probe_counts_bits(self, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
        exact = torch.Tensor.__matmul__

        def rounding(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            scale = 2.0**bits
            return exact((a * scale).round() / scale, b)

        monkeypatch.setattr(torch.Tensor, "__matmul__", rounding)
        assert switches.product_bits(CPU) == bits

    @pytest.mark.parametrize(("precision", "bits"), [("fp32", 10), ("fp32", 22), ("tf32", 23)])
    def test_a_row_carries_no_precision_it_was_not_computed_in(
        self, monkeypatch: pytest.MonkeyPatch, precision: str, bits: int
    ) -> None:
        before = float32_state()
        monkeypatch.setattr(switches, "product_bits", lambda device: bits)
        message = f"float32 products keep {bits} of 23 mantissa bits"
        with pytest.raises(RuitongError, match=message), switches.matmul_precision(precision, CPU):
            pass
        assert float32_state() == before

    def test_tf32_where_there_is_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = float32_state()
        monkeypatch.setattr(switches, "product_bits", lambda device: 10)
        with switches.matmul_precision("tf32", CPU) as bits:
            assert bits == 10
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            assert torch.get_float32_matmul_precision() == "high"
        assert float32_state() == before

    def test_ascends_hf32_is_off(self, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        matmul, conv = (types.SimpleNamespace(allow_hf32=True) for _ in range(2))
        device = driver("npu", card("Ascend910B3"), matmul=matmul, conv=conv)
        monkeypatch.setattr(switches, "product_bits", lambda device: 23)
        with switches.matmul_precision("fp32", device):
            assert (matmul.allow_hf32, conv.allow_hf32) == (False, False)
        assert (matmul.allow_hf32, conv.allow_hf32) == (True, True)


def deterministic_state() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


class TestDeterminism:
    def test_set_and_put_back(self) -> None:
        before = deterministic_state()
        with switches.determinism(True):
            assert deterministic_state() == (True, True, False)
            with switches.determinism(False):
                assert deterministic_state() == (False, False, False)
            assert deterministic_state() == (True, True, False)
        assert deterministic_state() == before

    def test_an_operation_without_a_deterministic_implementation_is_named(self) -> None:
        before = deterministic_state()
        message = "the operation 'put_' has no deterministic implementation"
        with pytest.raises(RuitongError, match=message), switches.determinism(True):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        assert deterministic_state() == before
        with pytest.raises(RuntimeError, match="something else"), switches.determinism(True):
            raise RuntimeError("something else")

    def test_a_cell(self, tiny_folder: Path) -> None:
        given = {"model": str(tiny_folder), "prompts": "core-4", "max_new_tokens": 2, "scoring": "both", "threads": 1}
        plain, same = (collect(Cell(**given, deterministic=d)) for d in (False, True))
        assert [d["deterministic"].item() for d in (plain, same)] == [False, True]
        assert plain["cell"].item() != same["cell"].item()
        flags = [schema.provenance(d)["flags"]["deterministic_algorithms"] for d in (plain, same)]
        assert flags == [False, True]
        assert (plain["top_token_id"].values == same["top_token_id"].values).all()
        assert not torch.are_deterministic_algorithms_enabled()

    @pytest.fixture(autouse=True)
    def _clean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "_set_here", set())
        for name in {n for values in devices._ONCE.values() for n in values}:
            monkeypatch.delenv(name, raising=False)

    @pytest.fixture
    def fresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As before torch is imported."""
        monkeypatch.setattr(devices.sys, "modules", {n: m for n, m in sys.modules.items() if n != "torch"})

    @pytest.mark.usefixtures("fresh")
    @pytest.mark.parametrize(
        ("device", "names"),
        [
            ("cuda:1", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
            ("rocm", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
            (
                "npu",
                {
                    "HCCL_DETERMINISTIC": "true",
                    "LCCL_DETERMINISTIC": "1",
                    "CLOSE_MATMUL_K_SHIFT": "1",
                    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
                    "ATB_LLM_LCOC_ENABLE": "0",
                },
            ),
            ("cpu", {}),
        ],
    )
    def test_what_libraries_read_once_is_set_before_torch(self, device: str, names: dict[str, str]) -> None:
        every = {n for values in devices._ONCE.values() for n in values}
        devices.prepare(onednn_isa="", device=device)
        assert not every & set(os.environ)
        devices.prepare(onednn_isa="", device=device, deterministic=True)
        assert {n: os.environ[n] for n in every if n in os.environ} == names
        devices.prepare(onednn_isa="", device=device)  # the next cell of this process is not deterministic
        assert not every & set(os.environ)
        devices.prepare(onednn_isa="", device="auto", deterministic=True)
        assert every <= set(os.environ)
        assert every <= set(provenance.ENVIRONMENT)  # and each goes into the manifest

    @pytest.mark.usefixtures("fresh")
    def test_a_users_own_value_that_is_as_good_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HCCL_DETERMINISTIC", "strict")
        monkeypatch.setenv("ATB_LLM_LCOC_ENABLE", "1")
        devices.prepare(onednn_isa="", device="npu", deterministic=True)
        assert (os.environ["HCCL_DETERMINISTIC"], os.environ["ATB_LLM_LCOC_ENABLE"]) == ("strict", "0")

    def test_too_late_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        devices.prepare(onednn_isa="", device="cpu", deterministic=True)  # CPU kernels read nothing
        with pytest.raises(RuitongError, match="deterministic=True was asked for, which needs CUBLAS_WORKSPACE_CONFIG"):
            devices.prepare(onednn_isa="", device="cuda", deterministic=True)
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        devices.prepare(onednn_isa="", device="cuda", deterministic=True)
        devices.prepare(onednn_isa="", device="cuda")  # the user's own setting, recorded, no claim
        monkeypatch.setattr(devices, "_set_here", {"CUBLAS_WORKSPACE_CONFIG"})
        with pytest.raises(RuitongError, match="deterministic=False was asked for"):
            devices.prepare(onednn_isa="", device="cuda")


class TestManifest:
    def test_holds_no_host_name_and_no_path(
        self, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts = tmp_path / "mine.jsonl"
        prompts.write_text('{"id": "a", "text": "Hello"}\n', encoding="utf-8")
        monkeypatch.setenv("HIPBLASLT_TENSILE_LIBPATH", "/opt/someone/lib")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
        monkeypatch.setenv("OMP_SCHEDULE", "static")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        given = {"model": str(tiny_folder), "prompts": str(prompts), "outputs": str(tmp_path), "scoring": "both"}
        shard = collect(Cell(**given, max_new_tokens=2, threads=1))
        text = str(shard["provenance"].values[0])
        coordinates = " ".join(str(shard[c].values) for c in shard.coords)
        home = [str(Path.home())] if str(Path.home()) != "/" else []
        private = [os.uname().nodename, *home, str(tmp_path), str(tiny_folder), str(tiny_folder.parent), "/opt/", "hf_"]
        for word in [*private, "8932f937", str(Path(provenance.__file__).parents[1]), sys.prefix]:
            assert word not in text, word
            assert word not in coordinates, word

        def strings(value: Any) -> list[str]:
            if isinstance(value, dict):
                return [x for v in [*value, *value.values()] for x in strings(v)]
            return [x for v in value for x in strings(v)] if isinstance(value, list) else [str(value)]

        assert [s for s in strings(json.loads(text)) if s.startswith(("/", "~")) or s[1:3] == ":\\"] == []
        assert shard["model"].item() == tiny_folder.name
        environment = json.loads(text)["flags"]["environment"]
        assert environment["HIPBLASLT_TENSILE_LIBPATH"] == environment["CUDA_VISIBLE_DEVICES"] == "(set)"
        assert environment["OMP_SCHEDULE"] == "static"

    def test_the_switches_of_the_run_are_in_it(self, tiny_folder: Path) -> None:
        given = {"model": str(tiny_folder), "prompts": "core-4", "max_new_tokens": 2, "scoring": "both", "threads": 1}
        found = schema.provenance(collect(Cell(**given, precision="fp32")))
        assert found["flags"]["float32_product_bits"] == 23
        assert found["flags"]["float32_precision"]["cuda.matmul"] == "ieee"
        assert found["flags"]["cuda.matmul"]["allow_bf16_reduced_precision_reduction"] is True
        assert found["cpu"]["cores"] >= 1
        assert found["driver"]["kind"] == "cpu"


def test_importing_the_rooms_needs_no_torch() -> None:
    code = (
        "import sys\nfrom ruitong_lib import doctor\nfrom ruitong_lib.collect import devices, switches\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
