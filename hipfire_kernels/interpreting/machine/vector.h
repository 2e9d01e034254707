// Vector arithmetic: sources of 32 lanes, what an instruction makes of them, results under EXEC.

typedef struct {
    const u32 *a, *b, *c, *ah, *bh, *ch;  // the sources; the high words of 64 bits
    u32 r[LANES] __attribute__((aligned(64))), r2[LANES] __attribute__((aligned(64)));
    u32 bits, carry, exec, off;  // off: lanes that took the value of one that is switched off
    u32 low, high;               // lanes in which the parts of the result are known
    int ieee;
    u32 room[8][LANES] __attribute__((aligned(64)));  // sources that are no plain register
} Vector;

#define A a[l]
#define B b[l]
#define C c[l]
#define FA f(a[l])
#define FB f(b[l])
#define FC f(c[l])
#define LA (a[l] | (u64)x->ah[l] << 32)
#define LB (b[l] | (u64)x->bh[l] << 32)
#define LC (c[l] | (u64)x->ch[l] << 32)
#define EACH(e) \
    for (int l = 0; l < LANES; ++l) r[l] = (e);
#define EACH64(e)                       \
    for (int l = 0; l < LANES; ++l) {   \
        const u64 both = (e);           \
        r[l] = (u32)both;               \
        r2[l] = (u32)(both >> 32);      \
    }
#define BITS(e)                                                               \
    {                                                                         \
        u32 mask = 0;                                                         \
        for (int l = 0; l < LANES; ++l) mask |= (u32)((e) != 0) << l;         \
        bits |= mask;                                                         \
    }
// From a lane of a row, which four bits of `select` name.
#define ACROSS(row, select)                                             \
    {                                                                   \
        u32 low = 0;                                                    \
        for (int l = 0; l < LANES; ++l) {                               \
            const int from = (row) + (int)((select) >> 4 * (l & 15) & 15); \
            r[l] = a[from];                                             \
            low |= (x->low >> from & 1) << l;                           \
            x->off |= (x->exec >> l & ~(x->exec >> from) & 1) << l;     \
        }                                                               \
        x->low = x->high = low;                                         \
    }

#define VECTOR(name, name12, operands, section, ...)                                              \
    static void lanes_##name(Vector* restrict x) {                                                \
        const u32 *restrict const a = x->a, *restrict const b = x->b, *restrict const c = x->c;   \
        u32 *restrict const r = x->r, *restrict const r2 = x->r2, bits = 0;                       \
        (void)a, (void)b, (void)c, (void)r, (void)r2;                                             \
        __VA_ARGS__                                                                               \
        x->bits = bits;                                                                           \
    }
#define SCALAR(name, name12, operands, section, ...)
#define SPECIAL(name, name12, operands, section)
#define MEMORY(name, name12, access, section, space, bytes, places)
#include "table.h"
#undef VECTOR
#define VECTOR(name, name12, operands, section, ...) [OP_##name] = lanes_##name,
static void (*const lanes_of[OPS])(Vector* restrict) = {
#include "table.h"
};
#undef VECTOR
#undef SCALAR
#undef SPECIAL
#undef MEMORY

// ---- sources -------------------------------------------------------------------------------------------------------

INLINE const u32* spread(u32* room, u32 value) {
    for (int l = 0; l < LANES; ++l) room[l] = value;
    return room;
}

static __attribute__((noinline)) const u32* modified(u32* room, const u32* from, u32 mods) {
    for (int l = 0; l < LANES; ++l) {
        u32 y = from[l];
        if (mods & (HK_SWAP_LOW | HK_SWAP_HIGH))
            y = (mods & HK_SWAP_LOW ? y >> 16 : y & 0xffff) | (mods & HK_SWAP_HIGH ? y << 16 : y & 0xffff0000);
        y ^= (mods & HK_NEGATE_LOW ? 0x8000u : 0) | (mods & HK_NEGATE_HIGH ? 0x80000000u : 0);
        if (mods & HK_SHIFT) y >>= 16;
        if (mods & HK_FROM_F16) y = u(h(y));
        y &= ~((mods & HK_ABS32 ? 0x80000000u : 0) | (mods & HK_ABS16 ? 0x8000u : 0));
        y ^= (mods & HK_NEGATE32 ? 0x80000000u : 0) | (mods & HK_NEGATE16 ? 0x8000u : 0);
        room[l] = y;
    }
    return room;
}

// DPP: each lane has another's value. What is read of a lane that is switched off, or of none, is 0.
static const u32* mapped(Machine* g, const hk_op* o, Vector* x, u32* room, const u32* from) {
    const signed char* map = g->program->maps + LANES * o->map;
    for (int l = 0; l < LANES; ++l) {
        const int on = map[l] >= 0 && x->exec >> map[l] & 1;
        room[l] = on ? from[map[l]] : 0;
        if (map[l] >= 0 && !on) x->off |= (x->exec >> l & 1) << l;
    }
    return room;
}

static u32 mapped_bits(const Machine* g, const hk_op* o, u32 bits) {
    const signed char* map = g->program->maps + LANES * o->map;
    u32 moved = 0;
    for (int l = 0; l < LANES; ++l) moved |= (map[l] < 0 ? 1 : bits >> map[l] & 1) << l;
    return moved;
}

// One source: where its words are, and the high ones of 64 bits. `lanes`: those that take it.
INLINE const u32* source(
    Machine* g, const Wave* w, u32 at, const hk_op* o, int i, Vector* x, u32 lanes, const u32** upper) {
    const hk_source* p = &o->source[i];
    u32 *room = x->room[2 * i], low = ~0u, high = ~0u;
    const u32* from;
    if (p->kind == HK_VECTOR) {
        arrived(g, w, at, p->reg);
        from = w->v[p->reg];
        low = w->low[p->reg];
        high = w->high[p->reg];
        if (p->part == HK_PAIR) {
            arrived(g, w, at, p->reg + 1u);
            *upper = w->v[p->reg + 1];
            low &= high;
            high = w->low[p->reg + 1] & w->high[p->reg + 1];
        }
        if (i == 0 && o->map >= 0) {
            from = mapped(g, o, x, room, from);
            low = mapped_bits(g, o, low | ~x->exec);
            high = mapped_bits(g, o, high | ~x->exec);
        }
    } else if (p->kind == HK_SCALAR) {
        from = spread(room, scalar(g, w, at, p->reg));
        if (p->reg != NULL_REG) {
            low = (w->known[p->reg] & 0xffff) == 0xffff ? ~0u : 0;
            high = w->known[p->reg] >> 16 == 0xffff ? ~0u : 0;
        }
        if (p->part == HK_PAIR) {
            *upper = spread(x->room[2 * i + 1], scalar(g, w, at, p->reg + (p->reg != NULL_REG)));
            low &= high;
            if (p->reg != NULL_REG) high = w->known[p->reg + 1] == ~0u ? ~0u : 0;
        }
    } else {
        from = spread(room, p->value);
        if (p->part == HK_PAIR) *upper = spread(x->room[2 * i + 1], (u32)((i32)p->value >> 31));
    }
    if (p->needs == HK_LOW) high = low;
    if (p->needs == HK_HIGH) low = high;
    if (!(o->flags & HK_APART)) low = high = low & high;
    x->low &= low | ~lanes;
    x->high &= high | ~lanes;
    return p->mods ? modified(room, from, p->mods) : from;
}

static void evaluate(Machine* g, const Wave* w, u32 at, const hk_op* o, Vector* x) {
    x->exec = w->s[EXEC_LO];
    x->off = x->carry = 0;
    x->low = x->high = ~0u;
    x->a = x->b = x->c = x->ah = x->bh = x->ch = x->room[0];
    x->ieee = g->program->ieee;
    for (int i = 0; i < 4; ++i) {
        const hk_source* p = &o->source[i];
        if (p->part != HK_MASK) continue;
        x->carry = p->kind == HK_CONSTANT ? p->value : scalar(g, w, at, p->reg);
        if (p->kind == HK_SCALAR && p->reg != NULL_REG) x->low = x->high = w->known[p->reg];
    }
    const u32 first = o->flags & HK_SELECTS ? ~x->carry : ~0u, second = o->flags & HK_SELECTS ? x->carry : ~0u;
    if (o->source[0].kind && o->source[0].part != HK_MASK) x->a = source(g, w, at, o, 0, x, first, &x->ah);
    if (o->source[1].kind && o->source[1].part != HK_MASK) x->b = source(g, w, at, o, 1, x, second, &x->bh);
    if (o->source[2].kind && o->source[2].part != HK_MASK) x->c = source(g, w, at, o, 2, x, ~0u, &x->ch);
    lanes_of[o->code](x);
}

static void commit(Machine* g, Wave* w, u32 at, const hk_op* o, Vector* x) {
    const u32 both = x->low & x->high;
    if (__builtin_expect(x->off, 0)) found(g, w, OFF_LANE, at, __builtin_ctz(x->off), -1, 0, 0);
    if (o->flags & HK_CLAMP)
        for (int l = 0; l < LANES; ++l) x->r[l] = u(!(f(x->r[l]) > 0) ? 0.0f : f(x->r[l]) > 1 ? 1.0f : f(x->r[l]));
    if (o->result == HK_VECTOR && o->part == HK_PAIR) {
        put(g, w, at, o->reg, x->r, x->exec, HK_WORD, x->low, x->low);
        put(g, w, at, o->reg + 1u, x->r2, x->exec, HK_WORD, both, both);
    } else if (o->result == HK_VECTOR) {
        const int half = o->part != HK_WORD;
        put(g, w, at, o->reg, x->r, x->exec, o->part, half ? both : x->low, half ? both : x->high);
    }
    const u32 reg = o->flags & HK_TO_EXEC ? EXEC_LO : o->mask_reg;
    if (reg != NO_REG) set_scalar(g, w, at, reg, x->bits & x->exec, both | ~x->exec);
}

// One instruction, or the two of a v_dual, which read before either writes.
static void vector(Machine* g, Wave* w, u32 at, const hk_op* o) {
    Vector x, y;
    evaluate(g, w, at, o, &x);
    if (o->flags & HK_PAIRED) {
        evaluate(g, w, at + 1, o + 1, &y);
        commit(g, w, at, o, &x);
        commit(g, w, at + 1, o + 1, &y);
        g->outcome->runs[at + 1]++;
        w->pc++;
    } else {
        commit(g, w, at, o, &x);
    }
}
