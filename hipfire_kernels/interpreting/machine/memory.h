// Accesses of memory: arrays, LDS, constants; where they may go, and in what order waves may.

enum { READ, SIGNED, READ_LOW, READ_HIGH, WRITE, WRITE_HIGH, ADD, ADD_FLOAT, PULL };
enum { CONSTANT_SPACE, GLOBAL_SPACE, SHARED_SPACE, LANES_SPACE };
typedef struct {
    u8 access, space, bytes, places;
} Access;

#define IS_read READ
#define IS_signed SIGNED
#define IS_low READ_LOW
#define IS_high READ_HIGH
#define IS_write WRITE
#define IS_writehigh WRITE_HIGH
#define IS_add ADD
#define IS_addfloat ADD_FLOAT
#define IS_pull PULL
#define VECTOR(name, name12, operands, section, ...)
#define SCALAR(name, name12, operands, section, ...)
#define SPECIAL(name, name12, operands, section)
#define MEMORY(name, name12, access, section, space, bytes, places) \
    [OP_##name] = {IS_##access, space##_SPACE, bytes, places},
static const Access access_of[OPS] = {
#include "table.h"
};
#undef VECTOR
#undef SCALAR
#undef SPECIAL
#undef MEMORY

// ---- arrays --------------------------------------------------------------------------------------------------------

INLINE int inside(const hk_extent* e, u64 at, u64 bytes) { return at >= e->from && at + bytes <= e->to; }

// What is wrong with an access; FINDINGS where nothing is.
static __attribute__((noinline)) u32 look_up(Machine* g, u64 at, u64 bytes, int writes) {
    u32 beside = OUTSIDE;
    for (u32 i = 0; i < g->launch->extent_count; ++i) {
        const hk_extent* e = &g->launch->extents[i];
        if (!inside(e, at, bytes)) continue;
        if (writes && !e->writable) {
            beside = READ_ONLY;
            continue;
        }
        g->near = i;
        return FINDINGS;
    }
    return beside;
}

INLINE int may_access(Machine* g, const Wave* w, u32 at, int lane, u64 address, u64 bytes, int writes) {
    const hk_extent* near = &g->launch->extents[g->near];
    if (__builtin_expect(inside(near, address, bytes) && (!writes || near->writable), 1)) return 1;
    const u32 why = look_up(g, address, bytes, writes);
    return why == FINDINGS ? 1 : stop(g, w, why, at, lane, address, (u32)bytes);
}

// ---- LDS -----------------------------------------------------------------------------------------------------------

// Two waves' accesses are in order where the later one has passed a barrier that the earlier one reached afterwards.
INLINE int clashes(const Wave* w, u32 mark) {
    const u32 who = mark & 255, reached = mark >> 8;
    return mark && who != w->id + 1 && reached >= w->passed;
}

// Two that write the same are in no order, and need none. `data`: what is written.
static __attribute__((noinline)) void disordered(
    Machine* g, const Wave* w, u32 at, int lane, u32 first, u32 cells, u32 kind, const u8* data) {
    for (u32 i = first; i < first + cells; ++i) {
        const u32 writer = g->shadow.writer[i], reader = g->shadow.reader[i];
        const int same = kind == WRITE && !memcmp(g->lds + 2 * i, data + 2 * (i - first), 2);
        if (kind != WRITE && !writer) found(g, w, UNWRITTEN_LDS, at, lane, -1, 2 * i, 0);
        if (clashes(w, writer) && !same && !(kind == ADD && (writer & 255) == ATOMIC))
            found(g, w, kind == READ ? RACE_READ : RACE_WRITE, at, lane, -1, 2 * i, (writer & 255) - 1);
        if (kind != READ && clashes(w, reader))
            found(g, w, RACE_WRITE, at, lane, -1, 2 * i, (reader & 255) - 1);
    }
}

// Accesses of two bytes and more; of single bytes the neighbours may be another wave's, rightly. What a wave adds to by
// atomics it may read behind a barrier alone: others may add there too.
static void touch(
    Machine* g, const Wave* w, u32 at, int lane, u32 address, u32 bytes, u32 kind, const u8* data) {
    const u32 first = address / 2, cells = bytes < 2 ? 1 : bytes / 2, own = w->signalled << 8 | (w->id + 1);
    u32 *writer = g->shadow.writer + first, *reader = g->shadow.reader + first, bad = 0;
    if (kind == READ) {
        for (u32 i = 0; i < cells; ++i) bad |= !writer[i] | clashes(w, writer[i]);
        for (u32 i = 0; i < cells; ++i)
            reader[i] = clashes(w, reader[i]) ? w->signalled << 8 | MANY : own;
    } else {
        for (u32 i = 0; i < cells; ++i) bad |= clashes(w, writer[i]) | clashes(w, reader[i]);
        if (kind == ADD)
            for (u32 i = 0; i < cells; ++i) bad |= !writer[i];
    }
    if (__builtin_expect(bad && bytes > 1, 0)) disordered(g, w, at, lane, first, cells, kind, data);
    if (kind != READ)
        for (u32 i = 0; i < cells; ++i) writer[i] = kind == ADD && g->waves > 1 ? w->signalled << 8 | ATOMIC : own;
}

INLINE int may_share(
    Machine* g, const Wave* w, u32 at, int lane, u64 address, u32 bytes, u32 access, const u32* data) {
    if (address + bytes > g->program->lds_bytes) return stop(g, w, OUTSIDE_LDS, at, lane, address, bytes);
    const u32 align = bytes > 8 ? 16 : bytes;
    if (address % align) found(g, w, MISALIGNED, at, lane, -1, address, align);
    touch(g, w, at, lane, (u32)address, bytes, access >= ADD ? ADD : access >= WRITE ? WRITE : READ,
          (const u8*)data);
    return 1;
}

// ---- arrays, between the waves of a block --------------------------------------------------------------------------

static Stored* stored_at(const Machine* g, u64 at) {
    for (u32 i = (u32)(at * 0x9e3779b97f4a7c15ull >> 49), tries = 0; tries < 32; ++tries, i = (i + 1) % STORED)
        if (g->stored[i].block != g->blocks || g->stored[i].at == at) return &g->stored[i];
    return NULL;
}

static void note_stored(Machine* g, const Wave* w, u64 address, u32 bytes) {
    for (u64 at = address / 4; at <= (address + bytes - 1) / 4; ++at) {
        Stored* one = stored_at(g, at);
        if (!one) continue;
        *one = (Stored){at, g->blocks, w->signalled << 8 | (w->id + 1)};
        g->written++;
    }
}

static void check_stored(Machine* g, const Wave* w, u32 at, int lane, u64 address, u32 bytes) {
    for (u64 word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
        const Stored* one = stored_at(g, word);
        if (one && one->block == g->blocks && bytes > 1 && clashes(w, one->mark))
            found(g, w, RACE_ARRAY, at, lane, -1, address, (one->mark & 255) - 1);
    }
}

// ---- an access -----------------------------------------------------------------------------------------------------

static u64 base_address(Machine* g, const Wave* w, u32 at, u32 reg) {
    scalar_decides(g, w, at, reg, ~0u);
    scalar_decides(g, w, at, reg + 1, ~0u);
    return scalar(g, w, at, reg) | (u64)scalar(g, w, at, reg + 1) << 32;
}

static void addresses(Machine* g, const Wave* w, u32 at, const hk_op* o, u32 exec, int shared, u64* address) {
    const hk_source *from = &o->source[0], *base = &o->source[2];
    decides(g, w, at, from->reg, exec, HK_WORD);
    if (shared || base->kind == HK_SCALAR) {
        const u64 start = shared ? 0 : base_address(g, w, at, base->reg);
        for (int l = 0; l < LANES; ++l) address[l] = start + w->v[from->reg][l];
    } else {
        decides(g, w, at, from->reg + 1u, exec, HK_WORD);
        for (int l = 0; l < LANES; ++l) address[l] = w->v[from->reg][l] | (u64)w->v[from->reg + 1][l] << 32;
    }
}

static u32 add_to(void* p, u32 value, int floating) {
    u32 was = __atomic_load_n((u32*)p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n((u32*)p, &was, floating ? u(f(was) + f(value)) : was + value, 0,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
    return was;
}

// What a lane writes.
INLINE void gather(const Wave* w, const hk_op* o, const Access* a, int place, int lane, u32* t) {
    const u32 data = o->source[place ? 3 : 1].reg;
    for (u32 i = 0; i < (a->bytes + 3u) / 4; ++i) t[i] = w->v[data + i][lane];
    if (a->access == WRITE_HIGH || o->part == HK_HIGH) t[0] >>= 16;
}

// A lane's part of an access, which is allowed.
INLINE void perform(Wave* w, const hk_op* o, const Access* a, int place, int lane, u8* p, u32* t) {
    const u32 words = (a->bytes + 3u) / 4, to = o->reg + (u32)place * words;
    if (a->access >= ADD) {
        const u32 was = add_to(p, t[0], a->access == ADD_FLOAT);
        if (o->flags & HK_RETURNS) w->v[to][lane] = was;
    } else if (a->access >= WRITE) {
        memcpy(p, t, a->bytes);
    } else {
        memcpy(t, p, a->bytes);
        if (a->access == SIGNED) t[0] = a->bytes == 1 ? (u32)(int8_t)t[0] : (u32)(i16)t[0];
        if (a->access == READ_LOW || o->part == HK_LOW) t[0] = (w->v[to][lane] & 0xffff0000) | t[0];
        if (a->access == READ_HIGH || o->part == HK_HIGH) t[0] = (w->v[to][lane] & 0xffff) | t[0] << 16;
        for (u32 i = 0; i < words; ++i) w->v[to + i][lane] = t[i];
    }
}

// What an access fills is there when its counter says so.
static void fills(Machine* g, Wave* w, u32 at, u32 reg, u32 count, u32 exec, u32 counter, u32 part) {
    const u32 number = issue(w, counter);
    for (u32 i = reg; i < reg + count; ++i) {
        if (on_its_way(w, i) && w->unit[i] != counter) found(g, w, EARLY, at, -1, (int)i, 0, w->unit[i]);
        w->due[i] = number;
        w->unit[i] = (u8)counter;
        if (part != HK_HIGH) w->low[i] |= exec;
        if (part != HK_LOW) w->high[i] |= exec;
    }
}

static void access_lanes(Machine* g, Wave* w, u32 at, const hk_op* o) {
    const Access* a = &access_of[o->code];
    const u32 exec = w->s[EXEC_LO], words = (a->bytes + 3u) / 4;
    const int shared = a->space == SHARED_SPACE, writes = a->access >= WRITE;
    u64 address[LANES];
    addresses(g, w, at, o, exec, shared, address);
    for (int place = 0; writes && place < a->places; ++place)
        for (u32 i = 0; i < words; ++i) decides(g, w, at, o->source[place ? 3 : 1].reg + i, exec, o->source[1].needs);
    for (int place = 0; place < a->places; ++place)
        for (u32 left_over = exec; left_over; left_over &= left_over - 1) {
            const int l = __builtin_ctz(left_over);
            const u64 to = shared ? (u32)(address[l] + (u32)o->offset[place]) : address[l] + (u64)(i64)o->offset[place];
            u32 t[4] = {0};
            if (writes) gather(w, o, a, place, l, t);
            const int may = shared ? may_share(g, w, at, l, to, a->bytes, a->access, t)
                                   : may_access(g, w, at, l, to, a->bytes, writes);
            if (!may) return;
            if (!shared && a->access >= WRITE && a->access < ADD && g->waves > 1) note_stored(g, w, to, a->bytes);
            if (!shared && a->access < WRITE && g->written) check_stored(g, w, at, l, to, a->bytes);
            perform(w, o, a, place, l, shared ? g->lds + to : (u8*)to, t);
        }
    g->outcome->lanes[at] += (u32)__builtin_popcount(exec);
    const u32 part = a->access == READ_LOW || o->part == HK_LOW     ? HK_LOW
                     : a->access == READ_HIGH || o->part == HK_HIGH ? HK_HIGH
                                                                    : HK_WORD;
    if (!writes || o->flags & HK_RETURNS)
        fills(g, w, at, o->reg, words * a->places, exec, shared ? HK_SHARED_OPS : HK_LOADS, part);
    else issue(w, shared ? HK_SHARED_OPS : HK_STORES);
}

// ds_bpermute_b32: each lane names the one whose value it takes.
static void pull(Machine* g, Wave* w, u32 at, const hk_op* o) {
    const u32 exec = w->s[EXEC_LO], from = o->source[0].reg, data = o->source[1].reg;
    u32 r[LANES] = {0}, lanes = 0;
    decides(g, w, at, from, exec, HK_WORD);
    for (int l = 0; l < LANES; ++l) {
        const u32 other = (w->v[from][l] + (u32)o->offset[0]) / 4 % LANES;
        if (!(exec >> l & 1)) continue;
        if (exec >> other & 1) {
            lanes |= 1u << other;
            r[l] = w->v[data][other];
        } else {
            found(g, w, OFF_LANE, at, l, -1, 0, other);
        }
    }
    decides(g, w, at, data, lanes, HK_WORD);
    put(g, w, at, o->reg, r, exec, HK_WORD, ~0u, ~0u);
    fills(g, w, at, o->reg, 1, exec, HK_SHARED_OPS, HK_WORD);
}

static void load_constants(Machine* g, Wave* w, u32 at, const hk_op* o) {
    const hk_source *base = &o->source[0], *more = &o->source[1];
    const u32 bytes = access_of[o->code].bytes;
    if (more->kind == HK_SCALAR) scalar_decides(g, w, at, more->reg, ~0u);
    const u64 address = base_address(g, w, at, base->reg) + (u64)(i64)o->offset[0] +
                        (more->kind == HK_SCALAR ? scalar(g, w, at, more->reg) : 0);
    if (address % 4) found(g, w, MISALIGNED, at, -1, -1, address, 4);
    if (!may_access(g, w, at, -1, address, bytes, 0)) return;
    u32 t[16];
    memcpy(t, (void*)address, bytes);
    const u32 number = issue(w, HK_CONSTANTS);
    for (u32 i = 0; i < bytes / 4; ++i) {
        w->s[o->reg + i] = t[i];
        w->known[o->reg + i] = ~0u;
        w->scalar_due[o->reg + i] = number;
    }
    g->outcome->lanes[at]++;
}

static void memory(Machine* g, Wave* w, u32 at, const hk_op* o) {
    const u8 space = access_of[o->code].space;
    if (space == CONSTANT_SPACE) load_constants(g, w, at, o);
    else if (space == LANES_SPACE) pull(g, w, at, o);
    else access_lanes(g, w, at, o);
}
