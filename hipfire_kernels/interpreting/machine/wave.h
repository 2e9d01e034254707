// A wave and what surrounds it: registers, what of them is written, what is on its way into them.

enum {
#define VECTOR(name, name12, operands, section, ...) OP_##name,
#define SCALAR(name, name12, operands, section, ...) OP_##name,
#define SPECIAL(name, name12, operands, section) OP_##name,
#define MEMORY(name, name12, access, section, space, bytes, places) OP_##name,
#include "table.h"
#undef VECTOR
#undef SCALAR
#undef SPECIAL
#undef MEMORY
    OPS
};

enum {
#define NOTE(name, text) name,
#define STOP(name, text) name,
#include "findings.h"
#undef NOTE
#undef STOP
    FINDINGS
};

enum { VCC = 106, TTMP = 108, NULL_REG = 124, EXEC_LO = 126, SCALARS = 128, VECTORS = 256, LANES = 32, ALL = -1 };
enum { NO_REG = 0xffff };

typedef struct {
    u32 v[VECTORS][LANES] __attribute__((aligned(64)));
    u32 s[SCALARS];
    u32 low[VECTORS], high[VECTORS];  // lanes in which the half of a register is known: nothing unwritten is in it
    u32 known[SCALARS];               // the bits of a scalar register that are
    u32 due[VECTORS], scalar_due[SCALARS];  // the access that fills a register, by its number ...
    u8 unit[VECTORS];                       // ... among those of this counter
    u32 issued[HK_COUNTERS], done[HK_COUNTERS];
    u32 scc, scc_known, pc, id, signalled, passed, barrier, ended, waiting;
    u64 ran;
} Wave;

// Who has accessed two bytes of LDS last, for each: how many barriers it had reached, and behind that 1 + its wave.
typedef struct {
    u32* writer;
    u32* reader;
} Shadow;
enum { MANY = 254, ATOMIC = 253 };

// A word of an array that the block has written: in which block, and by whom as in Shadow.
typedef struct {
    u64 at;
    u32 block, mark;
} Stored;
enum { STORED = 1 << 15 };

typedef struct {
    const hk_program* program;
    const hk_launch* launch;
    hk_outcome* outcome;
    u8* lds;
    Shadow shadow;
    u32 block[3], waves, near;  // near: the extent that was accessed last
    Stored* stored;             // by their address; those that find no place are forgotten
    u32 blocks, written;        // blocks so far; words that this one has in `stored`
    u64 random;
    int stopped;
} Machine;

static void found(Machine* g, const Wave* w, u32 kind, u32 op, int lane, int reg, u64 address, u32 other) {
    hk_outcome* out = g->outcome;
    for (u32 i = 0; i < out->count; ++i)
        if (out->found[i].kind == kind && out->found[i].op == op) return;
    if (out->count == sizeof out->found / sizeof *out->found) return;
    hk_finding* one = &out->found[out->count++];
    *one = (hk_finding){.kind = (u16)kind, .wave = (u16)w->id, .lane = (short)lane, .reg = (short)reg};
    one->op = op;
    one->other = other;
    one->address = address;
    memcpy(one->block, g->block, sizeof one->block);
}

static __attribute__((noinline)) int stop(
    Machine* g, const Wave* w, u32 kind, u32 op, int lane, u64 address, u32 other) {
    found(g, w, kind, op, lane, -1, address, other);
    g->stopped = 1;
    return 0;
}

// ---- what is on its way --------------------------------------------------------------------------------------------

INLINE int on_its_way(const Wave* w, u32 reg) { return w->due[reg] > w->done[w->unit[reg]]; }

INLINE u32 issue(Wave* w, u32 counter) { return ++w->issued[counter]; }

INLINE void left(Wave* w, u32 counter, u32 most) {
    const u32 done = w->issued[counter] > most ? w->issued[counter] - most : 0;
    if (done > w->done[counter]) w->done[counter] = done;
}

// A counter goes down in order, but for scalar loads, which come in any: they are there when nothing is left. gfx11
// counts them with LDS.
static void wait_for(const Machine* g, Wave* w, const hk_op* o) {
    for (u32 counter = 0; counter < HK_COUNTERS; ++counter)
        if (o->wait[counter] >= 0 && (counter != HK_CONSTANTS || !o->wait[counter]))
            left(w, counter, (u32)o->wait[counter]);
    if (!g->program->gfx12 && o->wait[HK_SHARED_OPS] == 0) left(w, HK_CONSTANTS, 0);
}

// ---- registers -----------------------------------------------------------------------------------------------------
// A compiler copies and adds registers that it has not written, where the result does not matter. So what is unknown goes
// through arithmetic, and is found where it decides something: an address, what is stored, a branch, the lanes that are
// on, a matrix product.

INLINE void arrived(Machine* g, const Wave* w, u32 at, u32 reg) {
    if (__builtin_expect(on_its_way(w, reg), 0)) found(g, w, EARLY, at, -1, (int)reg, 0, w->unit[reg]);
}

// The lanes in which a register, or a half of it, is known.
INLINE u32 known_in(const Wave* w, u32 reg, u32 part) {
    return (part == HK_HIGH ? ~0u : w->low[reg]) & (part == HK_LOW ? ~0u : w->high[reg]);
}

// These lanes of a register, or of a half of it, decide something.
INLINE void decides(Machine* g, const Wave* w, u32 at, u32 reg, u32 lanes, u32 part) {
    arrived(g, w, at, reg);
    const u32 unknown = lanes & ~known_in(w, reg, part);
    if (__builtin_expect(unknown != 0, 0)) found(g, w, UNWRITTEN_VECTOR, at, __builtin_ctz(unknown), (int)reg, 0, 0);
}

INLINE u32 scalar(Machine* g, const Wave* w, u32 at, u32 reg) {
    if (reg == NULL_REG) return 0;
    if (__builtin_expect(w->scalar_due[reg] > w->done[HK_CONSTANTS], 0))
        found(g, w, EARLY, at, -1, (int)reg + VECTORS, 0, HK_CONSTANTS);
    return w->s[reg];
}

INLINE void scalar_decides(Machine* g, const Wave* w, u32 at, u32 reg, u32 bits) {
    if (__builtin_expect((bits & ~w->known[reg]) != 0 && reg != NULL_REG, 0))
        found(g, w, UNWRITTEN_SCALAR, at, -1, (int)reg + VECTORS, 0, 0);
}

INLINE void set_scalar(Machine* g, Wave* w, u32 at, u32 reg, u32 value, u32 known) {
    if (reg == NULL_REG) return;
    if (__builtin_expect(w->scalar_due[reg] > w->done[HK_CONSTANTS], 0))
        found(g, w, EARLY, at, -1, (int)reg + VECTORS, 0, HK_CONSTANTS);
    w->s[reg] = value;
    w->known[reg] = known;
    if (reg == EXEC_LO) scalar_decides(g, w, at, reg, ~0u);
}

// The active lanes of a result go to a register, or to a half of it; the lanes in which each half is known too.
INLINE void put(Machine* g, Wave* w, u32 at, u32 reg, const u32* r, u32 exec, u32 part, u32 low, u32 high) {
    arrived(g, w, at, reg);
    u32* v = w->v[reg];
    if (part == HK_WORD && exec == ~0u) memcpy(v, r, sizeof w->v[0]);
    else {
        const u32 kept = part == HK_LOW ? 0xffffu : part == HK_HIGH ? 0xffff0000u : ~0u, up = part == HK_HIGH ? 16 : 0;
        for (u32 l = 0; l < LANES; ++l) {
            const u32 mask = (0u - (exec >> l & 1)) & kept;
            v[l] = (v[l] & ~mask) | (r[l] << up & mask);
        }
    }
    if (part != HK_HIGH) w->low[reg] = (w->low[reg] & ~exec) | (low & exec);
    if (part != HK_LOW) w->high[reg] = (w->high[reg] & ~exec) | (high & exec);
}
