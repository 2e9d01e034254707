"""Sampled decoding: the filters against a naive form, speculation against plain sampling, what ends a request."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from model_lab import BLOCKS, DRAFT, PROMPT, TARGET, ScriptedDraft, draft_tensors, target_tensors, write_checkpoint
from typer.testing import CliRunner

from hipfire_kernels import InputError
from hipfire_kernels.cli import app
from hipfire_kernels.model import Engine, GenerationResult, Tokenizer, demo_pair_path, load_demo_pair, load_draft
from hipfire_kernels.model import load_target as load
from hipfire_kernels.model.attention import Float32Attention
from hipfire_kernels.model.dflash import DFlashDraft
from hipfire_kernels.model.qwen35 import Target
from hipfire_kernels.model.sampling import Sampling, accept_greedy, accept_sampled
from hipfire_kernels.model.stopping import StopStrings
from hipfire_kernels.model.tokenizer import StreamDecoder

BLOCK = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> DFlashDraft:
    return load_draft(write_checkpoint(tmp_path_factory.mktemp("draft"), DRAFT, draft_tensors(DRAFT)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(demo_pair_path() / "target")


@pytest.fixture(scope="module")
def demo() -> Engine:
    return Engine(*load_demo_pair(), kv_format="f32")


def run(target: Target, draft: Any, count: int, **options: Any) -> GenerationResult:
    options = {"stop": (), **(BLOCKS if draft else {}), **options}
    return Engine(target, draft, kv_format="f32").generate(PROMPT, count, **options)


# ---- the distribution --------------------------------------------------------------------------------------


def naive_probabilities(logits: Sequence[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    scaled = [x / temperature for x in logits]
    ranked = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))[: top_k or len(scaled)]
    weights = {i: math.exp(scaled[i]) for i in ranked}
    total = sum(weights.values())
    kept, before = {}, 0.0
    for i in ranked:
        if before < top_p:
            kept[i] = weights[i]
        before += weights[i] / total
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(scaled))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 3, 20, 99])
@pytest.mark.parametrize("top_p", [1e-9, 0.35, 0.8, 1.0])
def test_filters_are_those_of_the_naive_form(temperature: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(5).normal(0, 2, (10, 20)).astype(np.float32)
    logits[0, 3:9] = logits[0].max()  # ties, also across the k-th place
    for row in logits:
        got = Sampling(temperature, top_k, top_p).probabilities(row)
        want = naive_probabilities(row.tolist(), temperature, top_k, top_p)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.5000001, 2), (0.75, 2), (0.76, 3), (1.0, 4)])
def test_top_p_keeps_while_the_mass_before_is_below_it(top_p: float, kept: int) -> None:
    logits = np.log2(np.array([0.125, 0.5, 0.125, 0.25])) * np.log(2)
    assert np.count_nonzero(Sampling(1.0, 0, top_p).probabilities(logits)) == kept


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    # Of 0.4 0.3 0.2 0.1 two stay, as 0.571 and 0.429: the first alone reaches 0.55. Unfiltered it would not.
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    assert Sampling(1.0, 2, 0.55).probabilities(logits).tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3])
def test_a_tiny_temperature_is_the_argmax(temperature: float) -> None:
    logits = np.array([1.0, 5.0, -3000.0, 2.0], np.float32)
    assert Sampling(temperature).probabilities(logits).tolist() == [0.0, 1.0, 0.0, 0.0]


# ---- speculation against plain sampling --------------------------------------------------------------------

# Two samples of N draws over K cells lie at most sqrt(K / (pi N)) apart in total variation, on average: 0.0141 for
# 25 cells and 40,000 draws, with a deviation of about 0.002. This is the noise floor; the limit is 1.4 times that.
VOCAB, DRAWS, LIMIT = 5, 40_000, 0.02

Rule = Callable[[Sequence[int], Any, np.random.Generator], list[int]]


class Chain:
    """A made-up target: the distribution of a token depends on the one before it."""

    def __init__(self, sampling: Sampling) -> None:
        rng = np.random.default_rng(11)
        self.start, self.next = rng.normal(0, 1.2, VOCAB), rng.normal(0, 1.2, (VOCAB, VOCAB))
        self.p0 = sampling.probabilities(self.start)
        self.p1 = np.array([sampling.probabilities(row) for row in self.next])

    def rows(self, drafts: Sequence[int]) -> list[Any]:
        return [self.p0, *(self.p1[d] for d in drafts)]

    def plain(self, seed: int) -> np.ndarray:
        """Counts [first, second] of DRAWS plain samples."""
        rng = np.random.default_rng(seed)
        first = rng.choice(VOCAB, DRAWS, p=self.p0)
        second = (rng.random(DRAWS)[:, None] > np.cumsum(self.p1, axis=1)[first]).sum(axis=1)
        return joint(first, second)

    def speculative(self, rule: Rule, drafts: Sequence[int], seed: int) -> np.ndarray:
        """Counts [first, second]; where a block gives one token only, the next block gives the second."""
        rng, counts = np.random.default_rng(seed), np.zeros((VOCAB, VOCAB))
        for _ in range(DRAWS):
            tokens = rule(drafts, self.rows(drafts), rng)
            if len(tokens) == 1:
                proposal = [drafts[-1]]
                tokens += rule(proposal, [self.p1[tokens[0]], self.p1[proposal[0]]], rng)
            counts[tokens[0], tokens[1]] += 1
        return counts / DRAWS


def joint(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).reshape(VOCAB, VOCAB) / len(first)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum() / 2)


SAMPLINGS = {"plain": Sampling(1.0), "cool": Sampling(0.7), "filtered": Sampling(1.3, 4, 0.9)}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_plain_sampling_is_at_the_noise_floor_of_itself(name: str) -> None:
    chain = Chain(SAMPLINGS[name])
    assert distance(chain.plain(1), chain.plain(2)) < LIMIT


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("likely", [True, pytest.param(False, marks=pytest.mark.long)])
def test_speculation_samples_what_plain_sampling_does(name: str, likely: bool) -> None:
    chain = Chain(SAMPLINGS[name])
    pick = np.argmax if likely else np.argmin
    drafts = [int(pick(chain.p0))]
    drafts.append(int(pick(chain.p1[drafts[0]])))
    got = chain.speculative(accept_sampled, drafts, 3)
    assert distance(got, chain.plain(4)) < LIMIT
    assert distance(got, chain.p0[:, None] * chain.p1) < LIMIT  # the exact distribution


def against_softmax(drafts: Sequence[int], rows: Any, rng: np.random.Generator) -> list[int]:
    """The biased rule: an argmax draft judged as if it had been drawn from a softmax q."""
    q = np.full(VOCAB, 0.3 / (VOCAB - 1))
    for i, d in enumerate(drafts):
        q[:] = 0.3 / (VOCAB - 1)
        q[d] = 0.7
        if rng.random() * q[d] >= rows[i][d]:
            rest = np.maximum(rows[i] - q, 0.0)
            return [*drafts[:i], int(rng.choice(VOCAB, p=rest / rest.sum()))]
    return [*drafts, int(rng.choice(VOCAB, p=rows[len(drafts)]))]


def draft_among_the_rest(drafts: Sequence[int], rows: Any, rng: np.random.Generator) -> list[int]:
    """Another: after a refusal the draw may give the refused token all the same."""
    for i, d in enumerate(drafts):
        if rng.random() >= rows[i][d]:
            return [*drafts[:i], int(rng.choice(VOCAB, p=rows[i]))]
    return [*drafts, int(rng.choice(VOCAB, p=rows[len(drafts)]))]


@pytest.mark.parametrize("rule", [against_softmax, draft_among_the_rest])
def test_a_biased_rule_is_noticed(rule: Rule) -> None:
    chain = Chain(SAMPLINGS["plain"])
    first = int(np.argmax(chain.p0))
    drafts = [first, int(np.argmax(chain.p1[first]))]
    assert distance(chain.speculative(rule, drafts, 3), chain.plain(4)) > 3 * LIMIT


@pytest.mark.parametrize("speculate", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_engine_samples_the_targets_distribution(target: Target, speculate: bool) -> None:
    """The first two new tokens of whole requests, against the exact distribution."""
    sampling = Sampling(0.8, 4)
    prompt, requests = PROMPT[:6], 600
    likely = Engine(target, kv_format="f32").generate(prompt, 3, stop=()).tokens
    draft = ScriptedDraft(likely, [1], 3, TARGET["vocab_size"])
    engine = Engine(target, draft if speculate else None, kv_format="f32")
    seen = np.zeros((96, 96))
    for seed in range(requests):
        draft.calls.clear()
        first, second, _ = engine.generate(prompt, 3, (), 0.8, seed, top_k=4, **(BLOCKS if speculate else {})).tokens
        seen[first, second] += 1 / requests
    want = np.zeros((96, 96))
    p0 = sampling.probabilities(target_logits(target, prompt))
    for first in np.flatnonzero(p0):
        want[first] = p0[first] * sampling.probabilities(target_logits(target, [*prompt, int(first)]))
    # 16 cells, one sample: at most sqrt(16 / (2 pi 600)) = 0.065 on average, with a deviation of 0.012.
    assert distance(seen, want) < 0.115


def target_logits(target: Target, tokens: list[int]) -> np.ndarray:
    state = target.new_state(Float32Attention(Counter()))
    return np.asarray(target.forward(tokens, state).logits[-1])


# ---- counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(BLOCK))
def test_every_accepted_count(accepted: int) -> None:
    certain = np.eye(BLOCK + 1)
    drafts = [*range(accepted), *([BLOCK] * (BLOCK - 1 - accepted))]
    got = accept_sampled(drafts, list(certain[:BLOCK]), np.random.default_rng(0))
    assert got == list(range(accepted + 1))
    assert accept_greedy(drafts, certain[:BLOCK]) == got


def test_only_the_rows_that_are_needed_are_made() -> None:
    made: list[int] = []
    rows = (made.append(i) or np.eye(4)[i] for i in range(4))
    assert accept_sampled([0, 3, 3], rows, np.random.default_rng(0)) == [0, 1]
    assert made == [0, 1]


@pytest.mark.parametrize("accepted", range(BLOCK))
def test_every_accepted_count_in_the_loop(target: Target, accepted: int) -> None:
    truth = run(target, None, 90).tokens
    draft = ScriptedDraft(truth, [accepted], BLOCK, TARGET["vocab_size"])
    got = run(target, draft, 34, temperature=1.0, top_k=1, seed=0)
    assert got.tokens == truth[:34]
    assert set(got.accepted[:-1]) <= {accepted}
    assert sum(got.produced) + 1 == 34


# ---- seeds and temperature 0 -------------------------------------------------------------------------------


def test_a_seed_repeats_its_tokens(target: Target, draft: DFlashDraft) -> None:
    for proposer in (None, draft):
        first, again, other = (run(target, proposer, 30, temperature=1.5, seed=s) for s in (7, 7, 8))
        assert first == again
        assert first.tokens != other.tokens


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_gives_the_same_tokens_whatever_is_drafted(target: Target, draft: DFlashDraft, seed: int) -> None:
    """One draw a token: plain decoding, a draft without a clue, and one that knows half of what comes."""
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 5, "top_p": 0.95, "seed": seed}
    plain = run(target, None, 40, **options)
    half = ScriptedDraft(plain.tokens, [3, 0, 7, 1], BLOCK, 96)
    runs = [
        run(target, proposer, 40, **options, block_size=size) for proposer, size in ((draft, 8), (draft, 3), (half, 8))
    ]
    assert [got.tokens for got in runs] == [plain.tokens] * 3
    assert runs[-1].tau > 1.5


def test_without_a_seed_the_draws_differ(target: Target) -> None:
    first, other = (run(target, None, 30, temperature=1.5) for _ in range(2))
    assert first.tokens != other.tokens


def test_temperature_zero_is_greedy(target: Target, draft: DFlashDraft) -> None:
    greedy = run(target, draft, 30)
    assert run(target, draft, 30, temperature=0, top_k=3, top_p=0.5, seed=9) == greedy
    assert run(target, draft, 30, temperature=1e-9, seed=9) == greedy
    assert run(target, draft, 30, temperature=2.0, top_k=1, seed=9) == greedy


# ---- what ends a request -----------------------------------------------------------------------------------


@pytest.mark.parametrize("minimum", [0, 1, 2, 5, 11, 20])
@pytest.mark.parametrize("options", [{}, {"temperature": 3.0, "seed": 1}])
def test_no_stop_token_before_the_minimum(target: Target, minimum: int, options: dict[str, Any]) -> None:
    truth = run(target, None, 90).tokens
    stop = list(range(0, 96, 2))
    for proposer in (None, ScriptedDraft(truth, [BLOCK - 1], BLOCK, 96)):
        got = run(target, proposer, 20, stop=stop, min_new_tokens=minimum, **options)
        ends = [i for i, token in enumerate(got.tokens) if token in stop]
        assert all(i >= minimum and i == len(got.tokens) - 1 for i in ends)
        assert len(got.tokens) >= minimum
        assert got.stop_reason == ("stop" if ends else "length")


def test_the_minimum_masks_nothing_beyond_it(target: Target) -> None:
    free = run(target, None, 20)
    stop = next(t for i, t in enumerate(free.tokens) if i >= 4 and t not in free.tokens[:i])
    at = free.tokens.index(stop)
    draft = ScriptedDraft(free.tokens, [BLOCK - 1], BLOCK, 96)
    for proposer in (None, draft):
        draft.calls.clear()
        assert run(target, proposer, 20, stop=[stop], min_new_tokens=at).tokens == free.tokens[: at + 1]
        draft.calls.clear()
        assert run(target, proposer, 20, stop=[stop], min_new_tokens=at + 1).tokens[: at + 1] != free.tokens[: at + 1]


@pytest.mark.parametrize("position", range(1, BLOCK + 1))
def test_stop_inside_a_block(target: Target, position: int) -> None:
    """A sampled request stopped at each row, against the same draws unstopped; then the state."""
    options: dict[str, Any] = {"temperature": 2.0, "top_k": 1, "seed": 4}
    truth = run(target, None, 90).tokens
    draft = ScriptedDraft(truth, [BLOCK - 1], BLOCK, 96)
    end = truth.index(truth[position]) + 1
    generation = Engine(target, draft, kv_format="f32").stream(PROMPT, 60, stop=[truth[position]], **BLOCKS, **options)
    assert [t for part in generation for t in part] == truth[:end]
    assert generation.result.stop_reason == "stop"
    assert sum(generation.result.produced) + 1 == end
    assert generation.state.length == len(PROMPT) + end - 1


def continuation(engine: Engine, tokenizer: Tokenizer, **options: Any) -> tuple[GenerationResult, str]:
    prompt = tokenizer.encode("import os\n")
    blocks = {} if options.get("block_size") == 1 else BLOCKS
    got = engine.generate(prompt, 60, stop=(), tokenizer=tokenizer, **blocks, **options)
    return got, tokenizer.decode(got.tokens)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("span", [(0, 1), (5, 7), (13, 19), (20, 48)])
def test_stop_strings(demo: Engine, tokenizer: Tokenizer, block_size: int, span: tuple[int, int]) -> None:
    free, text = continuation(demo, tokenizer)
    string = text[slice(*span)]
    never = ["\x00", text[span[0] : span[1]] + "\x00"]
    got, cut = continuation(demo, tokenizer, block_size=block_size, stop_strings=[*never, string])
    assert got.stop_reason == "stop_string"
    assert got.text_end == text.index(string)
    assert cut[: got.text_end] == text[: text.index(string)]
    assert got.tokens == free.tokens[: len(got.tokens)]
    # Its last token is the one that completes the string.
    assert string in cut
    assert string not in tokenizer.decode(got.tokens[:-1])
    assert sum(got.produced) + 1 == len(got.tokens)


class Pieces:
    """A tokenizer whose token i is the text pieces[i]."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._pieces[i] for i in ids)

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)  # type: ignore[arg-type]


def naive_cut(pieces: Sequence[str], strings: Sequence[str], exempt: int) -> tuple[int | None, int | None]:
    for count in range(exempt + 1, len(pieces) + 1):
        before, text = "".join(pieces[: count - 1]), "".join(pieces[:count])
        found = [i for s in strings for i in range(len(text)) if text[i:].startswith(s) and i + len(s) > len(before)]
        if found:
            return count, min(found)
    return None, None


def test_stop_strings_are_found_as_in_the_naive_form() -> None:
    rng = np.random.default_rng(2)

    def word(low: int, high: int) -> str:
        return "".join(rng.choice(list("ab"), rng.integers(low, high)))

    for _ in range(2000):
        pieces = [word(0, 4) for _ in range(12)]
        strings = tuple(word(1, 8) for _ in range(rng.integers(1, 4)))
        exempt = int(rng.integers(0, 8))
        watch = StopStrings(strings, Pieces(pieces))  # type: ignore[arg-type]
        got = watch.cut(range(5), exempt)  # in two calls, as from two cycles
        if got is None:
            rest = watch.cut(range(5, 12), max(0, exempt - 5))
            got = None if rest is None else rest + 5
        assert (got, watch.text_end) == naive_cut(pieces, strings, exempt)


def test_the_earliest_of_several_stop_strings_counts(demo: Engine, tokenizer: Tokenizer) -> None:
    _, text = continuation(demo, tokenizer)
    strings = [text[30:34], text[9:12], text[8:12], text[12:14]]
    got, _ = continuation(demo, tokenizer, stop_strings=strings)
    assert got.text_end == min(text.index(s) for s in strings)


def test_a_stop_string_within_the_minimum_is_text(demo: Engine, tokenizer: Tokenizer) -> None:
    free, text = continuation(demo, tokenizer)
    at = next(i for i in range(1, len(free.tokens)) if len(tokenizer.decode(free.tokens[: i + 1])) > 3)
    string = text[:3]
    got, _ = continuation(demo, tokenizer, min_new_tokens=at + 1, stop_strings=[string])
    later = text.find(string, 1)
    assert len(got.tokens) > at
    assert got.text_end == (later if later >= 0 else None)


def test_a_stop_string_without_a_match_changes_nothing(demo: Engine, tokenizer: Tokenizer) -> None:
    free, _ = continuation(demo, tokenizer)
    assert continuation(demo, tokenizer, stop_strings=["\x00\x00"])[0] == free


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature is -0\.1; legal are finite numbers from 0\.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": -1}, "top_k is -1; legal are whole numbers from 0"),
        ({"top_k": 2.0}, r"top_k is 2\.0"),
        ({"top_p": 0.0}, r"top_p is 0\.0; legal are numbers above 0\.0 and up to 1\.0"),
        ({"top_p": 1.01}, r"top_p is 1\.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"seed": -1}, "seed is -1; legal are None and whole numbers from 0"),
        ({"seed": 1.5}, r"seed is 1\.5"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1; legal are whole numbers from 0 to max_new_tokens, here 10"),
        ({"min_new_tokens": 11}, "min_new_tokens is 11"),
        ({"min_new_tokens": 1, "stop": range(96)}, "stop holds all 96 tokens, so min_new_tokens must be 0, not 1"),
        ({"stop_strings": "text"}, "stop_strings is 'text'; required: a sequence of texts"),
        ({"stop_strings": ["a", ""]}, r"stop_strings is \['a', ''\]"),
        ({"stop_strings": [1]}, r"stop_strings is \[1\]"),
        ({"stop_strings": ["a"]}, "stop_strings are given and tokenizer is None"),
    ],
)
def test_refused_request(target: Target, options: dict[str, Any], message: str) -> None:
    engine = Engine(target, kv_format="f32")
    for start in (engine.generate, engine.stream):
        with pytest.raises(InputError, match=message):
            start(PROMPT, 10, **options)


# ---- hfk generate ------------------------------------------------------------------------------------------


def hfk(*options: str) -> Result:
    base = ["generate", "--prompt", "import os\n", "--kv-format", "f32", "--max-new-tokens", "40"]
    return CliRunner().invoke(app, [*base, *options])


def document(*options: str) -> Any:
    return json.loads(hfk(*options, "--json").stdout)


def test_the_command_line_samples() -> None:
    sampled = ("--temperature", "1.5", "--top-k", "20", "--top-p", "0.95")
    first, again, other = (document(*sampled, "--seed", seed)["tokens"] for seed in "334")
    assert first == again != other
    greedy = document()["tokens"]
    assert document("--temperature", "1.5", "--top-k", "1")["tokens"] == greedy
    assert document("--temperature", "1.5", "--top-p", "1e-9")["tokens"] == greedy


@pytest.mark.parametrize(
    "option", ["temperature=-1.0", "top-k=-1", "top-p=0.0", "seed=-1", "min-new-tokens=41", "stop="]
)
def test_the_command_line_refuses(option: str) -> None:
    result = hfk(f"--{option}")
    assert result.exit_code == 2
    name, _, value = option.partition("=")
    assert f"{name.replace('-', '_')} is {value}" in result.stderr or "stop_strings is ['']" in result.stderr


def test_the_command_line_ends_before_a_stop_string() -> None:
    free = document()["text"]
    string = free[17:23]
    cut = document("--stop", "\x01never", "--stop", string)
    assert cut["text"] == free[: free.index(string)]
    assert cut["stop_reason"] == "stop_string"
    # One token per step: what could become the string is held back until it does, or does not.
    long = free[17:40]
    assert document("--no-draft", "--stop", long)["text"] == free[: free.index(long)]
    printed = hfk("--stop", string).stdout
    assert printed.startswith(free[: free.index(string)] + "\n\ntokens ")
    assert document("--stop", string, "--min-new-tokens", "40")["text"] == free
    assert document("--stop", "\x01never")["text"] == free
