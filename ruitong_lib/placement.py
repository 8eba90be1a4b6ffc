"""Where a model that does not fit one device may lie: the parameter ``max_memory``."""

import re

from ruitong_lib.errors import RuitongError, did_you_mean

_BYTES = {f"{p}{unit}": base**i for unit, base in (("B", 1000), ("iB", 1024)) for i, p in enumerate("KMGT", 1)}


def memory_limits(text: str, device: str = "auto") -> dict[int | str, int] | None:
    """Parse ``max_memory``: bytes a device, e.g. ``0=40GiB,cpu=60GiB``.

    Parameters
    ----------
    text
        Empty, ``auto``, or parts ``name=size``: an index of ``device``'s kind, ``cpu`` or ``disk``; units KB to TB
        (powers of 1000) and KiB to TiB (powers of 1024).
    device
        The cell's device; ``cpu`` and ``mps`` have no index.

    Returns
    -------
    Device → bytes; ``{}`` for ``auto``; None for one device.

    Raises
    ------
    RuitongError
        For a part that cannot be read, an unknown device or unit, a device given twice, or a size of 0.
    """
    if not text:
        return None
    kind, _, index = device.partition(":")
    if index:
        raise RuitongError(
            f"max_memory={text!r} spreads the model over devices, but device={device!r} asks for one; leave the index "
            f"out (device={kind!r}) and name it in max_memory ({index}=40GiB)"
        )
    limits: dict[int | str, int] = {}
    for part in [] if text == "auto" else text.split(","):
        found = re.fullmatch(r"\s*([A-Za-z0-9]+)\s*=\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", part)
        if found is None:
            raise RuitongError(
                f"max_memory must be empty (one device), 'auto', or limits such as '0=40GiB,cpu=60GiB', got {part!r}"
                + ("" if part == text else f" in {text!r}")
            )
        name, size, unit = found.groups()
        if unit not in _BYTES:
            close = did_you_mean(unit, _BYTES)
            raise RuitongError(f"max_memory: unknown unit {unit!r} in {part!r}.{close} Known are: {', '.join(_BYTES)}")
        if name not in {"cpu", "disk"} and not name.isdecimal():
            raise RuitongError(
                f"max_memory: unknown device {name!r} in {part!r}. Known are: cpu, disk, and the index of a device of "
                "the cell's kind (0, 1, …)"
            )
        if name.isdecimal() and kind in {"cpu", "mps"}:
            raise RuitongError(f"max_memory: device {kind!r} has no index, got {part!r}; name cpu and disk alone")
        key = int(name) if name.isdecimal() else name
        if key in limits:
            raise RuitongError(f"max_memory: {name!r} is given twice in {text!r}")
        limits[key] = int(float(size) * _BYTES[unit])
        if limits[key] < 1:
            raise RuitongError(f"max_memory: {part!r} is no memory at all; leave {name!r} out")
    return limits
