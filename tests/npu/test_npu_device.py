"""What the simulated device promises: without it, the tests of the path would show nothing."""

import subprocess
import sys

import pytest

CODE = """
import pytest, torch
d = torch.device("npu:1")
assert torch.accelerator.current_accelerator().type == "npu" and torch.npu.device_count() == 2
before = torch.npu.operators()
a = torch.linspace(-3, 3, 4096).reshape(64, 64)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = a.to(d, dtype)
    assert x.device == d
    assert torch.equal((x @ x.T).softmax(-1).cpu(), (a.to(dtype) @ a.to(dtype).T).softmax(-1))
assert torch.npu.operators() >= before + 6
with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
    x @ a.half()
with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
    x[torch.arange(3)]
with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
    torch.cat([x, a.half()])
torch.testing.assert_close((x * torch.tensor(2.0)).cpu(), a.half() * 2)  # a CPU scalar is allowed everywhere
with pytest.raises(RuntimeError, match="does not exist"):
    torch.empty(1, device="npu:2")
"""
MEMORY = """
import torch
from ruitong_lib.collect import devices
d = devices.resolve("npu:1")
x = torch.zeros(1000, device=d)
assert devices.memory(d) == {"allocated": 4000, "peak": 4000}, devices.memory(d)
y = torch.zeros(2000, device=d)
del y
assert devices.memory(d) == {"allocated": 4000, "peak": 12000}
devices.reset_peak_memory(d)
assert devices.memory(d)["peak"] == 4000
assert devices.memory(torch.device("npu:0"))["peak"] == 0
assert devices.memory(torch.device("cpu")) == {}
before = torch.npu.synchronizations()
devices.synchronize(d)
assert torch.npu.synchronizations() == before + 1
assert devices.hardware("npu") == "Simulated NPU (64 GB)"
assert str(devices.resolve("auto")) == "npu:0"
"""


@pytest.mark.parametrize("code", [CODE, MEMORY], ids=["operators", "memory"])
def test_simulated_npu(sim_npu: dict[str, str], code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], env=sim_npu, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
