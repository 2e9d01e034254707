"""The model layer: a Qwen3.5 target and a DFlash draft in numpy; attention goes through `dispatch`.

Example:
    target, draft = load_target("Qwen3.5-4B"), load_draft("Qwen3.5-4B-DFlash")
    result = Engine(target, draft).generate(Tokenizer("Qwen3.5-4B").encode("def main():"))
"""

from __future__ import annotations

from hipfire_kernels.model.chat import ChatTemplate
from hipfire_kernels.model.checkpoint import LoadProgress
from hipfire_kernels.model.conversation import Conversation
from hipfire_kernels.model.demo_pair import demo_pair_path, demo_prompts, load_demo_pair
from hipfire_kernels.model.engine import Engine
from hipfire_kernels.model.loading import load_draft, load_target
from hipfire_kernels.model.loop import Generation
from hipfire_kernels.model.ngram import NgramDraft
from hipfire_kernels.model.result import GenerationResult
from hipfire_kernels.model.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Conversation",
    "Engine",
    "Generation",
    "GenerationResult",
    "LoadProgress",
    "NgramDraft",
    "Tokenizer",
    "demo_pair_path",
    "demo_prompts",
    "load_demo_pair",
    "load_draft",
    "load_target",
]
