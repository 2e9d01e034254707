// Blocks: their waves take turns, drawn by a seed, and meet at barriers.

static u32 draw(Machine* g, u32 below) {
    g->random = g->random * 6364136223846793005ull + 1442695040888963407ull;
    return (u32)((g->random >> 33) * below >> 31);
}

static void start(const Machine* g, Wave* w, u32 id) {
    const hk_program* p = g->program;
    const u32 *block = g->block, here = p->threads - LANES * id, exec = here >= LANES ? ~0u : (1u << here) - 1;
    memset((u8*)w + offsetof(Wave, s), 0, sizeof *w - offsetof(Wave, s));
    memset(w->v, 0xff, p->vgprs * sizeof w->v[0]);
    memset(w->s, 0xff, sizeof w->s);
    w->id = id;
    w->scc_known = 1;
#define GIVE(reg, value) (w->s[reg] = (u32)(value), w->known[reg] = ~0u)
    GIVE(0, g->launch->kernarg);
    GIVE(1, g->launch->kernarg >> 32);
    if (p->gfx12) {
        GIVE(TTMP + 9, block[0]);
        GIVE(TTMP + 7, block[1] | block[2] << 16);
    } else {
        u32 reg = p->user_sgprs;
        for (u32 i = 0; i < 3; ++i)
            if (p->ids >> i & 1) {
                GIVE(reg, block[i]);
                ++reg;
            }
    }
    GIVE(EXEC_LO, exec);
    GIVE(EXEC_LO + 1, 0);
#undef GIVE
    for (u32 l = 0; l < LANES; ++l) w->v[0][l] = LANES * id + l;
    w->low[0] = w->high[0] = exec;
}

// All waves wait or have ended: let those through whose barrier everybody has reached. Whether there was one.
static int release(Machine* g, Wave* waves) {
    for (u32 i = 0; i < g->waves; ++i) {
        Wave* w = &waves[i];
        if (w->ended) continue;
        const Wave* first = w;
        for (u32 k = 0; k < g->waves; ++k) {
            const Wave* other = &waves[k];
            if (other->ended || other->signalled <= w->passed)
                return stop(g, w, MISSED_BARRIER, w->barrier, -1, 0, other->id);
            if (g->program->ops[other->barrier].place != g->program->ops[first->barrier].place)
                return stop(g, w, BARRIERS_DIFFER, w->barrier, -1, 0, other->id);
        }
    }
    int any = 0;
    for (u32 i = 0; i < g->waves; ++i)
        if (!waves[i].ended) {
            waves[i].passed++;
            waves[i].waiting = 0;
            any = 1;
        }
    return any;
}

static void run_block(Machine* g, Wave* waves) {
    u32 ready = g->waves;
    const u32 cells = g->program->lds_bytes / 2 + 1;
    g->blocks++;
    g->written = 0;
    memset(g->lds, 0xff, g->program->lds_bytes);
    memset(g->shadow.writer, 0, cells * sizeof *g->shadow.writer);
    memset(g->shadow.reader, 0, cells * sizeof *g->shadow.reader);
    for (u32 i = 0; i < g->waves; ++i) start(g, &waves[i], i);
    while (!g->stopped) {
        if (!ready) {
            if (!release(g, waves)) return;
            for (u32 i = 0; i < g->waves; ++i) ready += !waves[i].waiting && !waves[i].ended;
            continue;
        }
        u32 skip = draw(g, ready), i = 0;
        while (waves[i].waiting || waves[i].ended || skip--) ++i;
        Wave* w = &waves[i];
        const u32 turn = 1 + draw(g, g->launch->turn);
        const int end = run_wave(g, w, turn);
        if ((w->ran += turn) > g->launch->most) stop(g, w, ENDLESS, w->pc, -1, 0, (u32)(w->ran / 1000000));
        if (end == ENDED) {
            w->ended = 1;
            if (w->signalled > w->passed) found(g, w, NOT_WAITED, w->pc - 1, -1, -1, 0, 0);
        }
        if (end == AT_BARRIER) {
            w->waiting = 1;
            w->barrier = w->pc - 1;
            if (w->signalled <= w->passed) stop(g, w, NOT_SIGNALLED, w->barrier, -1, 0, 0);
        }
        ready -= end == ENDED || end == AT_BARRIER;
    }
}

// Run some blocks of a launch, up to the first in which something is found. Whether there was memory for it.
int hk_machine_run(const hk_program* program, const hk_launch* launch, unsigned long long first,
                   unsigned long long last, hk_outcome* outcome) {
    Machine g = {.program = program, .launch = launch, .outcome = outcome};
    g.waves = (program->threads + LANES - 1) / LANES;
    const size_t cells = program->lds_bytes / 2 + 16;
    Wave* waves = aligned_alloc(64, (g.waves * sizeof(Wave) + 63) / 64 * 64);
    g.lds = malloc(program->lds_bytes + 64);
    g.shadow.writer = malloc(cells * sizeof(u32));
    g.shadow.reader = malloc(cells * sizeof(u32));
    g.stored = calloc(STORED, sizeof(Stored));
    const int there = waves && g.lds && g.shadow.writer && g.shadow.reader && g.stored;
    for (u64 at = first; there && at < last && !outcome->count; ++at) {
        g.block[0] = (u32)(at % launch->grid[0]);
        g.block[1] = (u32)(at / launch->grid[0] % launch->grid[1]);
        g.block[2] = (u32)(at / launch->grid[0] / launch->grid[1]);
        g.random = (launch->seed ^ at * 0x9e3779b97f4a7c15ull) * 6364136223846793005ull + 1;
        run_block(&g, waves);
    }
    free(waves);
    free(g.lds);
    free(g.shadow.writer);
    free(g.shadow.reader);
    free(g.stored);
    return there;
}
