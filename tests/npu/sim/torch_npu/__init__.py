"""Stand-in for torch_npu: the simulated device of ``sim_npu.cpp``, under the names that torch_npu gives its own.

torch loads it by itself, through the entry point ``torch.backends``, as it loads torch_npu.
"""

import contextlib
import ctypes
import types
from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "sim_npu.so"
__version__ = "0+simulated"


def _index(device=None):
    found = torch.device("npu", device).index if isinstance(device, int) else device and torch.device(device).index
    return _C.sim_npu_current() if found is None else found


class _Properties:
    """As torch_npu's: some fields are always there, those of other vendors' cards hold None."""

    def __init__(self, device):
        self.name = "Simulated NPU"
        self.total_memory = 61 * 2**30
        self.cube_core_num = 0
        self.vector_core_num = 0
        self.major = self.gcnArchName = None
        self.uuid = "00000000-0000-0000-0000-00000000000" + str(_index(device))
        # What only a simulation can say; it reaches the manifest with the rest of the driver's answer.
        self.operators = _C.sim_npu_operators()
        self.synchronizations = _C.sim_npu_synchronizations()


@contextlib.contextmanager
def _device(device):
    before = _C.sim_npu_current()
    _C.sim_npu_select(_index(device))
    try:
        yield
    finally:
        _C.sim_npu_select(before)


def _autoload():
    global _C  # noqa: PLW0603
    torch.utils.rename_privateuse1_backend("npu")
    torch.ops.load_library(LIBRARY)
    _C = ctypes.CDLL(str(LIBRARY))
    for name in ("operators", "synchronizations", "allocated", "peak"):
        getattr(_C, f"sim_npu_{name}").restype = ctypes.c_int64
    npu = types.ModuleType("torch.npu")
    npu.is_available = lambda: True
    npu.device_count = _C.sim_npu_devices
    npu.current_device = _C.sim_npu_current
    npu.set_device = lambda device: _C.sim_npu_select(_index(device))
    npu.device = _device
    npu.synchronize = torch.accelerator.synchronize
    npu.get_device_name = lambda device=None: "Simulated NPU"
    npu.get_device_properties = _Properties
    npu.is_bf16_supported = lambda including_emulation=False: True
    npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    npu.matmul = types.SimpleNamespace(allow_hf32=False)
    npu.conv = types.SimpleNamespace(allow_hf32=True)
    npu.memory_allocated = lambda device=None: _C.sim_npu_allocated(_index(device))
    npu.max_memory_allocated = lambda device=None: _C.sim_npu_peak(_index(device))
    npu.reset_peak_memory_stats = lambda device=None: _C.sim_npu_reset_peak(_index(device))
    npu.empty_cache = lambda: None
    npu.manual_seed = npu.manual_seed_all = lambda seed: None  # the generator is the CPU's
    npu.get_rng_state = lambda device=None: torch.get_rng_state()
    npu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    npu._is_in_bad_fork = lambda: False
    npu.operators = _C.sim_npu_operators
    npu.synchronizations = _C.sim_npu_synchronizations
    torch._register_device_module("npu", npu)
    torch.utils.generate_methods_for_privateuse1_backend()


def npu_fusion_attention(*args, **kwargs):
    """Imported by transformers where torch_npu is installed."""
    raise NotImplementedError("the simulated NPU has no fused attention")


npu_rotary_mul = npu_fusion_attention
