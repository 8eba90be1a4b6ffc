"""The collector's overhead on a served model, against a bare client that sends the same requests and keeps nothing.

Needs vLLM (`make test-served` sets it up): python benchmarks/served.py [--runs 7]. Client and server share this
machine's cores, so what the collector computes is taken from the server: elsewhere the overhead is smaller.
"""

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from ruitong_lib.cell import Cell
from ruitong_lib.collect.endpoint import prepare
from ruitong_lib.collect.models import embedded_folder
from ruitong_lib.collect.served.asking import body, replay_body
from ruitong_lib.collect.served.client import Client
from ruitong_lib.collect.served.from_raw import own_anchor
from ruitong_lib.collect.served.probe import Probe
from ruitong_lib.collect.served.raw import Raw, body_of, load
from ruitong_lib.collect.served.sending import Ask, Job, ask_all, what
from ruitong_lib.paths import ROOT

sys.path.insert(0, str(ROOT / "tests" / "servers"))
from vllm_server import serve

IN_FLIGHT = 8


async def bare(url: str, asks: Sequence[Ask]) -> int:
    """Send the requests, eight at a time, read the answers as JSON, and return the tokens that came."""
    waiting, tokens = iter(asks), 0

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=IN_FLIGHT)) as client:

        async def worker() -> None:
            nonlocal tokens
            for a in waiting:
                reply = await client.post(url + a.path, json=a.body)
                tokens += _tokens(a, reply.raise_for_status().json())

        await asyncio.gather(*[worker() for _ in range(IN_FLIGHT)])
    return tokens


def _tokens(a: Ask, answer: Any) -> int:
    usage = answer["usage"]
    return int(usage["prompt_tokens"] if a.scoring == "replay" else usage["completion_tokens"])


async def ours(url: str, asks: Sequence[Ask], job: Job, folder: Path) -> dict[int, Path]:
    """Send them as a run does: checked, and each answer written before the next is asked for."""
    async with Client(url, connections=IN_FLIGHT) as client:
        return await ask_all(client, Raw(folder, content_key="", server={}), asks, job, None)


async def requests(url: str, job: Job, folder: Path) -> dict[str, list[Ask]]:
    """Return a run's requests: of its decode, and of the replay of the text that the server wrote."""
    k = job.cell.top_k
    async with Client(url, connections=IN_FLIGHT) as client:
        probe = Probe(client, model="", words=job.words, local=job.cell.model, seed=0, thinking=False)
        report = await probe.run()
    route = probe.routes["completions"]
    names = [p.id for p in job.prompts.prompts]
    limit = job.cell.max_new_tokens
    decode = [
        Ask(i, n, "decode", route.path, body(route, what(route, job, i), limit=limit, k=k)) for i, n in enumerate(names)
    ]
    anchor = own_anchor(job, await ours(url, decode, job, folder), k)
    replay = []
    for i, n in enumerate(names):
        text = [*job.ids[i], *anchor.token_id[i, : anchor.n_tokens[i]].tolist()]
        asked = replay_body(route, text, how=report["replay"], k=report["replay_max_k"])
        replay.append(Ask(i, n, "replay", route.path, asked))
    return {"decode": decode, "replay": replay}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--prompts", default="core-32")
    parser.add_argument("--tokens", type=int, default=32)
    runs = (args := parser.parse_args()).runs
    work = Path(tempfile.mkdtemp(prefix="ruitong-served-"))
    with serve(embedded_folder()) as server:
        url = server.base_url
        cell = Cell(
            engine="endpoint", base_url=url, hardware="here", batch_size=IN_FLIGHT, prompts=args.prompts,
            max_new_tokens=args.tokens, scoring="both", outputs=str(work),
        )  # fmt: skip
        job = prepare(cell)
        for scoring, asks in asyncio.run(requests(url, job, work / "first")).items():
            rates: dict[str, list[float]] = {"bare": [], "collector": []}
            for run in range(runs + 1):  # the first of each is discarded
                for name in sorted(rates, reverse=run % 2 == 1):  # each goes first every other time
                    start = time.perf_counter()
                    if name == "bare":
                        tokens = asyncio.run(bare(url, asks))
                        seconds = time.perf_counter() - start
                    else:
                        files = asyncio.run(ours(url, asks, job, work / f"{scoring}-{run}"))
                        seconds = time.perf_counter() - start
                        tokens = sum(_tokens(a, body_of(load(files[a.place]))[0]) for a in asks)
                    if run:
                        rates[name].append(tokens / seconds)
            middle = {n: statistics.median(r) for n, r in rates.items()}
            print(
                f"{scoring}, {len(asks)} requests, {IN_FLIGHT} in flight, median of {runs}: "
                f"bare {middle['bare']:.1f} tokens/s ({min(rates['bare']):.1f}–{max(rates['bare']):.1f}), "
                f"collector {middle['collector']:.1f} ({min(rates['collector']):.1f}–{max(rates['collector']):.1f}), "
                f"ratio {middle['collector'] / middle['bare']:.3f}",
                flush=True,
            )
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
