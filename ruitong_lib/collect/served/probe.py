"""What a server can do, found out by asking: routes, ids, the largest k, replay, the mode of logprobs, switches."""

import math
from typing import Any

import numpy as np

from ruitong_lib.collect.served.asking import Route, body, first_route, replay_body, settle
from ruitong_lib.collect.served.client import Client, Reply, ServerError, message
from ruitong_lib.collect.served.responses import Answer, Position, parse, parse_prompt
from ruitong_lib.collect.served.servers import choose_model, identify
from ruitong_lib.collect.served.vocabulary import Vocabulary
from ruitong_lib.prompts import Prompt, render

KS = (1, 5, 20, 50, 100, 200)
PROMPT = Prompt("probe", "", "", "Name three rivers and say in one sentence each where they end.")
_BARE_IDS = [40, 41, 42, 43, 44, 45, 46, 47]  # without a tokenizer: ids that every vocabulary has
# A raw distribution does not know the temperature: slope 1. A processed one at temperature 0.5 has slope 2.
SLOPE_TOLERANCE = 0.1


def _answer(reply: Reply | None) -> Answer | None:
    return parse(reply.body) if reply is not None and reply.ok else None


def _named(p: Position) -> dict[Any, float]:
    """Return the alternatives of a position that can be told apart, by id or text."""
    found: dict[Any, float] = {}
    for e in (*p.top, p.token):
        name = e.id if e.id >= 0 else e.bytes or e.text
        if name not in {None, "", b""} and not math.isnan(e.logprob):
            found[name] = e.logprob
    return found


def slope(x: dict[Any, float], y: dict[Any, float]) -> tuple[float, float, int]:
    """Regress one row of logprobs on another over the tokens that both list: slope, offset (nat), number."""
    both = [n for n in x if n in y]
    a, b = (np.array([v[n] for n in both], dtype=np.float64) for v in (x, y))
    if len(both) < 3 or float(np.ptp(a)) < 1e-3:
        return math.nan, math.nan, len(both)
    s = float(((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum())
    return s, float((b - a).mean()), len(both)


class Probe:
    """The questions, one after the other; each leaves its answer in ``report``."""

    def __init__(
        self, client: Client, *, model: str, words: Vocabulary | None, local: str = "", seed: int, thinking: bool
    ) -> None:
        self.client, self.words = client, words
        self.wanted, self.local = model, local
        self.seed, self.thinking = seed, thinking
        self.ids = render([PROMPT], words.tokenizer, thinking=thinking)[0] if words is not None else _BARE_IDS
        self.report: dict[str, Any] = {}
        self.routes: dict[str, Route] = {}
        self.route: Route | None = None
        self.accepted = 0  # the largest number of alternatives that was not refused, whatever came back

    def what(self, kind: str) -> Any:
        """Return the probe's prompt as a route takes it."""
        if kind == "chat":
            return [{"role": "user", "content": PROMPT.text}]
        if kind == "text":
            return self.words.tokenizer.decode(self.ids) if self.words is not None else PROMPT.text
        return self.ids

    async def run(self) -> dict[str, Any]:
        """Ask everything and return the report.

        Raises
        ------
        RuitongError
            When the server cannot be reached, has no such model, or takes none of the requests.
        """
        server = await identify(self.client)
        self.report["server"] = server
        name = choose_model(server["models"], self.wanted, self.local)
        self.report["model"] = name
        await self._routes(name)
        await self._largest_k()
        await self._replay()
        await self._mode()
        await self._switches()
        self.report["can"] = self._words()
        return self.report

    async def _routes(self, name: str) -> None:
        found: dict[str, Any] = {}
        refused: dict[str, str] = {}
        dropped: dict[str, dict[str, str]] = {}
        answers: dict[str, Answer] = {}
        for kind in ("completions", "chat", "text", "native"):
            if kind in {"text", "native"} and answers:
                continue
            first = first_route(kind, name, seed=self.seed, thinking=self.thinking)
            route, reply, lost = await settle(self.client, first, self.what(kind), k=1)
            answer = _answer(reply)
            if reply.status in {401, 403}:
                raise ServerError(f"the server refuses the key ({reply.status}: {message(reply)}); check api_key_env")
            if answer is None or (answer.positions is None and not answer.text and not answer.token_ids):
                refused[kind] = f"{reply.status}: {reply.problem or message(reply)}"
                continue
            if kind in {"completions", "native"} and answer.n_prompt not in {len(self.ids), None}:
                refused[kind] = f"read {answer.n_prompt} tokens where {len(self.ids)} ids were sent"
                continue
            answers[kind], self.routes[kind] = answer, route
            if lost:
                dropped[kind] = lost
            found[kind] = {"logprobs": answer.positions is not None, "ids": _ids_come(answer)}
        if not answers:
            raise ServerError(
                "the server answers none of the requests. " + "; ".join(f"{k}: {v}" for k, v in refused.items())
            )

        def rank(kind: str) -> tuple[bool, bool, bool]:
            ids = found[kind]["ids"] != "no"
            # Without ids, chat: its alternatives are a list, where the others key them by text and lose some.
            return found[kind]["logprobs"], ids, kind in {"completions", "native"} if ids else kind == "chat"

        best = max(answers, key=rank)
        self.route = self.routes[best]
        self.report |= {
            "routes": found, "refused": refused, "dropped": dropped, "route": best,
            "token_id_prompts": "completions" in found or "native" in found,
            "token_ids": found[best]["ids"],
            "prompt_count": answers[best].n_prompt is not None,
        }  # fmt: skip

    async def _largest_k(self) -> None:
        """Ask for more and more alternatives; what counts is how many distinct, finite ones come back."""
        asked: dict[str, Any] = {}
        largest = 0
        if self.route is not None and self.report["routes"][self.route.kind]["logprobs"]:
            for k in KS:
                reply = await self.client.post(
                    self.route.path, body(self.route, self.what(self.route.kind), limit=1, k=k), tries=3
                )
                answer = _answer(reply)
                if answer is None or not answer.positions:
                    asked[str(k)] = f"{reply.status}: {reply.problem or message(reply, 120)}"
                    break
                got = len({e.id if e.id >= 0 else (e.text, e.bytes, i) for i, e in enumerate(answer.positions[0].top)
                           if not math.isnan(e.logprob)})  # fmt: skip
                asked[str(k)] = got
                self.accepted = k
                largest = max(largest, min(got, k))
                if got < k:
                    break
        self.report |= {"k_asked": asked, "max_k": largest}

    async def _replay(self) -> None:
        """Whether the server scores a text that it is given: prompt_logprobs, or an echo."""
        how, largest = "", 0
        said: dict[str, str] = {}
        route = self.routes.get("completions")
        for name in ("prompt_logprobs", "echo") if route is not None else ():
            assert route is not None
            for k in KS[2:5] if name == "prompt_logprobs" or self.report["max_k"] >= 20 else KS[:2]:
                reply = await self.client.post(route.path, replay_body(route, self.ids, how=name, k=k), tries=3)
                scored = parse_prompt(reply.body, self.ids, k) if reply.ok else None
                if scored is None or scored.how != name or not scored.positions:
                    said.setdefault(f"{name} {k}", _why(reply, name, scored is not None))
                    break
                rows = [p for p in scored.positions[1:] if p is not None]
                got = min((len([e for e in p.top if not math.isnan(e.logprob)]) for p in rows), default=0)
                if len(rows) < len(self.ids) - 1 or got == 0:
                    said.setdefault(f"{name} {k}", f"{len(rows)} of {len(self.ids) - 1} tokens are scored")
                    break
                how, largest = name, max(largest, min(k, max(len(p.top) for p in rows)))
            if how:
                break
        self.report |= {"replay": how, "replay_max_k": largest, "replay_refused": said}

    async def _first(self, **more: Any) -> dict[Any, float]:
        if self.route is None:
            return {}
        k = min(20, self.accepted)
        ask = body(self.route, self.what(self.route.kind), limit=1, k=k, **more)
        answer = _answer(await self.client.post(self.route.path, ask, tries=3))
        return _named(answer.positions[0]) if answer is not None and answer.positions else {}

    async def _mode(self) -> None:
        """Raw or processed: the same position at temperature 1, 0.5 and 0. Processed logprobs scale with 1/T."""
        mode, slopes = "unknown", {}
        if self.accepted >= 3:
            at = {t: await self._first(temperature=t) for t in (1, 0.5, 0)}
            for t in (0.5, 0):
                s, offset, n = slope(at[1], at[t])
                listed = sum(v > -1e4 for v in at[t].values())
                if math.isnan(s) and t == 0 and len(at[1]) >= 3 and listed < 3:
                    mode = "processed"  # at temperature 0 nothing but the best is left
                slopes[f"T={t:g}"] = {
                    "slope": None if math.isnan(s) else round(s, 4),
                    "offset": None if math.isnan(offset) else round(offset, 4),
                    "n": n,
                }
            greedy = slopes["T=0"]
            if greedy["slope"] is not None:
                off = abs(greedy["offset"] or 0.0)
                same = abs(greedy["slope"] - 1) < SLOPE_TOLERANCE
                mode = "raw" if same and off < 0.5 else "processed" if same or greedy["slope"] > 2 else "unknown"
        half = slopes.get("T=0.5", {}).get("slope")
        self.report |= {
            "logprob_mode": mode,  # of greedy requests, which are what is measured
            "temperature_in_logprobs": "unknown"
            if half is None
            else "no"
            if abs(half - 1) < SLOPE_TOLERANCE
            else "yes",
            "slopes": slopes,
        }

    async def _switches(self) -> None:
        self.report["seeds"] = await self._seeds()
        self.report["thinking"] = await self._thinking()
        if self.report["server"]["prefix_cache"] == "unknown" and self.route is not None:
            reply = await self.client.post(self.route.path, body(self.route, self.what(self.route.kind), limit=1, k=0))
            answer = _answer(reply)
            if answer is not None and answer.cached:
                self.report["server"]["prefix_cache"] = "on"

    async def _seeds(self) -> str:
        assert self.route is not None
        if "seed" not in self.route.extra:
            return "refused"
        texts = []
        for seed in (1, 1, 2):
            ask = body(self.route, self.what(self.route.kind), limit=12, k=0, temperature=1, seed=seed)
            answer = _answer(await self.client.post(self.route.path, ask, tries=3))
            texts.append((answer.token_ids, answer.text, answer.reasoning) if answer is not None else None)
        if None in texts or texts[0] == texts[2] == texts[1]:
            return "unknown"
        return "honoured" if texts[0] == texts[1] else "ignored"

    async def _thinking(self) -> str:
        """Whether the chat route's thinking switch changes what the server reads."""
        route = self.routes.get("chat")
        if route is None or "chat_template_kwargs" not in route.extra:
            return "no switch"
        read = []
        for on in (False, True):
            ask = body(route, self.what("chat"), limit=1, k=0, chat_template_kwargs={"enable_thinking": on})
            answer = _answer(await self.client.post(route.path, ask, tries=3))
            read.append((answer.n_prompt, answer.prompt_ids) if answer is not None else None)
        if None in read:
            return "unknown"
        if read[0] != read[1]:
            return "honoured"
        if self.words is None:
            return "no effect"
        ours = [render([PROMPT], self.words.tokenizer, thinking=on)[0] for on in (False, True)]
        return "ignored" if ours[0] != ours[1] else "no effect"

    def _words(self) -> dict[str, str]:
        """Say what can be measured with this server."""
        r = self.report
        best = r["routes"][r["route"]]
        if best["logprobs"]:
            ids = "by id" if best["ids"] != "no" else "by the texts of tokens, matched to ids where only one fits"
            decode = f"yes: its own greedy text with {r['max_k']} alternatives a position, {ids}"
        else:
            decode = "texts only: it sends no logprobs"
        if r["replay"]:
            replay = f"yes: {r['replay']} with {r['replay_max_k']} alternatives a position"
        else:
            replay = "no: it does not score a text that it is given, so measure scoring='decode'"
        identity = (
            "ids are sent" if r["route"] in {"completions", "native"}
            else "messages are sent, and the number of tokens that it read is checked" if r["prompt_count"]
            else "cannot be checked: it does not say how many tokens it read"
        )  # fmt: skip
        return {"decode": decode, "replay": replay, "prompt identity": identity}


def _ids_come(answer: Answer) -> str:
    if answer.token_ids is not None:
        return "return_token_ids"
    if answer.positions and all(p.token.id >= 0 for p in answer.positions):
        return "in logprobs"
    return "no"


def _why(reply: Reply, name: str, parsed: bool) -> str:
    if not reply.ok:
        return f"{reply.status}: {reply.problem or message(reply, 120)}"
    return f"{name} was ignored" if not parsed or name == "prompt_logprobs" else "only the new tokens came back"
