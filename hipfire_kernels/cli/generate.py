"""`hfk demo` and `hfk generate`: run the speculative loop and watch it."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipfire_kernels.cli import _choices, _out
from hipfire_kernels.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from hipfire_kernels.model import Engine, Generation, GenerationResult, Tokenizer
    from hipfire_kernels.model.proposer import Draft

MaxNewTokens = Annotated[int, typer.Option(help="Stop after this many new tokens.")]
BlockSize = Annotated[
    int | None,
    typer.Option(help="Rows of a speculative block; 1: no speculation. [default: the draft's own]"),
]
KvFormat = Annotated[str, _choices.option(("q8_0", "f32"), help="q8_0: the kernels; f32: plain numpy attention.")]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="Decode token by token.")]
Ngram = Annotated[
    bool, typer.Option("--ngram", help="Instead of a draft: what followed the last tokens when they came before.")
]
AdaptiveB = Annotated[
    bool | None,
    typer.Option(help="Verify fewer rows than drafted where few are accepted. [default: HIPFIRE_DFLASH_ADAPTIVE_B]"),
]
_SPECULATION = ("auto", "on", "off")
Trace = Annotated[Path | None, _out.new_file("Append a JSON line for each cycle to this file.")]


def demo(
    index: Annotated[int, typer.Option(help="Which of the held-out prompts, from 0.")] = 0,
    max_new_tokens: MaxNewTokens = 128,
    block_size: BlockSize = None,
    kv_format: KvFormat = "q8_0",
    no_draft: NoDraft = False,
    ngram: Ngram = False,
    speculation: Annotated[
        str | None, _choices.option(_SPECULATION, help="on: in every cycle; auto: where it pays. [default: on]")
    ] = None,
    adaptive_b: AdaptiveB = None,
    trace: Trace = None,
    as_json: _out.Json = False,
) -> None:
    """Complete a held-out prompt with the embedded models."""
    from hipfire_kernels.model import demo_prompts

    prompts = demo_prompts()
    if not 0 <= index < len(prompts):
        raise InputError(f"--index is {index}; the demo has the prompts 0 .. {len(prompts) - 1}")
    usual = "off" if no_draft or block_size == 1 else "on"
    options = {
        "max_new_tokens": max_new_tokens,
        "block_size": block_size,
        "speculation": speculation or usual,
        "adaptive_b": adaptive_b,
        "trace": trace,
    }
    session = _open(None, kv_format, _Proposer(None, no_draft, ngram, speculation), prompts[index], options)
    _run(session, as_json, options, echo=prompts[index])


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
    ngram: Ngram = False,
    speculation: Annotated[
        str | None,
        _choices.option(
            _SPECULATION,
            help="auto: where it pays, and without a draft that cannot be loaded; on: in every cycle. "
            "[default: where it pays, with a --draft that can be loaded]",
        ),
    ] = None,
    adaptive_b: AdaptiveB = None,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0: greedy, nothing is drawn.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens up to this much probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes the draws repeat. [default: other ones each time]")] = None,
    min_new_tokens: Annotated[int, typer.Option(help="Nothing but --max-new-tokens stops it before so many.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text to end before; may be given repeatedly.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer the text, through the target's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    thinking: Annotated[
        bool | None, typer.Option(help="With --chat: the template's enable_thinking. [default: the template's own]")
    ] = None,
    trace: Trace = None,
    as_json: _out.Json = False,
) -> None:
    """Continue a text, printed as it is accepted. Speculative with a draft; greedy unless --temperature is given."""
    text = _prompt(prompt, prompt_file)
    if chat:
        text = _as_chat(target, text, system, thinking)
    elif system is not None or thinking is not None:
        raise InputError("--system and --thinking say how a chat goes; pass --chat too")
    options = {
        "max_new_tokens": max_new_tokens,
        "block_size": block_size,
        "speculation": speculation or "auto",
        "adaptive_b": adaptive_b,
        "trace": trace,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "min_new_tokens": min_new_tokens,
        "stop_strings": stop or [],
    }
    _run(_open(target, kv_format, _Proposer(draft, no_draft, ngram, speculation), text, options), as_json, options)


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


def _as_chat(target: Path | None, text: str, system: str | None, thinking: bool | None) -> str:
    """The text as the user's message, in the form that the target was trained on."""
    from hipfire_kernels.model import ChatTemplate, demo_pair_path

    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    return ChatTemplate(target or demo_pair_path() / "target").render(messages, **options)


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
    prompt: Sequence[int]
    blas_threads: int | None


@dataclass(frozen=True)
class _Proposer:
    """What the options say about who proposes."""

    draft: Path | None
    no_draft: bool
    ngram: bool
    speculation: str | None

    def __post_init__(self) -> None:
        options = {f"--draft {self.draft}": self.draft is not None, "--no-draft": self.no_draft, "--ngram": self.ngram}
        if len(given := [name for name, is_given in options.items() if is_given]) > 1:
            raise InputError(f"{' and '.join(given)} are given together; required: one of them")

    def limits(self, usual: Path | None) -> tuple[int | None, str | None]:
        """Block size of the draft, and why there is none where it may fail: for `Limits`. Reads its config alone."""
        from hipfire_kernels.model import NgramDraft
        from hipfire_kernels.model.draft_config import read_draft_config

        path = self.draft or usual
        if self.ngram:
            return NgramDraft().block_size, None
        if self.no_draft or path is None:
            return None, None
        try:
            return read_draft_config(path).block_size, None
        except CheckpointError as error:
            if self.speculation != "auto":
                raise
            return None, str(error)

    def open(self, usual: Path | None) -> Draft | Callable[[], Draft] | None:
        """For `Engine`: a draft, a function that loads one where it may fail, or None. `usual` is the default draft."""
        from hipfire_kernels.cli import _load
        from hipfire_kernels.model import NgramDraft

        path = self.draft or usual
        if self.ngram:
            return NgramDraft()
        if self.no_draft or path is None:
            return None
        return functools.partial(_load.draft, path) if self.speculation == "auto" else _load.draft(path)


def _open(target: Path | None, kv_format: str, proposer: _Proposer, text: str, options: Mapping[str, Any]) -> _Session:
    """Load the checkpoints that the options name, after checking what is asked of them against their configs.

    Args:
        text: the prompt.
        options: of `Engine.stream`.
    """
    from hipfire_kernels.cli import _load
    from hipfire_kernels.model import Engine, Tokenizer, demo_pair_path

    blas_threads = 1 if target is None else None
    usual = demo_pair_path() / "draft" if target is None else None
    at = target or demo_pair_path() / "target"
    tokenizer = Tokenizer(at)
    prompt = tokenizer.encode(text)
    _check(at, proposer, usual, tokenizer, prompt, options)
    _out.note(f"loading {target or 'the demo pair'}; kernels that are not cached yet are compiled first")
    model = _load.target(at)
    tokenizer.check_pairing(model.config)
    return _Session(Engine(model, proposer.open(usual), kv_format=kv_format), tokenizer, prompt, blas_threads)


def _check(
    target: Path,
    proposer: _Proposer,
    usual: Path | None,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    options: Mapping[str, Any],
) -> None:
    """Refuse, before anything large is read, what `Engine.stream` would refuse."""
    from hipfire_kernels.model.config import read_target_config
    from hipfire_kernels.model.conversation import Requests
    from hipfire_kernels.model.request import Limits, Request

    class Checked(Requests):
        """Takes requests and runs none."""

        limits = Limits(read_target_config(target), *proposer.limits(usual))

        def start(self, request: Request) -> Generation:
            raise _Legal

    with contextlib.suppress(_Legal):
        # A trace would be opened, and the records of it counted.
        Checked().stream(prompt, **{**options, "tokenizer": tokenizer, "trace": None})


class _Legal(Exception):
    """A request was checked."""


def _run(session: _Session, as_json: bool, options: Mapping[str, Any], echo: str = "") -> None:
    """Generate, print the text as it comes, then what it took.

    Args:
        options: of `Engine.stream`.
        echo: printed before it.
    """
    from threadpoolctl import threadpool_limits

    engine, options = session.engine, {**options, "tokenizer": session.tokenizer}
    with threadpool_limits(session.blas_threads), _out.compiling():
        generation = engine.stream(session.prompt, **options)
        # One cycle first, so that every kernel is built and loaded before anything is timed.
        plain = engine.draft is None or options["block_size"] == 1 or options["speculation"] == "off"
        engine.generate(session.prompt[:1], 1 if plain else 2, stop=(), speculation="off" if plain else "on")
        if echo and not as_json:
            typer.secho(echo, dim=True, nl=False)
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
        "block_sizes": dict(sorted(result.block_sizes.items())),
        "retired_cycles": result.retired_cycles,
        "probes": result.probes,
        "capped_cycles": result.capped_cycles,
        "draft_faults": result.draft_faults,
        "fallback": result.fallback,
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
    if summary["block_sizes"]:
        lines.append(f"verified rows      {_counted(summary['block_sizes'])}")
    if summary["retired_cycles"]:
        lines.append(f"retired            {summary['retired_cycles']} plain cycles, {summary['probes']} of them probes")
    if summary["fallback"]:
        often = f"{summary['draft_faults']} cycles: " if summary["draft_faults"] else ""
        lines.append(f"no speculation     {often}{summary['fallback']}")
    if summary["capped_cycles"]:
        lines.append(f"capped             {summary['capped_cycles']} cycles beyond HIPFIRE_DFLASH_CTX_CAP")
    return "\n".join(lines)


def _counted(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.items())
