// Scalar instructions, and the loop that runs a wave until another's turn.

enum { ITS_TURN_IS_OVER, AT_BARRIER, ENDED, STOPPED };

// Whoever reaches a barrier has done what comes before it: what a fence ahead of it waits for.
static void arrive(Machine* g, Wave* w, u32 at) {
    static const u8 counters[] = {HK_SHARED_OPS, HK_STORES};
    for (u32 i = 0; i < sizeof counters; ++i)
        if (w->issued[counters[i]] > w->done[counters[i]]) found(g, w, IN_FLIGHT, at, -1, -1, 0, counters[i]);
    if (w->signalled > w->passed) found(g, w, NOT_WAITED, at, -1, -1, 0, 0);
    w->signalled++;
}

static void read_lane(Machine* g, Wave* w, u32 at, const hk_op* o) {
    const u32 exec = w->s[EXEC_LO], first = exec ? (u32)__builtin_ctz(exec) : 0, reg = o->source[0].reg;
    const hk_source* p = &o->source[1];
    const u32 l = o->code == OP_v_readfirstlane_b32 ? first
                  : p->kind == HK_CONSTANT          ? p->value % LANES
                                                    : scalar(g, w, at, p->reg) % LANES;
    if (o->source[0].kind == HK_VECTOR) {
        arrived(g, w, at, reg);
        const u32 known = (w->low[reg] >> l & 1 ? 0xffffu : 0) | (w->high[reg] >> l & 1 ? 0xffff0000u : 0);
        set_scalar(g, w, at, o->reg, w->v[reg][l], known);
    } else {
        set_scalar(g, w, at, o->reg, scalar(g, w, at, reg), w->known[reg]);
    }
}

INLINE u32 word(Machine* g, const Wave* w, u32 at, const hk_source* p, u32* known) {
    if (p->kind == HK_CONSTANT || p->reg == NULL_REG) return p->value;
    if (w->known[p->reg] != ~0u) *known = 0;
    return scalar(g, w, at, p->reg);
}
INLINE u64 two_words(Machine* g, const Wave* w, u32 at, const hk_source* p, u32* known) {
    if (p->kind == HK_CONSTANT || p->reg == NULL_REG) return (u64)(i64)(i32)p->value;
    if ((w->known[p->reg] & w->known[p->reg + 1]) != ~0u) *known = 0;
    return scalar(g, w, at, p->reg) | (u64)scalar(g, w, at, p->reg + 1u) << 32;
}
INLINE u32 bits_known(const Wave* w, const hk_source* p) {
    return p->kind == HK_CONSTANT || p->reg == NULL_REG ? ~0u : w->known[p->reg];
}

// The condition is known where all it comes from is.
INLINE u32 condition(Wave* w, u32* known) {
    if (!w->scc_known) *known = 0;
    return w->scc;
}
static void jump(Machine* g, Wave* w, u32 at, const hk_op* o, u32 taken, u32 known) {
    if (__builtin_expect(!known, 0)) found(g, w, UNWRITTEN_SCALAR, at, -1, VECTORS + VCC, 0, 0);
    if (taken) w->pc = (u32)o->target;
}
// Whether any bit is set: known where one is known to be.
INLINE u32 any_bit(Machine* g, const Wave* w, u32 at, u32 reg, u32* known) {
    const u32 bits = scalar(g, w, at, reg);
    if (w->known[reg] != ~0u && !(bits & w->known[reg])) *known = 0;
    return bits;
}

#define X word(g, w, at, &o->source[0], &known)
#define Y word(g, w, at, &o->source[1], &known)
#define Z word(g, w, at, &o->source[2], &known)
#define XX two_words(g, w, at, &o->source[0], &known)
#define YY two_words(g, w, at, &o->source[1], &known)
#define IF_SCC condition(w, &known)
#define SCC w->scc_known = known, w->scc  // to be set, behind what it comes from
#define EXEC exec
#define D(value)                                         \
    {                                                    \
        const u32 one_ = (value);                        \
        set_scalar(g, w, at, o->reg, one_, known);       \
    }
#define DD(value)                                                                                     \
    {                                                                                                 \
        const u64 both_ = (value);                                                                    \
        set_scalar(g, w, at, o->reg, (u32)both_, known);                                              \
        if (o->reg != NULL_REG) set_scalar(g, w, at, o->reg + 1u, (u32)(both_ >> 32), known);         \
    }
#define NONZERO(value)              \
    {                               \
        const u32 any_ = (value);   \
        SCC = any_ != 0;            \
        D(any_)                     \
    }
#define NONZERO64(value)            \
    {                               \
        const u64 any_ = (value);   \
        SCC = any_ != 0;            \
        DD(any_)                    \
    }
#define TEST(value)                \
    {                               \
        const u32 true_ = (value);  \
        SCC = true_ != 0;           \
    }
#define BY_MOVE(value, mask) set_scalar(g, w, at, o->reg, (value), (mask))
// Bit by bit: a 0 decides what AND gives, a 1 what OR gives, whatever the other is.
#define KX bits_known(w, &o->source[0])
#define KY bits_known(w, &o->source[1])
#define BY_BIT(value, mask)                           \
    {                                                 \
        const u32 bits_ = (value), mask_ = (mask);    \
        w->scc = bits_ != 0;                          \
        w->scc_known = mask_ == ~0u || (bits_ & mask_); \
        set_scalar(g, w, at, o->reg, bits_, mask_);   \
    }
#define AND(p, q) const u32 p_ = (p), q_ = (q); BY_BIT(p_ & q_, (KX & KY) | (KX & ~p_) | (KY & ~q_))
#define OR(p, q) const u32 p_ = (p), q_ = (q); BY_BIT(p_ | q_, (KX & KY) | (KX & p_) | (KY & q_))
#define XOR(p, q) const u32 p_ = (p), q_ = (q); BY_BIT(p_ ^ q_, KX & KY)
// EXEC goes to the result, and becomes something else, in which these bits of X count.
#define SAVE(value, bits)                                                                \
    {                                                                                    \
        const u32 now_ = (value);                                                        \
        if (o->source[0].kind == HK_SCALAR) scalar_decides(g, w, at, o->source[0].reg, (bits)); \
        set_scalar(g, w, at, o->reg, exec, ~0u);                                         \
        w->s[EXEC_LO] = now_;                                                            \
        w->scc = now_ != 0;                                                              \
        w->scc_known = 1;                                                                \
    }
#define JUMP(condition_)                           \
    {                                              \
        const u32 taken_ = (condition_) != 0;      \
        jump(g, w, at, o, taken_, known);          \
    }

static int run_wave(Machine* g, Wave* w, u32 turn) {
    const hk_program* program = g->program;
    for (; turn; --turn) {
        const u32 at = w->pc;
        if (at >= program->count) return stop(g, w, BEYOND, program->count - 1, -1, 0, 0), STOPPED;
        const hk_op* o = &program->ops[at];
        const u32 exec = w->s[EXEC_LO];
        u32 known = ~0u;
        g->outcome->runs[at]++;
        w->pc++;
        switch (o->code) {
#define VECTOR(name, name12, operands, section, ...) case OP_##name:
#define SCALAR(name, name12, operands, section, ...)
#define SPECIAL(name, name12, operands, section)
#define MEMORY(name, name12, access, section, space, bytes, places)
#include "table.h"
            vector(g, w, at, o);
            break;
#undef VECTOR
#undef SCALAR
#define VECTOR(name, name12, operands, section, ...)
#define SCALAR(name, name12, operands, section, ...) \
    case OP_##name: {                                \
        __VA_ARGS__;                                 \
    } break;
#include "table.h"
#undef SCALAR
#undef MEMORY
#define SCALAR(name, name12, operands, section, ...)
#define MEMORY(name, name12, access, section, space, bytes, places) case OP_##name:
#include "table.h"
            memory(g, w, at, o);
            if (g->stopped) return STOPPED;
            break;
#undef VECTOR
#undef SCALAR
#undef SPECIAL
#undef MEMORY
            case OP_v_readlane_b32:
            case OP_v_readfirstlane_b32: read_lane(g, w, at, o); break;
            case OP_v_wmma_f32_16x16x16_f16: matrix(g, w, at, o); break;
            default: break;
        }
    }
    return ITS_TURN_IS_OVER;
}
