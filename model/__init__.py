"""The model layer: a Qwen3.5 target and a DFlash draft in numpy; attention goes through `dispatch`.

Example:
    target, draft = load_target("Qwen3.5-4B"), load_draft("Qwen3.5-4B-DFlash")
    result = Engine(target, draft).generate(Tokenizer("Qwen3.5-4B").encode("def main():"))
"""

from __future__ import annotations

from .chat import ChatTemplate
from .checkpoint import LoadProgress
from .conversation import Conversation
from .demo_pair import demo_pair_path, demo_prompts, load_demo_pair
from .engine import Engine
from .loading import load_draft, load_target
from .loop import Generation
from .ngram import NgramDraft
from .result import GenerationResult
from .tokenizer import Tokenizer

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
