"""Out of memory: a clear error that names the batch size that fits, never a silently smaller batch."""

import gc
from collections.abc import Callable, Sequence

import torch

from ruitong_lib.errors import RuitongError

# Every backend has its own words; the CPU's allocator and some plugins raise a plain RuntimeError.
_WORDS = ("out of memory", "defaultcpuallocator", "can't allocate memory", "cannot allocate memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(w in str(error).lower() for w in _WORDS)


def attempt(work: Callable[[], object]) -> str:
    """Run ``work``; return what an out-of-memory error said, or an empty string. Other errors pass."""
    try:
        work()
    except (RuntimeError, MemoryError) as e:
        if not is_out_of_memory(e):
            raise
        return (str(e).splitlines() or [type(e).__name__])[0] or type(e).__name__
    return ""


def each(
    batches: Sequence[list[int]],
    work: Callable[[list[int]], object],
    *,
    what: str,
    lengths: Sequence[int],
    trial: Callable[[list[int]], object],
    device: torch.device,
) -> None:
    """Do each batch; where one runs out of memory, find the size that fits and say it.

    Halves of the batch size are tried, each with the longest prompts of the set, so that any batch of that size fits.

    Parameters
    ----------
    batches
        Rows that run together; the first is the largest.
    work
        Does one batch.
    what
        "decode" or "replay".
    lengths
        Tokens of each prompt with what follows it.
    trial
        Does rows without leaving a trace, and without ending early.
    device
        Whose cache of free memory is emptied between tries.

    Raises
    ------
    RuitongError
        When a batch runs out of memory. The cell is lost: its batch size is what was to be measured.
    """
    for rows in batches:
        cause = attempt(lambda rows=rows: work(rows))  # type: ignore[misc]
        if not cause:
            continue
        # The error is gone here, and with it the frames that held the batch's tensors.
        longest = sorted(range(len(lengths)), key=lambda r: -lengths[r])
        size = len(rows) // 2
        while size:
            gc.collect()
            if device.type != "cpu":
                torch.get_device_module(device).empty_cache()
            some = longest[:size]
            if not attempt(lambda some=some: trial(some)):  # type: ignore[misc]
                break
            size //= 2
        advice = "not even batch_size=1 fits: spread the model (max_memory), or take shorter prompts"
        if size:
            advice = f"batch_size={size} fits (tried with the {size} longest prompts)"
        raise RuitongError(
            f"out of memory in {what} with {len(rows)} prompts in a batch on {device} ({cause}). {advice}. The batch "
            "size is a measured axis, so it is never lowered by itself, and nothing was saved"
        )
