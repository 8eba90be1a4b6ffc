"""A real vLLM on this machine's CPU, for the tests and the benchmark: started, waited for, and always stopped."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from ruitong_lib.paths import ROOT

VENV = ROOT / ".venv-vllm"
MODEL_NAME = "smollm2-135m"
MAX_CONCURRENCY = 32
START_SECONDS = 300  # a cold disk and a busy machine; about 40 are usual on two cores
STOP_SECONDS = 20


def installed() -> bool:
    """Say whether tests/servers/setup_vllm.sh has run to its end."""
    return (VENV / ".installed").is_file()


def command(model: Path, port: int, *, prefix_cache: bool = False, dtype: str = "bfloat16") -> list[str]:
    """Return the one server command that tests, benchmark and README use."""
    return [
        str(VENV / "bin" / "vllm"), "serve", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME,
        "--dtype", dtype, "--seed", "0", "--generation-config", "vllm",
        "--enforce-eager",  # no compilation: seconds instead of minutes, and one set of kernels
        "--max-model-len", "1024", "--max-num-seqs", str(MAX_CONCURRENCY),
        "--logprobs-mode", "raw_logprobs", "--max-logprobs", "50",
        "--enable-prefix-caching" if prefix_cache else "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """Return the server's environment: ours, offline, with a small key-value cache and no usage report."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON", "ONEDNN_"))}
    return kept | {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; the default takes a share of the machine's memory
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # The sampler compiles one small function at the first request: 40 s, and a C++ compiler that may not be here.
        "TORCHDYNAMO_DISABLE": "1",
        "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }


class Server:
    """A server: ``kill`` and ``start`` are for the tests that need it to die; ``stop`` comes at the end anyway."""

    def __init__(self, argv: list[str], port: int, log: Path) -> None:
        self.argv, self.port, self.log = argv, port, log
        self.base_url = f"http://127.0.0.1:{port}/v1"
        self.seconds: list[float] = []  # of each start

    def start(self, seconds: float = START_SECONDS) -> None:
        """Start it and wait until it says that it is healthy; a RuntimeError with the log's end where it does not."""
        with self.log.open("ab") as out:
            # A session of its own: its process group holds the engine's processes too, and nothing of ours.
            self.process = subprocess.Popen(
                self.argv, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with {self.process.returncode} before it was ready\n{self.tail()}"
                )
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5).status_code == 200:
                    self.seconds.append(time.monotonic() - start)
                    return
            time.sleep(0.5)
        raise RuntimeError(f"the server was not ready after {seconds:.0f} s\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of the server's log."""
        return self.log.read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """End the server and its children at once, as a crash would."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End the server and its children; what does not go when asked is killed."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self.kill()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def serve(model: Path, *, port: int = 0, log: Path | None = None, prefix_cache: bool = False) -> Iterator[Server]:
    """Run a server while the block runs."""
    port = port or free_port()
    if log is None:
        log = Path(tempfile.mkdtemp(prefix="ruitong-vllm-")) / "server.log"
    server = Server(command(model, port, prefix_cache=prefix_cache), port, log)
    try:
        server.start()
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    from ruitong_lib.collect.models import embedded_folder

    with serve(embedded_folder(), port=int(sys.argv[1]) if sys.argv[1:] else 0) as running:
        print(f"{running.base_url} is ready after {running.seconds[0]:.0f} s; log: {running.log}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            running.process.wait()
