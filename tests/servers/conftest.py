"""Tests against a real server: `make test-served` sets it up and runs them; a plain pytest leaves them out.

Where they are asked for (`-m served`) they run or fail: nothing here is skipped.
"""

from collections.abc import Iterator

import pytest
from vllm_server import MAX_CONCURRENCY, Server, installed, serve

from ruitong_lib.collect.models import embedded_folder


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "served: needs a real server (make test-served)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "served" in config.option.markexpr:
        return
    left_out = [i for i in items if "served" in i.keywords]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [i for i in items if "served" not in i.keywords]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM with the embedded model in bf16, its prefix cache off."""
    assert installed(), "vLLM is not here: run `make test-served`, or tests/servers/setup_vllm.sh"
    assert MAX_CONCURRENCY >= 32
    with serve(embedded_folder(), log=tmp_path_factory.mktemp("vllm") / "server.log") as running:
        yield running
