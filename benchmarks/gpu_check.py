"""One accelerator against the CPU in under 8 minutes: python benchmarks/gpu_check.py [MODEL] [--device cuda].

Collects decode and replay in fp32, bf16, fp16 and W8A8 with batch 1, 8 and 32 on the device, and the same replays on
the CPU, all over one text that the CPU's fp32 cell wrote. Prints each row with its floor and verdict, and each cell's
distance to the CPU's fp32 cell. The shards stay in ``--outputs``: ruitong compare reads them. Where there is no
accelerator the device is the CPU itself, and there is no hardware row. When ``--minutes`` are over, the cells that are
left are named and the tables printed.

A machine without a network takes a folder: ``--slice N FOLDER`` writes the first N layers of the embedded model there
in files of at most 24 MB beside the embedding (57 MB), so that they can be carried in parts, and stops.
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import xarray as xr

from ruitong_lib import schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import devices, run_cell
from ruitong_lib.collect.models import EMBEDDED, embedded_folder, weights_sha256
from ruitong_lib.errors import RefusedError, RuitongError
from ruitong_lib.measure import floor as floors
from ruitong_lib.measure.align import align, axis_name, differs_in
from ruitong_lib.measure.oracle import distances
from ruitong_lib.measure.verdict import judge
from ruitong_lib.prompts import load_prompts
from ruitong_lib.report.markdown import number

PRECISIONS = ("bf16", "fp16", "fp32", "w8a8")
BATCHES = (1, 8, 32)


def slice_model(source: Path, layers: int, folder: Path) -> Path:
    """Write the first ``layers`` layers of a model: the same bytes each time, loadable like any other model."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    if not 1 <= layers <= config.num_hidden_layers:
        raise RuitongError(f"--slice must be from 1 to {config.num_hidden_layers} layers, got {layers}")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):  # one entry a layer, where the family has them
        config.layer_types = config.layer_types[:layers]
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    missing, _ = model.load_state_dict(weights, strict=False)  # layers above are left over, nothing else may be missing
    unknown = [m for m in missing if not (m == "lm_head.weight" and config.tie_word_embeddings)]
    if unknown:
        raise RuitongError(f"the slice lacks {', '.join(unknown[:3])}; it takes models of one layer list")
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size="24MB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    return folder


def cells(arguments: argparse.Namespace, device: str, base: dict[str, Any]) -> Iterator[Cell]:
    """Yield what runs, what matters most first: the CPU's replays, the device's decodes and replays."""
    for batch in BATCHES[: arguments.batches]:
        for precision in PRECISIONS:
            what = {**base, "precision": precision, "batch_size": batch}
            if device != "cpu":
                yield Cell(**what, device="cpu", scoring="replay")
            yield Cell(**what, device=device, scoring="both")
            if batch == 1:  # a second rung, so that rows of another batch size have a floor too
                yield Cell(**what, device=device, scoring="replay", attention="eager")


def row(ds: xr.Dataset, rungs: list[floors.Floor], reference: str, candidate: str) -> list[str]:
    """Return one line of the table: what differs, KL, its floor, R, verdict."""
    a, b = schema.select(ds, reference), schema.select(ds, candidate)
    one, two = a.isel(cell=0), b.isel(cell=0)
    fields = differs_in(one, two)
    changes = ", ".join(f"{one[f].item()} → {two[f].item()}" for f in fields if f != "threads")
    name = [axis_name(tuple(f for f in fields if f != "threads")), f"{two['precision'].item()}: {changes}"]
    try:
        pair = align(a, b)
    except RefusedError as e:
        return [*name, f"refused: {e}", "", "", ""]
    kl = floors.pair_kl(a, b)
    chosen = floors.floor_for(ds, reference, candidate, rungs=rungs)
    r = floors.ratio(kl, chosen.kl) if chosen else None
    verdict = judge(a, b, chosen, pair=pair).verdict
    floor = f"{chosen.rung} {number(chosen.mean_kl)}" if chosen else "none"
    shown = f"{number(r.value)} [{number(r.lo)}, {number(r.hi)}]" if r and r.status == "ok" else r.status if r else ""
    return [*name, number(float(kl.sum() / kl.notnull().sum())), floor, shown, verdict]


def rows(ds: xr.Dataset, cpu: dict[tuple[str, int], str], own: dict[tuple[str, int], str]) -> Iterator[list[str]]:
    """Yield the table's lines: CPU against device, then batch sizes, then precisions, on the device."""
    rungs = floors.ladder(ds)
    for key, label in own.items():
        if label != cpu[key]:
            yield row(ds, rungs, cpu[key], label)
    for (precision, batch), label in own.items():
        if batch > 1:
            yield row(ds, rungs, own[precision, 1], label)
    for precision in PRECISIONS[1:]:
        yield row(ds, rungs, own["bf16", 1], own[precision, 1])


def print_table(head: list[str], lines: list[list[str]]) -> None:
    """Print columns of equal width."""
    widths = [max(len(x[i]) for x in [head, *lines]) for i in range(len(head))]
    for line in [head, *lines]:
        print("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip())
    print()


def main() -> None:
    """Collect, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=EMBEDDED, help=f"folder or hub id; by default {EMBEDDED}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", default="core-61", help="core-16 for a slow machine; core-4 gets no verdict")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 is one a core")
    parser.add_argument("--minutes", type=float, default=7.0, help="no cell starts after that")
    parser.add_argument("--batches", type=int, choices=(1, 2, 3), default=3, help="how many of 1, 8, 32")
    parser.add_argument("--outputs", default="outputs/gpu_check")
    parser.add_argument("--slice", nargs=2, metavar=("N", "FOLDER"), help="write the first N layers of MODEL, and stop")
    arguments = parser.parse_args()
    if arguments.slice:
        source = embedded_folder() if arguments.model == EMBEDDED else Path(arguments.model)
        folder = slice_model(source, int(arguments.slice[0]), Path(arguments.slice[1]))
        for file in sorted(folder.iterdir()):
            print(f"{file.stat().st_size / 1e6:8.1f} MB  {file}")
        print(f"weights {weights_sha256(folder)}")
        return
    start = time.perf_counter()
    found = devices.resolve(arguments.device)
    device = "cpu" if found.type == "cpu" else arguments.device
    print(f"{devices.hardware(device)} against {devices.cpu_label()}; {arguments.model}, {arguments.prompts}")
    n = len(load_prompts(arguments.prompts).prompts)
    largest = BATCHES[arguments.batches - 1]
    print(f"{n} prompts" + (f"; a batch of {largest} holds only these" if n < largest else "") + "\n")
    base = {"model": arguments.model, "prompts": arguments.prompts, "max_new_tokens": arguments.max_new_tokens}
    base |= {"threads": arguments.threads, "outputs": str(Path(arguments.outputs).resolve())}
    anchor, text = run_cell(Cell(**base, device="cpu", precision="fp32", scoring="both"), progress=False)
    print(f"{time.perf_counter() - start:5.0f} s  {anchor.stem}  the text", file=sys.stderr)
    shards, failed = [text], []
    for cell in cells(arguments, device, base | {"anchor": str(anchor)}):
        name = f"{cell.device} {cell.precision} b{cell.batch_size} {cell.attention}"
        if time.perf_counter() - start > 60 * arguments.minutes:
            failed.append([name, f"not run: {arguments.minutes:g} minutes were over"])
            continue
        try:
            path, ds = run_cell(cell, progress=False)
        except Exception as e:  # a kernel that this card lacks is a line of the report, not the end of it
            failed.append([name, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"])
            continue
        speed = schema.provenance(ds)["timing"]
        shown = ", ".join(f"{k} {v['tokens_per_second']:.0f} tokens/s" for k, v in speed.items() if v.get("seconds"))
        print(f"{time.perf_counter() - start:5.0f} s  {path.stem}  {shown}", file=sys.stderr)
        shards.append(ds)
    combined = schema.combine(shards).assign_attrs(reference=str(text["cell"].values[0]), not_collected=json.dumps({}))
    schema.save(combined, Path(base["outputs"]) / "gpu_check.nc")
    label = {}
    for ds in shards[1:]:
        key = tuple(ds[n].values.item(0) for n in ("device", "precision", "batch_size", "attention"))
        label[key] = str(ds["cell"].values[0])
    here = "cpu" if device == "cpu" else next((k[0] for k in label if k[0] != "cpu"), "cpu")
    cpu, own = (
        cast(
            dict[tuple[str, int], str],
            {(p, b): label[d, p, b, "sdpa"] for p in PRECISIONS for b in BATCHES if (d, p, b, "sdpa") in label},
        )
        for d in ("cpu", here)
    )
    complete = {k: v for k, v in own.items() if k in cpu and (k[0], 1) in own and ("bf16", 1) in own}
    lines = list(rows(combined, cpu, complete)) if complete else []
    print_table(["axis", "row", "KL, nat", "floor", "R [95 %]", "verdict"], lines)
    near, _ = distances(combined, str(text["cell"].values[0]))
    far = [[d.cell, f"{number(d.kl)} [{number(d.lo)}, {number(d.hi)}]", number(d.direction)] for d in near]
    print_table(["distance to the CPU's fp32 cell", "KL, nat [95 %]", "direction, nat"], far)
    phases = [f for f in floors.ladder(combined) if f.rung == "phase"]
    print_table(
        ["decode against replay of one cell", "KL, nat", "positions"],
        [[f.reference, number(f.mean_kl), str(f.n_positions)] for f in phases],
    )
    if failed:
        print_table(["failed", "why"], failed)
    seconds = time.perf_counter() - start
    print(f"{len(shards)} shards, {len(failed)} failed, {math.ceil(seconds)} s; {base['outputs']}/gpu_check.nc")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except RuitongError as e:
        raise SystemExit(f"gpu_check: {e}") from None
