"""Send a run's requests: some at a time, what is missing only, and stop where the server or the prompt is not right."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ruitong_lib.cell import Cell
from ruitong_lib.collect.served.asking import Route, body, messages
from ruitong_lib.collect.served.client import Client, Reply, ServerError, message
from ruitong_lib.collect.served.raw import Raw, body_of, request_sha256
from ruitong_lib.collect.served.responses import Answer, parse
from ruitong_lib.collect.served.vocabulary import Vocabulary
from ruitong_lib.prompts import PromptSet, render

log = logging.getLogger("ruitong")
Progress = Callable[[str, int, int], None]
_IN_A_ROW = 3  # prompts that fail one after the other: the server is ill, not the prompts


class Job(NamedTuple):
    """What a run needs to know, settled before the first prompt is sent."""

    cell: Cell
    prompts: PromptSet
    words: Vocabulary
    ids: list[list[int]]
    label: str
    key: str
    folder: Path  # of the raw responses
    options: dict[str, dict[str, int]]
    anchor: Any  # forward.Anchor, of another shard; None: the cell replays its own text, or nothing


class Ask(NamedTuple):
    """One request of a run."""

    place: int  # of the prompt in its set
    prompt: str
    scoring: str
    path: str
    body: dict[str, Any]


def what(route: Route, job: Job, i: int) -> Any:
    """Return a prompt as a route takes it: ids, messages, or the rendered text."""
    if route.kind == "chat":
        return messages(job.prompts.prompts[i])
    return job.words.tokenizer.decode(job.ids[i]) if route.kind == "text" else job.ids[i]


async def ask_all(
    client: Client, raw: Raw, asks: Sequence[Ask], job: Job, progress: Progress | None
) -> dict[int, Path]:
    """Ask for what is not there yet, ``batch_size`` requests at a time, in the order of the composition.

    Returns
    -------
    Place of the prompt → file of its response.

    Raises
    ------
    ServerError
        When the server is gone, hangs, refuses a request, or fails prompt after prompt. What came back is kept.
    """
    from ruitong_lib.collect.forward import batch_rows

    batches = batch_rows(len(asks), job.cell.batch_size, job.cell.composition)
    shas = [request_sha256(a.path, a.body) for a in asks]
    files = [raw.path(a.place, a.prompt, a.scoring) for a in asks]
    scoring = asks[0].scoring if asks else ""
    done: set[int] = set()
    for j, a in enumerate(asks):
        kept = raw.read(files[j], a.prompt, shas[j])
        if kept is not None and not body_of(kept)[1]:  # a failure is asked for again
            done.add(j)
    waiting = iter([j for rows in batches for j in rows if j not in done])
    failed = 0

    async def worker() -> None:
        nonlocal failed
        for j in waiting:
            a = asks[j]
            started = time.time()
            reply = await client.post(a.path, a.body)
            refuse(a, reply)
            check_prompt(job, a, reply)
            await asyncio.to_thread(raw.write, files[j], a, sha=shas[j], reply=reply, started=started)
            done.add(j)
            failed = 0 if reply.ok else failed + 1
            if failed >= min(_IN_A_ROW, len(asks)):
                cause = reply.problem if reply.status == 200 else f"{reply.status}: {message(reply)}"
                raise ServerError(f"{failed} prompts in a row failed, the last is {a.prompt!r} ({cause}).")
            if progress is not None:
                progress(scoring, len(done), len(asks))

    tasks = [asyncio.create_task(worker()) for _ in range(min(job.cell.batch_size, len(asks) - len(done)))]
    try:
        await asyncio.gather(*tasks)
    except ServerError as e:
        raise ServerError(
            f"{e} {len(done)} of {len(asks)} prompts of the {scoring} are kept; the same command goes on from there"
        ) from None
    finally:
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {a.place: f for a, f in zip(asks, files, strict=True)}


def refuse(a: Ask, reply: Reply) -> None:
    """Stop at what no repetition mends: a redirect, a 4xx, or a 429 after all tries."""
    if 300 <= reply.status < 500:
        what_ = "is too busy for" if reply.status in {408, 429} else "refuses"
        raise ServerError(f"the server {what_} prompt {a.prompt!r} ({reply.status}: {message(reply)}).")


def check_prompt(job: Job, a: Ask, reply: Reply) -> None:
    """Refuse the run when the server read other tokens than the local tokenizer gives.

    Raises
    ------
    ServerError
        Naming the prompt, both numbers of tokens, and the likely cause.
    """
    answer = parse(reply.body) if reply.ok else None
    if answer is None:
        return
    ours = list(a.body["prompt"]) if a.scoring == "replay" else job.ids[a.place]
    theirs, n = answer.prompt_ids, answer.n_prompt
    if theirs is None and n is None:
        raise ServerError(
            "the server does not say how many tokens it read (usage.prompt_tokens), so nobody can know whether both "
            "sides read the same prompt. Use a server that says it."
        )
    if (theirs is None or theirs == ours) and n in {None, len(ours)}:
        return
    raise ServerError(f"prompt {a.prompt!r}: {_other_prompt(job, a.place, ours, theirs, n)}")


def _other_prompt(job: Job, i: int, ours: list[int], theirs: list[int] | None, n: int | None) -> str:
    bos = job.words.tokenizer.bos_token_id
    count = len(theirs) if theirs is not None else n
    other = render([job.prompts.prompts[i]], job.words.tokenizer, thinking=not job.cell.thinking)[0]
    if theirs is not None and bos is not None and theirs[:2] == [bos, bos]:
        why = "double BOS: the server writes a beginning of text before the template's own"
    elif other != ours and (theirs == other or (theirs is None and n == len(other))):
        why = f"the thinking switch: the server renders it as with thinking={not job.cell.thinking}"
    elif theirs is not None and len(theirs) > len(ours) and theirs[-len(ours) :] == ours:
        why = f"the server puts {len(theirs) - len(ours)} tokens before it"
    elif count == len(ours) + 1:
        why = "one token more: a second BOS?"
    else:
        why = "another chat template (a date, a system message, a thinking block), or another tokenizer"
    return (
        f"the server read {count} tokens, the local tokenizer gives {len(ours)}. Likely cause: {why}. The two sides "
        "would not have read the same text, so nothing is measured. Use the model's own tokenizer and template on both "
        "sides, or a server that takes token ids."
    )


async def warm_up(client: Client, job: Job, route: Route, k: int) -> dict[str, Any]:
    """Discard one cold request, and compare two warm ones, to see whether the server repeats itself."""
    limit = min(job.cell.max_new_tokens, 16)
    ask = Ask(0, job.prompts.prompts[0].id, "decode", route.path, body(route, what(route, job, 0), limit=limit, k=k))
    answers = []
    for _ in range(3):
        reply = await client.post(ask.path, ask.body)
        refuse(ask, reply)
        if not reply.ok:  # the run itself tells one prompt that cannot be answered from a server that is ill
            return {"repeats_itself": None, "difference": f"no answer: {reply.problem or message(reply)}"}
        check_prompt(job, ask, reply)
        answers.append(parse(reply.body))
    result = repeats(answers[1], answers[2])
    if result["repeats_itself"] is False:
        log.warning(
            "%s: the server does not repeat itself (%s): measure at least 3 repeats (repeat=1, 2, 3); they are its own "
            "floor",
            job.label,
            result["difference"],
        )
    return result


def repeats(a: Answer | None, b: Answer | None) -> dict[str, Any]:
    """Compare two answers to one request: tokens, texts and every logprob."""
    if a is None or b is None:
        return {"repeats_itself": None, "difference": "no answer"}
    if (a.text, a.reasoning, a.token_ids) != (b.text, b.reasoning, b.token_ids):
        return {"repeats_itself": False, "difference": "another text"}
    pairs = [
        (x.logprob, y.logprob)
        for p, q in zip(a.positions or [], b.positions or [], strict=False)
        for x, y in zip((p.token, *p.top), (q.token, *q.top), strict=False)
        if not math.isnan(x.logprob) and not math.isnan(y.logprob)
    ]
    if not pairs:
        return {"repeats_itself": True, "difference": "the same text; no logprobs to compare"}
    largest = float(max(abs(x - y) for x, y in pairs))
    words = f"up to {largest:.3g} nat over {len(pairs)} logprobs" if largest else f"none over {len(pairs)} logprobs"
    return {"repeats_itself": largest == 0, "difference": words, "largest_nat": largest}
