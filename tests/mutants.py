"""One-line faults that parity must catch, what plants one, and the cases that must see it."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import jinja2
import verify_lab

from hipfire_kernels import families
from hipfire_kernels.authoring import templates
from hipfire_kernels.authoring.family import KernelFamily, Variant
from hipfire_kernels.checking.oracle import check
from hipfire_kernels.checking.parity import grid
from hipfire_kernels.errors import DeviceError, InputError
from hipfire_kernels.kernels.arguments import SPLIT as SPLIT_ORACLE
from hipfire_kernels.running import attention, draft
from hipfire_kernels.running.devices import device
from hipfire_kernels.running.devices.host import HostDevice

TILE_BATCHED = "attention_flash_q8_0_tile_batched"
ROWS = "attention_flash_q8_0_rows"
REDUCE = "attention_flash_reduce_batched"
KV_WRITE = "kv_cache_write_q8_0_batched"
DFLASH = "attention_dflash_f32"
GQA = "attention_verify_gqa_q8"
MMA = "attention_verify_mma_q8"
MMA_BODY = "verify_mma_wave.h.j2"
M16 = "attention_dflash_wmma_f32"
N64 = "attention_dflash_wmma_n64_f32"
PREFILL = "attention_q8_0_flash_prefill_wmma"
ON_MATRIX_UNITS = (MMA, M16, N64, PREFILL)


@dataclass(frozen=True)
class Mutant:
    """One fault: in `template`, or in `function`, `old` becomes `new`; or the family's grid becomes `grid`."""

    name: str
    family: str
    params: dict[str, Any]
    template: str = ""
    old: str = ""
    new: str = ""
    grid: Callable[[Any, Any], tuple[int, int, int]] | None = None
    function: FunctionType | None = None


TILE = {"head_dim": 128, "mask": "causal"}
R8 = {"rows": 8, "head_dim": 256}
SPLIT = {"head_dim": 128, "group": 6, "rows": 8}
COLUMNS40 = {"head_dim": 128, "group": 5, "rows": 8, "terms": 1}
TWO_TERMS = {"head_dim": 128, "group": 3, "rows": 8, "terms": 2}
MERGE = {"head_dim": 128, "bound": "splits"}
SLIDE = {"head_dim": 128, "sliding": True}
F32KV = {"head_dim": 128, "kv": "f32", "sliding": True}
F32KV64 = {"head_dim": 64, "kv": "f32", "sliding": True}  # whose spoilt cases have a key that half of a wave's rows see
F16KV = {"head_dim": 128, "kv": "f16", "sliding": False}
SLIDING_F16KV = {"head_dim": 128, "kv": "f16", "sliding": True}
BRANCHES = {"head_dim": 128, "mask": "tree"}

MUTANTS = [
    Mutant("bound one short", TILE_BATCHED, TILE, f"{TILE_BATCHED}.hip.j2", "positions[row] + 1LL", "positions[row]"),
    Mutant("bound one long", TILE_BATCHED, TILE, f"{TILE_BATCHED}.hip.j2", "positions[row] + 1", "positions[row] + 2"),
    Mutant("query row ignores first_row", TILE_BATCHED, TILE, f"{TILE_BATCHED}.hip.j2", "first_row + batch_row", "batch_row"),
    Mutant("swapped GQA index", TILE_BATCHED, TILE, f"{TILE_BATCHED}.hip.j2", "head / (n_heads / n_kv_heads)", "head % n_kv_heads"),
    Mutant("barrier after the scores missing", TILE_BATCHED, TILE, f"{TILE_BATCHED}.hip.j2", "    block_sync();\n\n    float m[1]", "\n    float m[1]"),
    Mutant("window one wide", TILE_BATCHED, {"head_dim": 128, "mask": "window"}, f"{TILE_BATCHED}.hip.j2", "(int)(bound - window);", "(int)(bound - window - 1);"),
    Mutant("record before the window unwritten", TILE_BATCHED, {"head_dim": 128, "mask": "window"}, f"{TILE_BATCHED}.hip.j2", "            record[0] = LOWEST;\n            record[1] = 0.0f;\n", ""),
    Mutant("tree bias skips its first column", TILE_BATCHED, {"head_dim": 128, "mask": "tree"}, f"{TILE_BATCHED}.hip.j2", "col >= 0", "col > 0"),
    Mutant("tree bias of another row", TILE_BATCHED, {"head_dim": 128, "mask": "tree"}, f"{TILE_BATCHED}.hip.j2", "tree_bias[(long long)row *", "tree_bias[(long long)batch_row *"),
    Mutant("ragged group guard dropped", ROWS, R8, f"{ROWS}.hip.j2", "group_row + r < batch ? positions", "true ? positions"),
    Mutant("all rows see what the longest sees", ROWS, R8, f"{ROWS}.hip.j2", "if (key < count[r]) slice_axpy", "if (true) slice_axpy"),
    Mutant("row of the scatter off", ROWS, R8, f"{ROWS}.hip.j2", "ROWS + own_row] = s", "ROWS + (ROWS - 1 - own_row)] = s"),
    Mutant("record of the wrong row", ROWS, R8, f"{ROWS}.hip.j2", "record_offset(group_row + r,", "record_offset(group_row + ROWS - 1 - r,"),
    Mutant("last group not launched", ROWS, R8, grid=lambda v, s: (s.n_heads, s.live_tiles, s.batch // v.rows)),
    Mutant("last tile not launched", TILE_BATCHED, TILE, grid=lambda v, s: (s.n_heads, max(1, s.live_tiles - 1), s.batch)),
    Mutant("scale of the neighbouring block", TILE_BATCHED, TILE, "q8_0.h.j2", "head + dim / {{ Q8_BLOCK }} * {{ Q8_BYTES }};\n    return {load_u16(block)", "head + dim / {{ Q8_BLOCK }} * {{ Q8_BYTES }};\n    return {load_u16(head)"),
    Mutant("codes start one byte early", TILE_BATCHED, TILE, "q8_0.h.j2", "fetch_codes<DIMS>(block + 2 +", "fetch_codes<DIMS>(block + 1 +"),
    Mutant("scores read one key too far", TILE_BATCHED, TILE, "tile_softmax.h.j2", "if (key < count[r]) {", "if (key <= count[r]) {"),
    Mutant("maximum of one lane only", ROWS, R8, "tile_softmax.h.j2", "m[r] = wave_max(m[r]);", "m[r] = m[r];"),
    Mutant("sum of one lane only", ROWS, R8, "tile_softmax.h.j2", "sum[r] = wave_sum(sum[r]);", "sum[r] = sum[r];"),
    Mutant("reducer skips the last tile", REDUCE, {"head_dim": 128, "bound": "causal"}, f"{REDUCE}.hip.j2", "(bound + {{ TILE - 1 }}) / {{ TILE }}", "bound / {{ TILE }}"),
    Mutant("reducer reads records of no key", REDUCE, {"head_dim": 128, "bound": "causal"}, f"{REDUCE}.hip.j2", "fma_f32(sees ? value : 0.0f, weight", "fma_f32(value, weight"),
    Mutant("reducer forgets to divide", REDUCE, {"head_dim": 128, "bound": "causal"}, f"{REDUCE}.hip.j2", "value / total : covered", "value : covered"),
    Mutant("barrier before the waves' sums missing", REDUCE, {"head_dim": 128, "bound": "causal"}, f"{REDUCE}.hip.j2", "    block_sync();\n", ""),
    Mutant("split skips a step", GQA, SPLIT, f"{GQA}.hip.j2", "tile += splits) {", "tile += splits + 1) {"),
    Mutant("record of an idle split unwritten", GQA, SPLIT, f"{GQA}.hip.j2", "if (head >= GROUP || row >= live) continue;", "if (head >= GROUP || row >= live || split >= tiles) continue;"),
    Mutant("record of a split without a key unwritten", GQA, SPLIT, f"{GQA}.hip.j2", "if (lane() == 0) {\n            record[0]", "if (lane() == 0 && state_in[OWN + c] > 0.0f) {\n            record[0]"),
    Mutant("out not rescaled", GQA, SPLIT, f"{GQA}.hip.j2", "acc[c][i] *= rescale;", "acc[c][i] *= 1.0f;"),
    Mutant("sum not rescaled", GQA, SPLIT, f"{GQA}.hip.j2", "fma_f32(state_in[OWN + c], rescale,", "fma_f32(state_in[OWN + c], 1.0f,"),
    Mutant("barrier before the scores missing", GQA, SPLIT, f"{GQA}.hip.j2", "        block_sync();  // the queries have been read\n", ""),
    Mutant("barrier of the value slabs missing", GQA, SPLIT, f"{GQA}.hip.j2", "value_dim / 4);\n            block_sync();", "value_dim / 4);"),
    Mutant("all rows see what the longest sees, in splits", GQA, SPLIT, f"{GQA}.hip.j2", "positions[first_row + group_row + column_row] + 1 - begin", "bound - begin"),
    Mutant("rows and heads of a column swapped", GQA, SPLIT, f"{GQA}.hip.j2", "row = at % ROWS, head = at / ROWS;", "row = at / GROUP, head = at % GROUP;"),
    Mutant("the group of the first rows only", GQA, SPLIT, grid=lambda v, s: (s.splits, s.n_kv_heads, 1)),
    Mutant("verify_mma sees the key behind a row's bound", MMA, COLUMNS40, MMA_BODY, "key >= bounds[row]) score", "key > bounds[row]) score"),
    Mutant("keys end where the last row's end", MMA, COLUMNS40, MMA_BODY, "most = sees > most ? sees : most;", "most = sees;"),
    Mutant("last row of a ragged group left out", MMA, COLUMNS40, MMA_BODY, "? batch - group_row :", "? batch - group_row - 1 :"),
    Mutant("verify_mma leaves the record of no key unwritten", MMA, COLUMNS40, MMA_BODY, "if (c % ROWS >= here) continue;", "if (c % ROWS >= here || total(c) == 0.0f) continue;"),
    Mutant("verify_mma does not rescale out", MMA, COLUMNS40, MMA_BODY, "factor[s] = exp2_f32(old[c] - reference(c));", "factor[s] = 1.0f;"),
    Mutant("verify_mma does not rescale the sum", MMA, COLUMNS40, MMA_BODY, "sum[j][s] *= exp2_f32(old[c] - top[s]);", ""),
    Mutant("maximum of half of the keys", MMA, COLUMNS40, MMA_BODY, "max_f32(low, high)", "low"),
    Mutant("a step of hidden keys only is a new reference", MMA, COLUMNS40, MMA_BODY, "max_f32(old[c], max_f32(low, high))", "max_f32(low, high)"),
    Mutant("key scale of the neighbouring block", MMA, COLUMNS40, MMA_BODY, "unsigned short scale = load_u16(key + dim0 /", "unsigned short scale = load_u16(key + (dim0 ^ {{ Q8_BLOCK }}) /"),
    Mutant("value scale of the neighbouring key", MMA, COLUMNS40, MMA_BODY, "scale[0] | scale[1] << 16", "scale[1] | scale[0] << 16"),
    Mutant("query of another head, in verify_mma", MMA, COLUMNS40, MMA_BODY, "kv_head * GROUP + c / ROWS;", "kv_head * GROUP + c % GROUP;"),
    Mutant("query of another sub-batch", MMA, COLUMNS40, MMA_BODY, "(first_row + group_row + row) * n_heads", "(group_row + row) * n_heads"),
    Mutant("barrier of the maxima missing", MMA, COLUMNS40, MMA_BODY, "block_sync();  // the maxima are there", "// the maxima are there"),
    Mutant("barrier of the weights missing", MMA, COLUMNS40, MMA_BODY, "block_sync();  // the weights are there", "// the weights are there"),
    Mutant("barrier before the spoilt values missing", MMA, COLUMNS40, MMA_BODY, "block_sync();\n    if (spoilt[0] == 0)", "if (spoilt[0] == 0)"),
    Mutant("a hidden value that is NaN counts", MMA, COLUMNS40, MMA_BODY, "bad || key >= v.most ? 0", "key >= v.most ? 0"),
    Mutant("a seen value that is NaN does not count", MMA, COLUMNS40, MMA_BODY, "found |= bad &&", "found |= false && bad &&"),
    Mutant("a step is taken for whole that is not", MMA, COLUMNS40, MMA_BODY, "key0 + key + 16 <= least", "key0 + key + 16 <= v.most"),
    Mutant("the key behind the last is read", MMA, COLUMNS40, MMA_BODY, "key < s.most ? key : s.most - 1", "key < s.most ? key : s.most"),
    Mutant("positions behind the cache are believed", MMA, COLUMNS40, MMA_BODY, "sees < capacity ? sees : capacity", "sees"),
    Mutant("queries and weights lose their second term", MMA, TWO_TERMS, MMA_BODY, "mma_low(c, low, a[0], b[TERMS - 1]);", ""),
    Mutant("keys and values lose their second term", MMA, TWO_TERMS, MMA_BODY, "mma_low(c, low, a[TERMS - 1], b[0]);", ""),
    Mutant("second terms as small as they are, in verify_mma", MMA, TWO_TERMS, "matrix.h", "READS_SUBNORMALS ? 1.0f : 2048.0f", "1.0f"),
    Mutant("second terms of weights as small as they are", MMA, TWO_TERMS, MMA_BODY, "rest = (rest - f16_to_f32(half)) * LOW;", "rest = rest - f16_to_f32(half);"),
    Mutant("the scores' sum of second terms left out", MMA, TWO_TERMS, MMA_BODY, "add_low(score[j], low_score[j]);", "{}"),
    Mutant("the values' sum of second terms left out", MMA, TWO_TERMS, MMA_BODY, "add_low(o[0][j], low[0][j]);", ""),
    Mutant("sums of second terms stay large", MMA, TWO_TERMS, "matrix_terms.h", "fma_f32(low.x[i], 1.0f / LOW, c.x[i])", "low.x[i] + c.x[i]"),
    Mutant("records are in the unit of the weights", MMA, TWO_TERMS, MMA_BODY, "* (1.0f / UNIT)", ""),
    Mutant("weights of one term are subnormal f16", MMA, COLUMNS40, MMA_BODY, "UNIT = WEIGHT;", "UNIT = TERMS == 2 ? WEIGHT : 1.0f;"),
    Mutant("last split not launched", MMA, COLUMNS40, grid=lambda v, s: (s.splits - 1 or 1, s.n_kv_heads, -(-s.batch // v.rows))),
    Mutant("reducer reads a split without a key", REDUCE, MERGE, f"{REDUCE}.hip.j2", "x = w >= 0.0f ? values[split * RECORD] : 0.0f", "x = values[split * RECORD]"),
    Mutant("reducer leaves out the last split", REDUCE, MERGE, f"{REDUCE}.hip.j2", "split < splits; split += WAVES", "split < splits - 1; split += WAVES"),
    Mutant("codes for 128 steps", KV_WRITE, {"pair": True}, f"{KV_WRITE}.hip.j2", "? 127.0f / amax", "? 128.0f / amax"),
    Mutant("V written over K", KV_WRITE, {"pair": True}, f"{KV_WRITE}.hip.j2", "write_block(v[from], v_cache + to)", "write_block(v[from], k_cache + to)"),
    Mutant("running sum not rescaled", DFLASH, SLIDE, f"{DFLASH}.hip.j2", "before = sum.total * rescale", "before = sum.total"),
    Mutant("barrier after the weights missing", DFLASH, SLIDE, f"{DFLASH}.hip.j2", "        m = top;\n        block_sync();", "        m = top;"),
    Mutant("draft window one wide", DFLASH, SLIDE, f"{DFLASH}.hip.j2", "position - window + 1 > 0 ? position - window + 1", "position - window > 0 ? position - window"),
    Mutant("prefill sees one key more", PREFILL, {"head_dim": 128}, f"{PREFILL}.hip.j2", "< ctx ? positions[row0 + row] + 1 :", "< ctx ? positions[row0 + row] + 2 :"),
    Mutant("prefill takes a tile for whole that is not", PREFILL, {"head_dim": 128}, f"{PREFILL}.hip.j2", "first + KEYS <= least", "first + KEYS <= most"),
    Mutant("prefill scale of the neighbouring key", PREFILL, {"head_dim": 128}, f"{PREFILL}.hip.j2", "place(slot_col(s, lane()))", "place(slot_col(s, lane()) ^ 1)"),
    Mutant("prefill output not rescaled", PREFILL, {"head_dim": 128}, f"{PREFILL}.hip.j2", "factor[r] = unit[r] * rescale[r];", "factor[r] = unit[r];"),
    Mutant("weights lose their second term", N64, F16KV, f"{N64}.hip.j2", "mma_low(o[2 * d + f], low_value[f], weight[1], value[f]);", ""),
    Mutant("second terms as small as they are", N64, F16KV, "matrix.h", "READS_SUBNORMALS ? 1.0f : 2048.0f", "1.0f"),
    Mutant("the scores' sum of second terms left out, in a draft", N64, F16KV, f"{N64}.hip.j2", "add_low(s[b], low_score[b]);", ""),
    Mutant("the values' sum of second terms left out, in a draft", N64, F16KV, f"{N64}.hip.j2", "add_low(o[2 * d + 1], low_value[1]);", ""),
    Mutant("records of a draft are in the unit of the weights", N64, F16KV, f"{N64}.hip.j2", "*= 1.0f / WEIGHT", "*= 1.0f"),
    Mutant("second terms as small as they are, in steps", M16, F32KV, "matrix.h", "READS_SUBNORMALS ? 1.0f : 2048.0f", "1.0f"),
    Mutant("the scores' sum of second terms left out, in steps", M16, F32KV, "draft_wave.h.j2", "add_low(s[0], low_score);", ""),
    Mutant("what takes second terms is not as large as they", M16, F32KV, "draft_wave.h.j2", "rescale[fragment::row_slot(i)] * LOW;", "rescale[fragment::row_slot(i)];"),
    Mutant("what takes second terms stays as large as they", M16, F32KV, "draft_wave.h.j2", "to.x[i] *= 1.0f / LOW;", "to.x[i] *= 1.0f;"),
    Mutant("sum of the weights in another unit than they", M16, F32KV, "draft_wave.h.j2", "state.sum[r] * WEIGHT", "state.sum[r]"),
    Mutant("keys not waited for", N64, F16KV, f"{N64}.hip.j2", "        copies_done<1>();\n{% else %}", "{% else %}"),
    Mutant("a split without a key leaves a stale record", N64, F16KV, f"{N64}.hip.j2", "(lane() & fragment::ROW_LANES) == 0)", "(lane() & fragment::ROW_LANES) == 0 && state.sum[r] > 0.0f)"),
    Mutant("query of another head of the group", N64, F16KV, "draft_rows.h.j2", "kv_head * group + pair % group)", "kv_head * group + (pair + 1) % group)"),
    Mutant("keys lose their second term", M16, F32KV, "draft_wave.h.j2", "if constexpr (KV_TERMS == 2) mma", "if constexpr (KV_TERMS == 3) mma"),
    Mutant("matrix window one wide", M16, F32KV, "draft_rows.h.j2", "position - window + 1 > 0 ? position - window + 1", "position - window > 0 ? position - window"),
    Mutant("row maximum of half the lanes", M16, F32KV, "matrix_maps.h", "ROW_LANES = 16", "ROW_LANES = 0"),
    Mutant("draft rows stand one early", DFLASH, SLIDE, f"{DFLASH}.hip.j2", "keys - rows + row;", "keys - rows + row - 1;"),
    Mutant("every sub-batch starts at the first row", TILE_BATCHED, TILE, old="merging, held, first,", new="merging, held, 0,", function=attention.VerifyPlan.__init__),
    Mutant("last row of the last sub-batch left out", TILE_BATCHED, TILE, old="shape.rows - first)", new="shape.rows - first - 1)", function=attention.VerifyPlan.__init__),
    Mutant("tiles of one key fewer", TILE_BATCHED, TILE, old="tiles(covered)", new="tiles(covered - 1)", function=attention.TilePlan._extents),
    Mutant("workspace of one tile too few", TILE_BATCHED, TILE, old="tiles(max_ctx)", new="tiles(max_ctx - 1)", function=attention.workspace_shape),
    Mutant("reducer told of one split fewer", MMA, COLUMNS40, old='"ctx": covered', new='"ctx": covered, "splits": self.partials.shape[2] - 1', function=attention.SplitPlan._extents),
    Mutant("a draft forgets that it is causal", DFLASH, SLIDE, old="int(causal)", new="0", function=draft.draft_launches),
    Mutant("only the first row of a draft is merged", N64, F16KV, old="batch=rows", new="batch=1", function=draft.draft_launches),
    # What is no number must stay none.
    Mutant("a score of -inf drops its key", TILE_BATCHED, TILE, "tile_softmax.h.j2", "e = or_nan(e, s);", "e = e;"),
    Mutant("a sum that is NaN is that of no key", REDUCE, {"head_dim": 128, "bound": "causal"}, f"{REDUCE}.hip.j2", "sees = tile_sum != 0.0f", "sees = tile_sum > 0.0f"),
    Mutant("a split of weight zero is not read", REDUCE, MERGE, f"{REDUCE}.hip.j2", "w >= 0.0f ?", "w > 0.0f ?"),
    Mutant("a tree row passes over V of small weights", TILE_BATCHED, BRANCHES, f"{TILE_BATCHED}.hip.j2", "if (__builtin_bit_cast(unsigned, scores[key]) == 0x80000000u)", "if (scores[key] == 0.0f)"),
    Mutant("a score of -inf drops its key, in splits", GQA, SPLIT, "softmax.h", "return fma_f32(score, 0.0f, e);", "return score < e ? e : e;"),
    Mutant("a spoilt value of a ragged step is zero", GQA, SPLIT, f"{GQA}.hip.j2", "ragged && b < BLOCKS", "!ragged && b < 0"),
    Mutant("a score of -inf drops its key, in verify_mma", MMA, COLUMNS40, "softmax.h", "return fma_f32(score, 0.0f, e);", "return score < e ? e : e;"),
    Mutant("a score of -inf drops its key, in rows of matrices", PREFILL, {"head_dim": 128}, "matrix_softmax.h", "or_nan(exp2_f32(s[b].x[i] - top[r]), s[b].x[i])", "exp2_f32(s[b].x[i] - top[r])"),
    Mutant("prefill takes a spoilt value for zero", PREFILL, {"head_dim": 128}, f"{PREFILL}.hip.j2", "turned.x[i] += spoil[fragment::acct_col(i, lane())];", "turned.x[i] += 0.0f;"),
    Mutant("a draft takes a NaN sum for that of no key", DFLASH, SLIDE, f"{DFLASH}.hip.j2", "sum.total != 0.0f ?", "sum.total > 0.0f ?"),
    Mutant("a draft's score of -inf drops its key", DFLASH, SLIDE, f"{DFLASH}.hip.j2", "or_nan(exp_f32(scores[key] - top) * unit, scores[key])", "exp_f32(scores[key] - top) * unit"),
    Mutant("a ragged step's V that is no number is zero to all", M16, F32KV, "draft_wave.h.j2", "if (any_lane(found) != 0)", "if (any_lane(found) > 1)"),
    Mutant("a ragged tile's V that is no number is zero to all", N64, SLIDING_F16KV, f"{N64}.hip.j2", "if (found) *anywhere = 1;", ""),
    Mutant("NaN is written as a number", KV_WRITE, {"pair": True}, f"{KV_WRITE}.hip.j2", " + wave_sum(x * 0.0f)", ""),
    # What is a number must stay one.
    Mutant("K of a hidden key counts", TILE_BATCHED, BRANCHES, f"{TILE_BATCHED}.hip.j2", "s = bias == MASKED ? MASKED : or_nan(s + bias, s + bias)", "s = s + bias"),
    Mutant("scores start at -1e30", TILE_BATCHED, TILE, "softmax.h", "LOWEST = -3.402823466e+38f", "LOWEST = -1e30f"),
    Mutant("products with codes overflow", TILE_BATCHED, TILE, "softmax.h", "SMALLER = 1.0f / 65536.0f, LARGER = 65536.0f", "SMALLER = 1.0f, LARGER = 1.0f"),
    Mutant("products with keys overflow", GQA, SPLIT, "softmax.h", "SMALLER = 1.0f / 65536.0f, LARGER = 65536.0f", "SMALLER = 1.0f, LARGER = 1.0f"),
    Mutant("sums of large V overflow", DFLASH, SLIDE, f"{DFLASH}.hip.j2", "- power_of_keys) * 0.25f", "- power_of_keys) * 65536.0f"),
    Mutant("a value that is NaN reaches those who do not see it, in splits", GQA, SPLIT, f"{GQA}.hip.j2", "ragged && stored - stored != 0.0f ? 0.0f", "ragged && stored - stored > 0.0f ? 0.0f"),
    Mutant("a value that is NaN reaches those who do not see it, in prefill", PREFILL, {"head_dim": 128}, f"{PREFILL}.hip.j2", "spoils == 0.0f ? stored : 0.0f", "stored"),
    Mutant("a value that is NaN reaches those who do not see it, in a step", M16, F32KV64, "draft_wave.h.j2", "(low ? 0 : 0xffffu) | (high ? 0 : 0xffff0000u)", "0xffffffffu"),
    Mutant("a value that is NaN reaches those who do not see it, in a tile", N64, SLIDING_F16KV, f"{N64}.hip.j2", "if (!whole) found |= clean_tile(second);", ""),
    Mutant("a value that is NaN reaches those who do not see it, in two terms", N64, F32KV, f"{N64}.hip.j2", "if (clean && beyond_f16(high))", "if (clean && !clean)"),
    Mutant("a block of large values is written as NaN", KV_WRITE, {"pair": False}, f"{KV_WRITE}.hip.j2", "amax == amax ?", "amax < 1e3f ?"),
]  # fmt: skip


def _mutated_environment(mutant: Mutant) -> jinja2.Environment:
    original = templates._environment(None)
    assert original.loader is not None
    source, _, _ = original.loader.get_source(original, mutant.template)
    assert source.count(mutant.old) >= 1, f"{mutant.template} no longer has {mutant.old!r}"
    edited = jinja2.DictLoader({mutant.template: source.replace(mutant.old, mutant.new)})
    return original.overlay(loader=jinja2.ChoiceLoader([edited, original.loader]), cache_size=0)


def survives(variant: Variant) -> bool:
    """Whether every case of a small grid passes, and to the same bits in any order of the threads; of a split verify
    kernel also what the grid has no case for; on matrix units also where these read subnormal f16 as zero.

    The error against the oracle stands for the bits: it is a float64 that moves with any of them.
    """
    devices = [device("host"), *(HostDevice(thread_order=seed) for seed in range(3))]
    flushing = [HostDevice(flush_f16=True)] if variant.family.name in ON_MATRIX_UNITS else []
    further = verify_lab.CHECKS if variant.family.oracle == SPLIT_ORACLE else ()
    try:
        for case in grid(variant, rows=(1, 5, 8, 31), contexts=(1, 2, 3, 129, 600)):
            results = [check(variant, case, host) for host in devices]
            if not all(r.ok for r in results) or len({r.error for r in results}) > 1:
                return False
            if not all(check(variant, case, host).ok for host in flushing):
                return False
        return not any(wrong(variant, host) for wrong in further for host in (*devices, *flushing))
    except (DeviceError, InputError):  # found by the launch, or before it
        return False


def _rewrite(function: FunctionType, old: str, new: str) -> None:
    """Give a function other code: whoever has imported it has the fault."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) >= 1, f"{function.__qualname__} no longer has {old!r}"
    made: dict[str, Any] = {}
    exec(source.replace(old, new), function.__globals__, made)
    function.__code__ = made[function.__name__].__code__


def plant(mutant: Mutant) -> Variant:
    """Put the fault in place, for the rest of this process, and return the variant that has it."""
    family: KernelFamily = families()[mutant.family]
    if mutant.grid is not None:
        family = dataclasses.replace(family, grid=mutant.grid)
        faulty = {**families(), mutant.family: family}
        attention.families = lambda: faulty  # type: ignore[assignment]
    elif mutant.function is not None:
        _rewrite(mutant.function, mutant.old, mutant.new)
    else:
        environment = _mutated_environment(mutant)
        templates._environment = lambda folder: environment  # type: ignore[assignment]
    return family.variant(**mutant.params)
