// v_wmma_f32_16x16x16_f16 (VOP3P), with the lane maps that AMD's matrix instruction calculator prints.
//
// gfx11: lane r has row r of A (column r of B) with all of k in order, and lane r + 16 the same again; of the result
// register i of lane n has rows 2 i and, in lanes from 16 on, 2 i + 1. gfx12: bit 2 of k is the half of the wave, its
// other bits the element; rows from 8 on are in the upper half.

static void operands(const Machine* g, const Wave* w, u32 reg, float (*m)[16]) {
    const int gfx12 = g->program->gfx12;
    for (int r = 0; r < 16; ++r)
        for (int k = 0; k < 16; ++k) {
            const int at = gfx12 ? r + 16 * (k >> 2 & 1) : r, i = gfx12 ? (k & 3) | (k >> 1 & 4) : k;
            const u32 half = w->v[reg + (u32)i / 2][at] >> 16 * (i & 1) & 0xffff;
            m[r][k] = g->launch->flushed && !(half & 0x7c00) ? 0.0f : h(half);
        }
}

static void check_matrix(Machine* g, const Wave* w, u32 at, const hk_op* o) {
    const u32 words = g->program->gfx12 ? 4 : 8;
    if (w->s[EXEC_LO] != ~0u) found(g, w, NOT_ALL_LANES, at, -1, -1, 0, w->s[EXEC_LO]);
    for (int operand = 0; operand < 2; ++operand)
        for (u32 i = 0; i < words; ++i) {
            const u32 reg = o->source[operand].reg + i;
            decides(g, w, at, reg, ~0u, HK_WORD);
            for (int l = 0; !g->program->gfx12 && l < 16; ++l)
                if (w->v[reg][l] != w->v[reg][l + 16]) found(g, w, HALVES, at, l, (int)reg, 0, 0);
        }
    for (u32 i = 0; o->source[2].kind == HK_VECTOR && i < 8; ++i) decides(g, w, at, o->source[2].reg + i, ~0u, HK_WORD);
}

static void matrix(Machine* g, Wave* w, u32 at, const hk_op* o) {
    const int gfx12 = g->program->gfx12;
    float a[16][16], b[16][16], turned[16][16] __attribute__((aligned(64))), sum[16][16] __attribute__((aligned(64)));
    u32 result[8][LANES];
    check_matrix(g, w, at, o);
    operands(g, w, o->source[0].reg, a);
    operands(g, w, o->source[1].reg, b);
    for (int n = 0; n < 16; ++n)
        for (int k = 0; k < 16; ++k) turned[k][n] = b[n][k];
    for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
            const u32 lane = (u32)(gfx12 ? n + 16 * (m >> 3) : n + 16 * (m & 1)), i = (u32)(gfx12 ? m & 7 : m >> 1);
            sum[m][n] = f(o->source[2].kind == HK_VECTOR ? w->v[o->source[2].reg + i][lane] : o->source[2].value);
        }
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n) sum[m][n] += a[m][k] * turned[k][n];
    for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n)
            result[gfx12 ? m & 7 : m >> 1][gfx12 ? n + 16 * (m >> 3) : n + 16 * (m & 1)] = u(sum[m][n]);
    for (u32 i = 0; i < 8; ++i) put(g, w, at, o->reg + i, result[i], ~0u, HK_WORD, ~0u, ~0u);
}
