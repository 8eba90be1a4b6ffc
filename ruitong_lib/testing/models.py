"""Tiny random models with a tokenizer, and the exact KL between two precisions of a model."""

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ruitong_lib.errors import RuitongError
from ruitong_lib.prompts import load_prompts, render

FAMILIES = ("qwen3", "llama", "deepseek_v2", "deepseek_v3", "qwen3_moe")
MIXTURES = ("deepseek_v2", "deepseek_v3", "qwen3_moe")  # those whose layers route tokens to experts
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the same model gives the same answer on every machine.",
    "List three reasons why the result of a sum depends on the order in which the numbers are added.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "同一个模型，同样的权重，同样的提示，不同的加速器：答案会改变多少？",
    "Один и тот же ответ на каждом ускорителе.",
)
# As Qwen3's: the template writes the beginning of text itself, and a switch decides whether the model thinks.
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tiny_model(
    family: str,
    folder: str | Path,
    *,
    seed: int = 0,
    vocab_size: int = 512,
    hidden_size: int = 64,
    layers: int = 2,
    chat_template: bool = True,
) -> Path:
    """Save a tiny random causal LM and a small byte-level BPE tokenizer, loadable by ``AutoModelForCausalLM``.

    The weights are drawn wide, and the output embedding twice as wide, so that the distributions are not flat and
    rounding shows; fp16 does not overflow.

    Parameters
    ----------
    family
        "qwen3", "llama", "qwen3_moe", "deepseek_v2" or "deepseek_v3" (latent attention); the last three are mixtures
        of eight experts, two of them chosen.
    folder
        Where to; made when missing.
    seed
        Seed of the weights. The generator of the caller is left as it was.
    vocab_size, hidden_size, layers
        Sizes of the model; ``vocab_size`` from 300 (the tokenizer has at most 400 entries).
    chat_template
        Give the tokenizer a chat template with a thinking switch.
    """
    if family not in FAMILIES:
        raise RuitongError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if vocab_size < 300:
        raise RuitongError(f"vocab_size must be at least 300 (256 bytes and the special tokens), got {vocab_size}")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = _tokenizer(min(vocab_size, 400), chat_template=chat_template)
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
        **{f"{t}_token_id": getattr(tokenizer, f"{t}_token_id") for t in ("bos", "eos", "pad")},
    }  # fmt: skip
    if not family.startswith("deepseek"):
        sizes["head_dim"] = 16
    if family in MIXTURES:
        sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": hidden_size // 2}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 8, "norm_topk_prob": True}
    if family.startswith("deepseek"):
        sizes |= {
            "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": hidden_size // 2, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 16,
        }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def _tokenizer(vocab_size: int, *, chat_template: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<pad>", "<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    # Like many checkpoints, it writes a beginning of text by itself: a template that does so too would double it.
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="<|im_end|>",
        chat_template=_TEMPLATE if chat_template else None,
    )  # fmt: skip


def exact_kl(
    shard: xr.Dataset, folder: str | Path, prompts: str, precisions: tuple[str, str] = ("fp32", "bf16")
) -> NDArray[np.float64]:
    """Return the KL over the full vocabulary between two precisions of a model, along the text that a shard replayed.

    Each side is a plain forward pass in that dtype, one prompt at a time; float64 from the logits on.

    Parameters
    ----------
    shard
        A shard (cell: 1) with a replay: its tokens are the text.
    folder
        The model.
    prompts
        The shard's prompt set.
    precisions
        Names of dtypes as a cell has them (no w8a8, no fp8).

    Returns
    -------
    (prompt, position) in nat, mean of both directions; NaN in the padding.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ruitong_lib.collect.precision import load_dtype

    rows = render(load_prompts(prompts).prompts, AutoTokenizer.from_pretrained(folder))
    sides = [AutoModelForCausalLM.from_pretrained(folder, dtype=load_dtype(p)).eval() for p in precisions]
    replayed = shard.isel(cell=0).sel(scoring="replay")
    out = np.full((len(rows), shard.sizes["position"]), np.nan)
    for i, ids in enumerate(rows):
        n = int(replayed["n_tokens"][i])
        text = torch.tensor([ids + replayed["token_id"].values[i, : n - 1].tolist()])
        with torch.inference_mode():
            hidden = [m.get_decoder()(input_ids=text, use_cache=False).last_hidden_state for m in sides]
            heads = zip(sides, hidden, strict=True)
            p, q = (m.get_output_embeddings()(h[0, len(ids) - 1 :]).double().log_softmax(-1) for m, h in heads)
        out[i, :n] = (((p.exp() - q.exp()) * (p - q)).sum(-1) / 2).numpy()
    return out
