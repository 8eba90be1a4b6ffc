"""Faults of the rendered prompts: each returns the token ids that a wrongly set up server would read.

A comparison refuses other prompt ids, so these are caught before any number is made. They are measured as well, as if
someone had got round that check.
"""

from collections.abc import Sequence
from typing import Any

from ruitong_lib.errors import RuitongError
from ruitong_lib.prompts import Prompt, render


def template(prompts: Sequence[Prompt], tokenizer: Any, severity: float) -> list[list[int]]:
    """Leave out the template's last token (severity 1), or the whole template (2)."""
    if severity < 2:
        return [ids[:-1] for ids in render(prompts, tokenizer)]
    plain = [f"{p.system}\n{p.text}" if p.system else p.text for p in prompts]
    return [[int(i) for i in tokenizer.encode(text, add_special_tokens=False)] for text in plain]


def double_bos(prompts: Sequence[Prompt], tokenizer: Any, severity: float) -> list[list[int]]:
    """Put ``severity`` more beginning-of-text tokens before each prompt."""
    if tokenizer.bos_token_id is None:
        raise RuitongError("this fault needs a beginning-of-text token, which the tokenizer does not have")
    return [[tokenizer.bos_token_id] * int(severity) + ids for ids in render(prompts, tokenizer)]


def truncated(prompts: Sequence[Prompt], tokenizer: Any, severity: float) -> list[list[int]]:
    """Cut off the first ``severity`` (a share) of each prompt's tokens."""
    return [ids[round(severity * len(ids)) :] for ids in render(prompts, tokenizer)]
