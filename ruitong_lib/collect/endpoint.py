"""Fill a shard from a served model: its own greedy text, and the replay of an anchor where the server can score one."""

import logging
from pathlib import Path
from typing import Any

import xarray as xr

from ruitong_lib import paths, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect.served import vocabulary
from ruitong_lib.collect.served.asking import body, replay_body
from ruitong_lib.collect.served.client import Client, read_key, run_async
from ruitong_lib.collect.served.from_raw import Measured, build, own_anchor
from ruitong_lib.collect.served.probe import Probe
from ruitong_lib.collect.served.raw import Raw
from ruitong_lib.collect.served.sending import Ask, Job, Progress, ask_all, warm_up, what
from ruitong_lib.errors import RuitongError
from ruitong_lib.prompts import ids_sha256, load_prompts, option_ids, render

log = logging.getLogger("ruitong")
REPLAY_K = 100  # asked for in replay where the server lists so many: fewer anchor ids are censored


def collect(cell: Cell, *, progress: Progress | None = None, transport: Any = None) -> xr.Dataset:
    """Measure a served model and return its shard.

    Each finished prompt is kept beside the shard (``cells/raw/<label>``); the same call goes on where a run stopped.

    Parameters
    ----------
    cell
        What to run; ``batch_size`` is the number of requests in flight.
    progress
        Called with the scoring, the prompts done and the prompts in all.
    transport
        For tests: an ``httpx`` transport in place of the network.

    Returns
    -------
    A validated shard (cell: 1, scoring: 2, prompt, position, k).

    Raises
    ------
    RuitongError
        For a server that cannot be reached, hangs, or reads other prompt ids than the local tokenizer gives; what was
        measured until then is kept. Odd numbers are states of the shard, not errors.
    """
    key = read_key(cell.api_key_env)
    job = prepare(cell)

    async def main() -> Measured:
        async with Client(
            cell.base_url, key, connections=cell.batch_size, seed=cell.seed, transport=transport
        ) as client:
            return await _measure(client, job, progress)

    return build(job, run_async(main))


def probe_server(
    base_url: str, *, model: str = "", served_model: str = "", api_key_env: str = "", transport: Any = None
) -> dict[str, Any]:
    """Ask a server what it can do, and measure nothing.

    Parameters
    ----------
    base_url
        The server's address.
    model
        The model as it is known here; its tokenizer makes the ids that are sent. Empty sends ids of our own.
    served_model
        The server's name of the model; empty is ``model``, or the only one it lists.
    api_key_env
        The environment variable that holds the key.
    transport
        For tests: an ``httpx`` transport in place of the network.

    Returns
    -------
    The report, as a cell's manifest keeps it under ``probe``.

    Raises
    ------
    RuitongError
        For a server that cannot be reached, has no such model or takes no request.
    """
    key = read_key(api_key_env)
    words = vocabulary.load(Cell(model=model, scoring="decode")) if model else None

    async def main() -> dict[str, Any]:
        async with Client(base_url, key, transport=transport) as client:
            probe = Probe(client, model=served_model, words=words, local=model, seed=0, thinking=False)
            return await probe.run()

    return run_async(main)


def prepare(cell: Cell) -> Job:
    """Settle everything that needs no server: prompts, their ids, the anchor, where the files go."""
    from ruitong_lib.collect import transformers as local

    prompts = load_prompts(cell.prompts)
    names = [p.id for p in prompts.prompts]
    shard = schema.load(cell.anchor) if cell.anchor else None
    if shard is not None:
        local._check_anchor(shard, names, cell)
    words = vocabulary.load(cell)
    ids = render(prompts.prompts, words.tokenizer, thinking=cell.thinking)
    options = option_ids(prompts.prompts, words.tokenizer, thinking=cell.thinking)
    anchor = None
    if shard is not None:
        anchor = local.with_options(local.load_anchor(shard, [ids_sha256(i) for i in ids]), names, options)
    where = {"hardware": cell.hardware, "anchor": Path(cell.anchor).stem if cell.anchor else ""}
    label = cell.label(**where)
    folder = paths.outputs(cell.outputs) / "cells" / "raw" / label
    return Job(cell, prompts, words, ids, label, cell.key(**where), folder, options, anchor)


async def _measure(client: Client, job: Job, progress: Progress | None) -> Measured:
    cell, prompts = job.cell, job.prompts.prompts
    probe = Probe(
        client, model=cell.served_model, words=job.words, local=cell.model, seed=cell.seed, thinking=cell.thinking
    )
    report = await probe.run()
    route = probe.route
    assert route is not None
    if cell.scoring == "replay" and not report["replay"]:
        raise RuitongError(
            f"scoring='replay' cannot be measured with this server ({report['can']['replay']}). It said: "
            f"{report['replay_refused'] or report['refused']}"
        )
    k = min(cell.top_k, report["max_k"])
    server = {n: report["server"][n] for n in ("name", "version")} | {"model": report["model"]}
    raw = Raw(job.folder, content_key=job.key, server=server)
    if cell.overwrite:
        raw.clear()
    warm = await warm_up(client, job, route, k)
    decode: dict[int, Path] = {}
    if cell.scoring != "replay":
        asks = [
            Ask(i, p.id, "decode", route.path, body(route, what(route, job, i), limit=cell.max_new_tokens, k=k))
            for i, p in enumerate(prompts)
        ]
        decode = await ask_all(client, raw, asks, job, progress)
    anchor = job.anchor
    if cell.scoring == "both" and anchor is None and report["replay"]:
        anchor = own_anchor(job, decode, k)
    replay: dict[int, Path] = {}
    wide = min(report["replay_max_k"], max(cell.top_k, REPLAY_K))
    if anchor is not None and report["replay"]:
        way = probe.routes["completions"]
        texts = [[*job.ids[i], *anchor.token_id[i, : anchor.n_tokens[i]].tolist()] for i in range(len(prompts))]
        asks = [
            Ask(i, p.id, "replay", way.path, replay_body(way, texts[i], how=report["replay"], k=wide))
            for i, p in enumerate(prompts)
            if anchor.n_tokens[i]
        ]
        replay = await ask_all(client, raw, asks, job, progress)
    elif cell.scoring == "both":
        why = "the tokens of its own text have no ids" if report["replay"] else report["can"]["replay"]
        log.warning("%s: decode only, no replay: %s", job.label, why)
    return Measured(report, route, k, decode, replay, wide, anchor, warm)
