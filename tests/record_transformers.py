"""Tiny checkpoints made by transformers, and what transformers says about them; needs the `parity` extra.

`python tests/record_transformers.py` writes both to tests/fixtures/transformers, where every run of the tests reads
them. Where the extra is installed, the tests make other checkpoints with the same functions, and ask again.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from draft_torch import TorchDraft
from model_lab import draft_tensors, write_checkpoint
from parity_lab import CYCLES, DRAFT, DRAFT_VARIANTS, FIXTURES, SEED, TOKENS, VARIANTS, YARN, draft_inputs
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # on purpose not hidden_size / num_attention_heads
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.12,  # with the usual 0.02 the logits nearly tie
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
LARGER = SMALL | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "patch_size": 2,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "in_channels": 1,
    "num_position_embeddings": 4,
}


def make_target(variant: str, folder: Path, sizes: dict[str, Any] = SMALL, seed: int = SEED) -> None:
    """Write a random checkpoint as transformers writes it."""
    torch.manual_seed(seed)
    text = {**copy.deepcopy(sizes), "tie_word_embeddings": variant == "tied"}
    model: Any
    if variant == "wrapped":
        vision = {**VISION, "out_hidden_size": sizes["hidden_size"]}
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Where transformers starts, at 0 and 1, w and 1 + w cannot be told apart.
            if "norm" in name:
                weight.add_(0.2 * torch.randn_like(weight))
            elif name.endswith("dt_bias"):
                weight.copy_(torch.randn_like(weight))
    if variant == "bf16":
        model.to(torch.bfloat16)
    shard = f"{sum(p.numel() for p in model.parameters()) * 4 // 4096}KB" if variant == "sharded" else "1GB"
    model.save_pretrained(folder, max_shard_size=shard)
    if variant == "wrapped":
        _add_mtp(folder / "model.safetensors", sizes["hidden_size"])


def _add_mtp(file: Path, hidden: int) -> None:
    """The multi-token-prediction tensors that published files have and transformers leaves out."""
    mtp = {"mtp.fc.weight": torch.randn(hidden, 2 * hidden), "mtp.norm.weight": torch.randn(hidden)}
    save_file({**load_file(file), **mtp}, file, {"format": "pt"})


def reference(
    folder: Path, tokens: Sequence[int], sizes: Sequence[int], rope: dict[str, Any] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [tokens, vocab], and the outputs of all layers but the last side by side, of transformers in float32.

    The tokens arrive in blocks of these sizes, the last repeated; `rope` goes over the rope_parameters.
    """
    config = Qwen3_5ForCausalLM.config_class.from_pretrained(folder)
    config.rope_parameters = {**config.rope_parameters, **(rope or {})}
    model = Qwen3_5ForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    cache, at, logits, outputs, left = None, 0, [], [], list(sizes)
    while at < len(tokens):
        size = left.pop(0) if len(left) > 1 else left[0]
        ids = torch.tensor([tokens[at : at + size]])
        with torch.no_grad():
            out = model(ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
        cache, at = out.past_key_values, at + size
        logits.append(out.logits[0].numpy())
        # The first is the embedding, the last has gone through the final norm.
        outputs.append(torch.cat(out.hidden_states[1:-1], dim=-1)[0].numpy())
    return np.concatenate(logits), np.concatenate(outputs)


def draft_reference(folder: Path, changes: dict[str, Any], seed: int = SEED) -> np.ndarray:
    """The hidden states of rows 1.. of all cycles, one behind the other, of the torch form."""
    draft = TorchDraft({**DRAFT, **changes}, load_file(folder / "model.safetensors"))
    embedding, taps = (torch.from_numpy(x) for x in draft_inputs(seed))
    at, hidden = 0, []
    for cycle, (new, rows) in enumerate(CYCLES):
        block = embedding[[cycle] + [DRAFT["dflash_config"]["mask_token_id"]] * (rows - 1)]
        hidden.append(draft.step(taps[at : at + new], block)[1:])
        at += new
    return torch.cat(hidden).numpy()


def record() -> None:
    """Write all fixtures anew."""
    shutil.rmtree(FIXTURES, ignore_errors=True)
    logits: dict[str, np.ndarray] = {}
    for variant in VARIANTS:
        make_target(variant, FIXTURES / variant)
        logits[variant], outputs = reference(FIXTURES / variant, TOKENS, [len(TOKENS)])
        if variant == "plain":
            logits["plain outputs"] = outputs
    logits["plain yarn"], _ = reference(FIXTURES / "plain", TOKENS, [len(TOKENS)], YARN)
    np.savez_compressed(FIXTURES / "target.npz", **logits)
    write_checkpoint(FIXTURES / "draft", DRAFT, draft_tensors(DRAFT, SEED))
    hidden = {name: draft_reference(FIXTURES / "draft", changes) for name, changes in DRAFT_VARIANTS.items()}
    np.savez_compressed(FIXTURES / "draft.npz", **hidden)
    used = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    (FIXTURES / "recorded.json").write_text(json.dumps({"seed": SEED, **used}, indent=2) + "\n")
    print(f"{sum(f.stat().st_size for f in FIXTURES.rglob('*') if f.is_file())} bytes", file=sys.stderr)


if __name__ == "__main__":
    record()
