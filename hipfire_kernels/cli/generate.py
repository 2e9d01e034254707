"""`hfk demo` and `hfk generate`: run the speculative loop and watch it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from . import _out

if TYPE_CHECKING:
    from ..model import Engine, Generation, GenerationResult, Tokenizer

MaxNewTokens = Annotated[int, typer.Option(help="Stop after this many new tokens.")]
BlockSize = Annotated[
    int | None,
    typer.Option(help="Rows of a speculative block; 1: no speculation. [default: the draft's own]"),
]
KvFormat = Annotated[str, typer.Option(help="q8_0: the kernels; f32: plain numpy attention.")]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="Decode token by token.")]


def demo(
    index: Annotated[int, typer.Option(help="Which of the held-out prompts, from 0.")] = 0,
    max_new_tokens: MaxNewTokens = 128,
    block_size: BlockSize = None,
    kv_format: KvFormat = "q8_0",
    no_draft: NoDraft = False,
    as_json: _out.Json = False,
) -> None:
    """Complete a held-out prompt with the embedded models."""
    from ..model import demo_prompts

    prompts = demo_prompts()
    if not 0 <= index < len(prompts):
        raise InputError(f"--index is {index}; the demo has the prompts 0 .. {len(prompts) - 1}")
    session = _open(None, None, no_draft, kv_format)
    _run(session, prompts[index], max_new_tokens, block_size, as_json, echo=True)


def generate(
    prompt: Annotated[str | None, typer.Option(help="The text to continue. [default: from stdin]")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with the text to continue.")] = None,
    target: Annotated[
        Path | None, typer.Option(help="Folder or .hfq file of a Qwen3.5 checkpoint. [default: the demo pair's]")
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(help="Folder or .hfq file of its DFlash draft. [default: the demo pair's, for its target]"),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    block_size: BlockSize = None,
    kv_format: KvFormat = "q8_0",
    no_draft: NoDraft = False,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0: greedy, nothing is drawn.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens up to this much probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes the draws repeat. [default: other ones each time]")] = None,
    min_new_tokens: Annotated[int, typer.Option(help="Nothing but --max-new-tokens stops it before so many.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text to end before; may be given repeatedly.")] = None,
    as_json: _out.Json = False,
) -> None:
    """Continue a text, printed as it is accepted. Speculative with a draft; greedy unless --temperature is given."""
    text = _prompt(prompt, prompt_file)
    session = _open(target, draft, no_draft, kv_format)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    ends = {"min_new_tokens": min_new_tokens, "stop_strings": stop or []}
    _run(session, text, max_new_tokens, block_size, as_json, options={**sampling, **ends})


def _prompt(prompt: str | None, file: Path | None) -> str:
    """The text to continue, from where the options say."""
    if prompt is not None and file is not None:
        raise InputError("--prompt and --prompt-file are both given; required: one of them")
    if prompt is not None:
        text, origin = prompt, "--prompt"
    elif file is not None:
        text, origin = _decoded(_read(file), f"--prompt-file {file}"), f"--prompt-file {file}"
    elif sys.stdin.isatty():
        raise InputError("no prompt is given; pass --prompt TEXT or --prompt-file FILE, or pipe one into stdin")
    else:
        text, origin = _decoded(sys.stdin.buffer.read(), "stdin"), "the prompt on stdin"
    if not text:
        raise InputError(f"{origin} is empty; at least one character is required")
    return text


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"--prompt-file {file} cannot be read ({error.strerror})") from error


def _decoded(data: bytes, origin: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{origin} is not UTF-8 ({error.reason} at byte {error.start})") from error


@dataclass(frozen=True)
class _Session:
    """What runs.

    Attributes:
        blas_threads: 1 for the demo pair: between products as small as its own, BLAS threads spin and fight
            those that run kernel blocks. None leaves BLAS alone.
    """

    engine: Engine
    tokenizer: Tokenizer
    blas_threads: int | None


def _open(target: Path | None, draft: Path | None, no_draft: bool, kv_format: str) -> _Session:
    """Load the checkpoints that the options name."""
    from ..model import Engine, Tokenizer, demo_pair_path, load_draft, load_target

    if no_draft and draft is not None:
        raise InputError(f"--draft {draft} and --no-draft are both given; required: one of them")
    _out.note(f"loading {target or 'the demo pair'}; kernels that are not cached yet are compiled first")
    blas_threads = 1 if target is None else None
    if target is None:
        target, draft = demo_pair_path() / "target", draft or demo_pair_path() / "draft"
    tokenizer = Tokenizer(target)
    loaded = None if no_draft or draft is None else load_draft(draft)
    return _Session(Engine(load_target(target), loaded, kv_format=kv_format), tokenizer, blas_threads)


def _run(
    session: _Session,
    text: str,
    max_new_tokens: int,
    block_size: int | None,
    as_json: bool,
    echo: bool = False,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Generate, print the text as it comes, then what it took.

    `echo` prints the prompt before it; `options` are further ones of `Engine.stream`.
    """
    from threadpoolctl import threadpool_limits

    engine, prompt = session.engine, session.tokenizer.encode(text)
    options = {"block_size": block_size, "tokenizer": session.tokenizer, **(options or {})}
    with threadpool_limits(session.blas_threads):
        # One cycle first, so that every kernel is built and loaded before anything is timed.
        engine.generate(prompt[:1], 1 if block_size == 1 else 2, stop=(), block_size=block_size)
        generation = engine.stream(prompt, max_new_tokens, **options)
        if echo and not as_json:
            typer.secho(text, dim=True, nl=False)
        pieces, prefill_s, decode_s = _drain(generation, session.tokenizer, as_json, options.get("stop_strings", ()))
    summary = _summary(generation.result, prefill_s, decode_s)
    if as_json:
        _out.document({"text": "".join(pieces), **summary})
    else:
        print(f"{pieces[-1]}\n\n{_in_words(summary)}")


def _drain(
    generation: Generation, tokenizer: Tokenizer, silent: bool, stop_strings: Sequence[str] = ()
) -> tuple[list[str], float, float]:
    """Run to the end and print the text as it comes. Gives its pieces, the prefill and the decode seconds.

    The pieces end where a stop string begins, so what may be the beginning of one is held back.
    """
    decoder = tokenizer.stream()
    times = [time.perf_counter()]
    pieces: list[str] = []
    held, hold = "", max(map(len, stop_strings), default=1) - 1
    for tokens in generation:
        times.append(time.perf_counter())
        held += decoder.push(tokens)
        ready = max(0, len(held) - hold)
        if stop_strings and generation.result.text_end is not None:
            ready = generation.result.text_end - sum(map(len, pieces))
        pieces.append(held[:ready])
        held = held[ready:]
        if not silent:
            print(pieces[-1], end="", flush=True)
    ended = stop_strings and generation.result.text_end is not None
    pieces.append("" if ended else held + decoder.finish())
    return pieces, times[1] - times[0], times[-1] - times[1]


def _summary(result: GenerationResult, prefill_s: float, decode_s: float) -> dict[str, Any]:
    """What a run took. The first token comes from the prefill, so the decode rate counts those after it."""
    decoded = len(result.tokens) - 1
    return {
        "tokens": result.tokens,
        "stop_reason": result.stop_reason,
        "tokens_per_second": decoded / decode_s if decoded else None,
        "tau": result.tau,
        "acceptance_length": result.acceptance_length,
        "cycles": result.cycles,
        "accepted": result.accepted,
        "produced": result.produced,
        "routes": dict(result.routes),
        "refused": dict(result.attention.refused),
        "graph": dict(result.attention.graph),
        "capped_cycles": result.capped_cycles,
        "prefill_tokens": result.prefill_tokens,
        "cached_prefix": result.cached_prefix,
        "prefill_seconds": prefill_s,
        "decode_seconds": decode_s,
    }


def _in_words(summary: dict[str, Any]) -> str:
    rate = summary["tokens_per_second"]
    lines = [
        f"tokens             {len(summary['tokens'])} ({summary['stop_reason']})",
        f"tokens/s           {f'{rate:.1f}' if rate else '-'} (after the prefill)",
        f"tau                {summary['tau']:.3f} accepted drafts per cycle",
        f"acceptance length  {summary['acceptance_length']:.3f}",
        f"cycles             {summary['cycles']}",
        f"routes             {_counted(summary['routes'])}",
        f"prefill            {summary['prefill_tokens']} tokens in {summary['prefill_seconds']:.2f} s",
    ]
    if summary["refused"]:
        lines.append(f"refused            {_counted(summary['refused'])}")
    if summary["graph"]:
        lines.append(f"verify graph       {_counted(summary['graph'])}")
    if summary["capped_cycles"]:
        lines.append(f"capped             {summary['capped_cycles']} cycles beyond HIPFIRE_DFLASH_CTX_CAP")
    return "\n".join(lines)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.items())
