"""Requests to a server: every sampling parameter said out loud, and none dropped before the server refused it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ruitong_lib.collect.served.client import Client, Reply, message
from ruitong_lib.prompts import Prompt

PATHS = {"completions": "/completions", "text": "/completions", "chat": "/chat/completions", "native": "//completion"}

# Greedy, and nothing that a server's or a model's own defaults could add. -1 and 0 both mean "no top_k" somewhere.
SAMPLING: dict[str, Any] = {
    "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "frequency_penalty": 0,
    "presence_penalty": 0, "n": 1, "stop": None, "stream": False, "ignore_eos": False,
}  # fmt: skip
# Asked for on top, so that ids come back.
IDS: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
NEEDED = {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n_predict", "temperature", "logprobs",
          "top_logprobs", "n_probs", "prompt_logprobs", "echo", "stream"}  # fmt: skip


class Route(NamedTuple):
    """How a server is asked: by which path, and with what it takes."""

    kind: str  # completions (token ids), text (a rendered text), chat (messages), native (llama.cpp, token ids)
    model: str
    extra: dict[str, Any]  # sampling parameters and switches that the server took
    thinking: bool = False
    limit: str = "max_tokens"  # what the server calls the longest answer

    @property
    def path(self) -> str:
        """Path of the route."""
        return PATHS[self.kind]


def first_route(kind: str, model: str, *, seed: int, thinking: bool) -> Route:
    """Return a route with everything that we would like to send."""
    extra = {**SAMPLING, "seed": seed % 2**31, **IDS}  # several servers take 32 bits
    if kind == "native":
        extra = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repeat_penalty": 1, "frequency_penalty": 0,
                 "presence_penalty": 0, "seed": seed % 2**31, "stop": [], "stream": False, "return_tokens": True,
                 "cache_prompt": False, "post_sampling_probs": False}  # fmt: skip
        return Route(kind, model, extra, thinking, "n_predict")
    if kind == "chat":
        extra["chat_template_kwargs"] = {"enable_thinking": thinking}
    return Route(kind, model, extra, thinking)


def messages(prompt: Prompt) -> list[dict[str, str]]:
    """Return a prompt as chat messages."""
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.text}]


def body(route: Route, what: Any, *, limit: int, k: int, **more: Any) -> dict[str, Any]:
    """Return a request.

    Parameters
    ----------
    route
        How the server is asked.
    what
        Token ids, a text, or messages, as the route takes them.
    limit
        Longest answer, in tokens.
    k
        Alternatives a position; 0 asks for no logprobs.
    **more
        Fields that replace or add to the route's.
    """
    ask: dict[str, Any] = {} if route.kind == "native" else {"model": route.model}
    ask |= {"messages" if route.kind == "chat" else "prompt": what, route.limit: limit, **route.extra}
    if k and route.kind == "chat":
        ask |= {"logprobs": True, "top_logprobs": k}
    elif k:
        ask["n_probs" if route.kind == "native" else "logprobs"] = k
    return ask | more


def replay_body(route: Route, ids: Sequence[int], *, how: str, k: int) -> dict[str, Any]:
    """Return a request that scores the ids that it sends; one token is generated, for servers take no zero."""
    ask = body(route, list(ids), limit=1, k=k if how == "echo" else 0)
    return ask | ({"echo": True} if how == "echo" else {"prompt_logprobs": k})


async def settle(client: Client, route: Route, what: Any, *, k: int) -> tuple[Route, Reply, dict[str, str]]:
    """Find out which parameters a server takes: those that it answers with a 400 are dropped, one by one.

    Returns
    -------
    The route with what it takes, the last reply, and what was dropped with the server's own words.
    """
    dropped: dict[str, str] = {}
    reply = await client.post(route.path, body(route, what, limit=2, k=k), tries=3)
    for _ in range(len(route.extra) + 2):
        if reply.status not in {400, 422}:
            break
        words = message(reply)
        named = [n for n in (*route.extra, route.limit) if re.search(rf"\b{n}\b", words)]
        if not named:
            return await _without(client, route, what, k, reply, dropped)
        name = named[0]
        if name == "top_k" and route.extra["top_k"] == -1:
            route = route._replace(extra={**route.extra, "top_k": 0})
        elif name == route.limit and route.limit == "max_tokens" and "max_completion_tokens" in words:
            route = route._replace(limit="max_completion_tokens")
        elif name in NEEDED:
            break
        else:
            dropped[name] = words
            route = route._replace(extra={n: v for n, v in route.extra.items() if n != name})
        reply = await client.post(route.path, body(route, what, limit=2, k=k), tries=3)
    return route, reply, dropped


async def _without(
    client: Client, route: Route, what: Any, k: int, refused: Reply, dropped: dict[str, str]
) -> tuple[Route, Reply, dict[str, str]]:
    """Send what is needed and add the rest back as long as it is taken: the server named no parameter."""
    kept: Mapping[str, Any] = {n: v for n, v in route.extra.items() if n in NEEDED}
    bare = route._replace(extra=dict(kept))
    reply = await client.post(route.path, body(bare, what, limit=2, k=k), tries=3)
    if reply.status != 200:
        return route, refused, dropped
    for name, value in route.extra.items():
        if name in kept:
            continue
        more = bare._replace(extra={**bare.extra, name: value})
        tried = await client.post(route.path, body(more, what, limit=2, k=k), tries=3)
        if tried.status == 200:
            bare, reply = more, tried
        else:
            dropped[name] = message(tried)
    return bare, reply, dropped
