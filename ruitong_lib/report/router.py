"""The router's agreement of a mixture of experts, beside its floor's: a section of the delta table."""

from collections.abc import Sequence
from typing import Any

import xarray as xr

from ruitong_lib.measure import metrics
from ruitong_lib.measure.floor import Floor

Row = dict[str, Any]


def section(pair: xr.Dataset, chosen: Floor | None, rungs: Sequence[Floor]) -> Row | None:
    """Return what the table says of a row's router, or None where a side is dense or did not record it.

    Parameters
    ----------
    pair
        The aligned row.
    chosen
        The row's floor, with its own ``pair``; None where there is none.
    rungs
        The ladder: whether regrouping the batch was measured.
    """
    own = metrics.router_agreement(pair)
    if not own.notnull().any():
        return None
    base = None
    if chosen is not None and chosen.pair is not None:
        base = float(metrics.router_agreement(chosen.pair).mean())
    regrouped = [f for f in rungs if f.rung == "batch composition"]
    return {
        "agreement": float(own.mean()),
        "n_positions": int(own.notnull().sum()),
        "floor_rung": chosen.rung if chosen is not None else None,
        "floor_agreement": base,
        "regrouped": max((f.mean_kl for f in regrouped), default=None),
    }


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the section as Markdown; empty where no row has a router."""
    routed = [r for r in rows if r.get("router")]
    if not routed:
        return []
    out = [
        "## Router: share of layers that chose the same experts",
        "",
        "| axis | reference → candidate | agreement | n | its floor: rung, agreement | floor of regrouping, nat |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in routed:
        found = r["router"]
        floor, regrouped = found["floor_agreement"], found["regrouped"]
        cells = (
            r["axis"],
            r["change"],
            # no delta without its floor
            f"{found['agreement']:.4f}" if floor is not None else "not shown: no floor",
            found["n_positions"],
            f"{found['floor_rung']}, {floor:.4f}" if floor is not None else "none measured",
            "not measured: composition=1" if regrouped is None else f"batch composition, {regrouped:.3g}",
        )
        out.append("| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |")
    return [*out, ""]
