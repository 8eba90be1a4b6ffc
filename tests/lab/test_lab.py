"""The notebooks in a real JupyterLab in a real browser: restart and run all, and a slider that moves its figure."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from ruitong_lib import schema
from ruitong_lib.paths import NOTEBOOKS, ROOT
from ruitong_lib.report import teach
from ruitong_lib.testing import synthetic_shards

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# One that collects and one that reads; RUITONG_LAB=all runs every notebook (papermill runs them in any case). Two show
# what was measured here, and run where it was.
MEASURED = {"gates": "results/gates.json", "calibrate_gates": "calibration/demo-gates/result.json"}
NOT_HERE = {n for n, file in MEASURED.items() if not (ROOT / "outputs" / file).is_file()}
EVERY = sorted({p.stem for p in NOTEBOOKS.glob("*.ipynb")} - {"00_noise_floor", "explore"} - NOT_HERE)
OTHERS = EVERY if os.environ.get("RUITONG_LAB") == "all" else ["run_cell", "compare"]
MINUTES = 240_000  # ms; a busy machine is slow, and nothing here is timed
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is in the page
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# Connected and idle, as a person sees it: a kernel that is restarted while its first connection opens may lose the
# cells that are sent to it.
READY = """() => {
  const panel = window.jupyterapp?.shell.currentWidget;
  const kernel = panel?.sessionContext?.session?.kernel;
  return kernel?.connectionStatus === 'connected' && kernel.status === 'idle' && panel.content;
}"""
DONE = """() => {
  const panel = window.jupyterapp.shell.currentWidget;
  const code = panel.content.widgets.filter(c => c.model.type === 'code' && c.model.sharedModel.source);
  const failed = code.some(c => c.model.outputs.toJSON().some(o => o.output_type === 'error'));
  return failed || (panel.sessionContext.session.kernel.status === 'idle' && code.every(c => c.model.executionCount));
}"""
CELLS = "() => window.jupyterapp.shell.currentWidget.content.model.toJSON().cells"


def given(name: str, tiny: Path, oracle: Path) -> dict[str, Any]:
    """Parameters that keep a notebook small; the data are in RUITONG_OUTPUTS, or measured before."""
    known: dict[str, dict[str, Any]] = {
        "run_cell": {"model": str(tiny), "prompts": "core-4", "max_new_tokens": 4},
        "00_noise_floor": {"model": str(tiny)},
        "aggregate": {"grid": ""},
        "oracle": {"dataset": str(oracle)},
        **{n: {"outputs": str(ROOT / "outputs")} for n in MEASURED},
    }
    return known.get(name, {})


@pytest.fixture(scope="module")
def lab(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A JupyterLab as ``make lab`` starts it, over copies of the notebooks and made-up data; its address."""
    folder = tmp_path_factory.mktemp("lab")
    for name in ("notebooks", "settings", "outputs"):
        (folder / name).mkdir()
    cells: list[dict[str, Any]] = [
        {"noise": 0.05}, {"noise": 0.05, "batch_size": 8}, {"noise": 0.3, "precision": "w8a8"},
        {"noise": 0.3, "precision": "w8a8", "batch_size": 8}, {"precision": "fp64"},
    ]  # fmt: skip
    shards = synthetic_shards(cells, n_prompts=16, n_positions=8, decode=False).shards
    ends = {"reference": str(shards[0]["cell"].item()), "oracle": str(shards[-1]["cell"].item())}
    oracle = schema.save(schema.combine(shards).assign_attrs(ends), folder / "outputs" / "oracle.nc")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nb = parameterize_notebook(load_notebook_node(str(path)), given(path.stem, tiny_folder, oracle))
        nbformat.write(nb, folder / "notebooks" / path.name)
    for name, value in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value), encoding="utf-8")
    ds = teach.synthetic_dataset(n_prompts=16, n_positions=12)
    schema.save(ds, folder / "outputs" / "ruitong.nc")
    for label in map(str, ds["cell"].values):
        schema.save(schema.select(ds, label), folder / "outputs" / "cells" / f"{label}.nc")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = (folder / "lab.log").open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyter", "lab", "notebooks", "--no-browser", "--allow-root", f"--port={port}",
         "--IdentityProvider.token=", "--expose-app-in-browser", "--ServerApp.port_retries=0"],
        cwd=folder, stdout=log, stderr=log,
        env={**os.environ, "RUITONG_OUTPUTS": str(folder / "outputs"), "HF_HUB_OFFLINE": "1",
             "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "work")},
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/api/status", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, (folder / "lab.log").read_text()
                time.sleep(0.2)
        yield address
    finally:
        server.terminate()  # it shuts its kernels down
        server.wait(60)
        log.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "no chromium on this machine: apt-get install chromium"
    with sync_playwright() as p:
        running = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Any, lab: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    context.set_default_timeout(MINUTES)
    opened = context.new_page()
    yield opened
    opened.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    context.close()


def restart_and_run_all(page: Any, lab: str, name: str) -> list[dict[str, Any]]:
    """Open a notebook, press its button "restart the kernel and run all cells", wait, and return the cells."""
    page.goto(f"{lab}/lab/tree/{name}.ipynb?reset")
    page.wait_for_function(READY)
    page.locator("[data-command='notebook:restart-run-all']:visible").first.click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    page.locator(".jp-Dialog").wait_for(state="detached")
    page.wait_for_function(DONE)
    return page.evaluate(CELLS)


def outputs(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [o for c in cells if c["cell_type"] == "code" for o in c["outputs"]]


def errors(cells: list[dict[str, Any]]) -> list[str]:
    return [f"{o['ename']}: {o['evalue']}" for o in outputs(cells) if o["output_type"] == "error"]


def html(cells: list[dict[str, Any]]) -> str:
    found = (o.get("data", {}).get("text/html", "") for o in outputs(cells))
    return "\n".join("".join(text) for text in found)


def test_the_lesson_runs_and_its_slider_moves_the_figure(page: Any, lab: str) -> None:
    cells = restart_and_run_all(page, lab, "00_noise_floor")
    assert errors(cells) == []
    box = page.locator(".jp-CodeCell", has=page.locator(".widget-hslider")).nth(1)
    box.scroll_into_view_if_needed()
    picture = "cell => cell.querySelector('.jp-RenderedImage img').src"  # the PNG itself, as a data URL
    first = box.evaluate(picture)
    moved = "([cell, old, same]) => (cell.querySelector('.jp-RenderedImage img')?.src === old) === same"
    for key, same in (("ArrowRight", False), ("ArrowLeft", True)):  # another picture, and back to the first one
        box.locator(".noUi-handle").press(key)
        page.wait_for_function(moved, arg=[box.element_handle(), first, same])
    assert first.startswith("data:image/png")


def test_answers_are_hidden_until_they_are_asked_for(page: Any, lab: str) -> None:
    page.goto(f"{lab}/lab/tree/00_noise_floor.ipynb?reset")
    page.wait_for_function(READY)
    answers = page.locator(".jp-RenderedMarkdown details")
    answers.first.wait_for()
    assert answers.count() >= 6
    assert not answers.first.locator("p, pre").first.is_visible()
    answers.first.locator("summary").click()
    assert answers.first.locator("p, pre").first.is_visible()


def test_datasets_show_their_units(page: Any, lab: str) -> None:
    cells = restart_and_run_all(page, lab, "explore")
    assert errors(cells) == []
    shown = html(cells)
    assert "units" in shown
    assert ">nat<" in shown
    assert "KL divergence, lower bound" in shown


@pytest.mark.parametrize("name", OTHERS)
def test_restart_and_run_all(name: str, page: Any, lab: str) -> None:
    cells = restart_and_run_all(page, lab, name)
    assert errors(cells) == []
    assert all(c["execution_count"] for c in cells if c["cell_type"] == "code")
    if name == "run_cell":  # the bar is a widget where widgets run
        kinds = {k for o in outputs(cells) for k in o.get("data", {})}
        assert "application/vnd.jupyter.widget-view+json" in kinds


def test_the_kernel_is_the_environments_own(lab: str) -> None:
    with urllib.request.urlopen(f"{lab}/api/kernelspecs") as answer:
        specs = json.load(answer)
    assert specs["default"] == "python3"
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert nbformat.read(path, as_version=4).metadata.kernelspec.name == "python3"
