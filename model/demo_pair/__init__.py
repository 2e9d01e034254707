"""The demo pair: a small trained Qwen3.5-style target (8.0 M parameters) and its DFlash draft, for Python.

Target: 8 layers, every fourth with softmax attention, head_dim 256, 4 query heads on 1 KV head, its own
tokenizer of 4,096 entries. Draft: 2 layers, head_dim 128, block size 16. `prompts.json` holds held-out
prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hipfire_kernels.model.dflash import DFlashDraft
    from hipfire_kernels.model.qwen35 import Target


def demo_pair_path() -> Path:
    """The folder that holds `target`, `draft` and `prompts.json`."""
    return Path(__file__).parent


def demo_prompts() -> list[str]:
    """Python source fragments that the pair was not trained on."""
    prompts: list[str] = json.loads((demo_pair_path() / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    return prompts


def load_demo_pair() -> tuple[Target, DFlashDraft]:
    """The target and its draft, loaded."""
    from hipfire_kernels.model.loading import load_draft, load_target

    return load_target(demo_pair_path() / "target"), load_draft(demo_pair_path() / "draft")
