// Dialect: the CPU. One fiber per GPU thread; barriers and wave operations are the only points where threads switch.
//
// hk_run runs a range of blocks on the calling OS thread, which may be one of many. The threads of a block take
// turns in a ring whose order a seed can permute: a result that depends on it is a race. LDS is an arena filled with
// NaN before each block, with a guard behind it; under a memory check each of its arrays lies where the caller says. A
// wave operation needs all 32 lanes at the same source line, a barrier all living threads: anything else ends in an
// error that names block, thread and line. So does a fault of the processor under a memory check, see faults_host.h.
//
// Stacks and all else that takes memory is the caller's: one arena of an OS thread, for every kernel of the process.
#if defined(__x86_64__) && !defined(HK_PORTABLE_SWITCH)
#define HK_ASM_SWITCH 1
#else
#define HK_ASM_SWITCH 0
#include <setjmp.h>
#include <ucontext.h>
#endif

#define __global__ __attribute__((visibility("hidden"), noinline))  // a stack that overflows has its line
#define __device__ static __attribute__((unused))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads)
#define SHARED(type, name, count, offset) type* const name = (type*)hk::block.lds_at[(offset) / hk::LDS_STEP]
#define SHARED_ALIGNED(align, type, name, count, offset) SHARED(type, name, count, offset)

extern "C" {
float exp2f(float);
}

namespace hk {

// What the caller and a kernel tell each other: mirrored in hipfire_kernels/running/devices/host.py.
// What is new stands behind what was there: the caller may run a kernel of an older revision.
enum Error {
    OK = 0,
    WAVE_LINES_DIFFER = 1,
    BARRIER_LINES_DIFFER = 2,
    DEADLOCK = 3,
    LDS_OVERRUN = 4,
    LDS_ARRAY_OVERRUN = 5,
    FAULT = 6,
    LANES_DIFFER = 20,
    MISALIGNED = 21
};

struct Launch {
    unsigned grid[3], threads, lds_bytes, permute;
    unsigned long long seed;
    unsigned lds_changed;  // under a memory check: so many bytes of LDS start as `other`, the rest as `fill`
    unsigned char fill, other;
    unsigned char flush_f16;  // the matrix operation reads subnormal f16 operands as zero
};

// An LDS array as it is declared: where it would lie with all of them behind each other, what its address must be a
// multiple of, and what it takes.
struct LdsArray {
    const char *name, *type;
    unsigned offset, align, count, bytes;
};

// Where an LDS array lies under a memory check, and which of its bytes, from there, the block may be prepared in.
struct LdsPlace {
    unsigned char* at;
    unsigned from, to;
};

struct Arena {
    void* workspace;  // hk_workspace_bytes, from the start of a page
    char* stacks;     // the thread's own begins at a multiple of stack_stride; behind it and before the first: a guard
    unsigned long stack_bytes, stack_stride;
    const LdsPlace* lds;  // one for each array of the kernel: the launch is under a memory check; else null
};

struct Report {
    unsigned block[3], thread;
    int line, other_line;
    const char *file, *other_file;
    int signal, code, write;  // of a fault, with what it was at, the instruction and the stack
    unsigned long address, instruction, stack;
};

// A line of a template, as the `#line` directives have it; by default the one of the call.
struct At {
    const char* file;
    int line;
};
static constexpr At here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
static inline bool same(const At& a, const At& b) {
    return a.line == b.line && (a.file == b.file || __builtin_strcmp(a.file, b.file) == 0);
}

constexpr unsigned MAX_THREADS = 1024, WAVE = 32, LDS_MAX = 64 * 1024, LDS_GUARD = 256, LDS_STEP = 16;
constexpr unsigned OWN_BYTES = 2048, OWN_CLEARED = 16;  // of each thread, and how many are zero when a block starts

enum State : unsigned char { RUNNING, IN_WAVE_OP, AT_BARRIER, DONE };

struct Fiber {
#if HK_ASM_SWITCH
    void* sp;
#else
    jmp_buf at;
    ucontext_t start;
    bool started;
#endif
    unsigned wait;  // generation that ends the wait
    At at_op;       // what it waits in
    State state;
};

struct Wave {
    unsigned generation, arrived;
    At at;
    // By parity: a lane may reach the next operation before all have read this one's result.
    float lanes[2][WAVE][WAVE];
    float result[2][WAVE];
};

// Only pages of threads that a block has are ever touched. Every kernel has its own idea of what lies where in it.
struct Workspace {
    Fiber fibers[MAX_THREADS];
    Wave waves[MAX_THREADS / WAVE];
    unsigned short order[MAX_THREADS], place[MAX_THREADS];
    __attribute__((aligned(64))) unsigned char own[MAX_THREADS][OWN_BYTES];
    __attribute__((aligned(64))) unsigned char lds[LDS_MAX + LDS_GUARD];
    unsigned char* lds_at[LDS_MAX / LDS_STEP];
    __attribute__((aligned(64))) unsigned char signals[64 * 1024];  // the stack of their handler
};

// Small: the C library allocates it, and writes it, once for each OS thread and kernel of the process.
struct Block {
    Fiber* fibers;
    Wave* waves;
    unsigned short *order, *place;
    unsigned char (*own)[OWN_BYTES];
    unsigned char *lds, **lds_at;
    const LdsPlace* places;
    bool in_kernel, flush_f16;
    unsigned threads, alive, current, barrier_generation, barrier_arrived;
    At barrier_at;
    unsigned index[3];
    Error error;
    Report report;
#if HK_ASM_SWITCH
    void* home;
#else
    jmp_buf home;
#endif
    void** args;
};
static thread_local Block block;

// Generated from the declaration: what calls the kernel with its arguments unpacked, and its LDS arrays.
static void kernel(void** args);
extern "C" const LdsArray hk_lds[];
extern "C" const unsigned hk_lds_count;

// ---- switching -------------------------------------------------------------------------------------------------

#if HK_ASM_SWITCH
extern "C" __attribute__((visibility("hidden"))) void hk_switch(void** save, void* load);
extern "C" __attribute__((visibility("hidden"))) void hk_load();  // its second half: no function to call
asm(R"(
    .text
    .p2align 4
    .hidden hk_switch, hk_load
    .globl hk_switch, hk_load
    .type hk_switch, @function
hk_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
hk_load:
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size hk_switch, . - hk_switch
)");
static void resume(unsigned from, unsigned to) { hk_switch(&block.fibers[from].sp, block.fibers[to].sp); }
static void go_home(unsigned from) { hk_switch(&block.fibers[from].sp, block.home); }
#else
static void enter(Fiber& f) {
    if (f.started) _longjmp(f.at, 1);
    f.started = true;
    setcontext(&f.start);
}
static void resume(unsigned from, unsigned to) {
    if (!_setjmp(block.fibers[from].at)) enter(block.fibers[to]);
}
static void go_home(unsigned from) {
    if (!_setjmp(block.fibers[from].at)) _longjmp(block.home, 1);
}
#endif

static bool runnable(unsigned thread) {
    const Fiber& f = block.fibers[thread];
    if (f.state == RUNNING) return true;
    if (f.state == IN_WAVE_OP) return f.wait != block.waves[thread / WAVE].generation;
    return f.state == AT_BARRIER && f.wait != block.barrier_generation;
}

static __attribute__((noinline)) void fail(Error error, const At& at, const At& other) {
    block.error = error;
    Report& r = block.report;
    for (int i = 0; i < 3; ++i) r.block[i] = block.index[i];
    r.thread = block.current;
    r.file = at.file;
    r.line = at.line;
    r.other_file = other.file;
    r.other_line = other.line;
    go_home(block.current);  // nobody comes back: the fibers of the block are abandoned
}

// Switch to the next thread in the ring that can run.
static void yield() {
    const unsigned self = block.current;
    unsigned at = block.place[self];
    for (unsigned step = 0; step < block.threads; ++step) {
        at = at + 1 == block.threads ? 0 : at + 1;
        const unsigned next = block.order[at];
        if (!runnable(next)) continue;
        block.fibers[next].state = RUNNING;
        block.current = next;
        if (next != self) resume(self, next);
        return;
    }
    if (block.alive == 0) return go_home(self);
    // Nobody can run: name this thread, or one that waits if this one has returned, and one that waits elsewhere.
    const bool gone = block.fibers[self].state == DONE;
    At where = gone ? At{"", 0} : block.fibers[self].at_op, other = {"", 0};
    for (unsigned t = 0; t < block.threads; ++t) {
        const Fiber& f = block.fibers[t];
        if (f.state == DONE) continue;
        if (where.line == 0) {
            where = f.at_op;
            block.current = t;
        } else if (!same(f.at_op, where)) {
            other = f.at_op;
        }
    }
    const unsigned waits = block.current;
    block.current = self;
    block.report.thread = waits;
    fail(DEADLOCK, where, other);
}

static void release_barrier() {
    block.barrier_arrived = 0;
    ++block.barrier_generation;
}

static void finish() {
    block.fibers[block.current].state = DONE;
    if (--block.alive && block.barrier_arrived == block.alive) release_barrier();
    yield();
}

static void fiber_main() {
    kernel(block.args);
    finish();
}

static void barrier(const At& at) {
    Fiber& f = block.fibers[block.current];
    if (block.barrier_arrived && !same(block.barrier_at, at)) fail(BARRIER_LINES_DIFFER, at, block.barrier_at);
    block.barrier_at = at;
    if (++block.barrier_arrived == block.alive) return release_barrier();
    f.at_op = at;
    f.wait = block.barrier_generation;
    f.state = AT_BARRIER;
    yield();
}

// Each lane brings COUNT values; the last one to arrive computes; all return with the parity of their results.
template <int COUNT, class Combine>
static __forceinline__ int wave_op(const float (&x)[COUNT], const At& at, Combine combine) {
    const unsigned self = block.current;
    Wave& w = block.waves[self / WAVE];
    if (w.arrived && !same(w.at, at)) fail(WAVE_LINES_DIFFER, at, w.at);
    w.at = at;
    const int parity = w.generation & 1;
    for (int i = 0; i < COUNT; ++i) w.lanes[parity][i][self % WAVE] = x[i];
    if (++w.arrived == WAVE) {
        combine(w, parity);
        w.arrived = 0;
        ++w.generation;
        return parity;
    }
    Fiber& f = block.fibers[self];
    f.at_op = at;
    f.wait = w.generation;
    f.state = IN_WAVE_OP;
    yield();
    return parity;
}

// The xor 16, 8, 4, 2, 1 tree. Lane 0's result is every lane's: x + y and y + x are the same bits.
template <class Op>
static __forceinline__ float tree(const float (&lanes)[WAVE], Op op) {
    float x[WAVE / 2];
    for (int i = 0; i < 16; ++i) x[i] = op(lanes[i], lanes[i + 16]);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) x[i] = op(x[i], x[i + half]);
    return x[0];
}

// ---- running ---------------------------------------------------------------------------------------------------

static void work_in(const Arena& arena) {
    Workspace& own = *(Workspace*)arena.workspace;
    block.fibers = own.fibers;
    block.waves = own.waves;
    block.order = own.order;
    block.place = own.place;
    block.own = own.own;
    block.lds = own.lds;
    block.lds_at = own.lds_at;
    block.places = arena.lds;
    for (unsigned i = 0; i < hk_lds_count; ++i) {
        const unsigned offset = hk_lds[i].offset;
        block.lds_at[offset / LDS_STEP] = arena.lds ? arena.lds[i].at : block.lds + offset;
    }
}

static void prepare_fiber(const Arena& arena, unsigned thread) {
    Fiber& f = block.fibers[thread];
    char* bottom = arena.stacks + thread * arena.stack_stride;
#if HK_ASM_SWITCH
    void** top = (void**)(bottom + arena.stack_bytes);
    *--top = nullptr;             // where fiber_main would return to; also makes the stack 16-byte aligned at entry
    *--top = (void*)&fiber_main;  // popped by hk_switch's ret
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    f.sp = top;
#else
    f.started = false;
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = bottom;
    f.start.uc_stack.ss_size = arena.stack_bytes;
    f.start.uc_link = nullptr;
    makecontext(&f.start, fiber_main, 0);
#endif
    f.state = RUNNING;
    f.wait = 0;
    f.at_op = {"", 0};
}

static void order_threads(const Launch& launch, unsigned long long linear) {
    for (unsigned t = 0; t < launch.threads; ++t) block.order[t] = (unsigned short)t;
    unsigned long long state = (launch.seed + 1) * 0x9e3779b97f4a7c15ull + linear;
    for (unsigned t = launch.permute ? launch.threads : 0; t > 1; --t) {  // Fisher-Yates over a 64-bit mixer
        state += 0x9e3779b97f4a7c15ull;
        unsigned long long z = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ull;
        z ^= z >> 31;
        const unsigned pick = (unsigned)(z % t);
        const unsigned short moved = block.order[t - 1];
        block.order[t - 1] = block.order[pick];
        block.order[pick] = moved;
    }
    for (unsigned t = 0; t < launch.threads; ++t) block.place[block.order[t]] = (unsigned short)t;
}

// What a byte of an LDS array holds before anybody writes it.
static unsigned char unwritten(const Launch& launch, const LdsArray& array, unsigned byte) {
    return array.offset + byte < launch.lds_changed ? launch.other : launch.fill;
}

static void clear_lds(const Launch& launch) {
    if (!block.places) {
        __builtin_memset(block.lds, 0xff, launch.lds_bytes + LDS_GUARD);
        return;
    }
    for (unsigned i = 0; i < hk_lds_count; ++i) {
        const LdsPlace& place = block.places[i];
        const unsigned changed = launch.lds_changed > hk_lds[i].offset ? launch.lds_changed - hk_lds[i].offset : 0;
        const unsigned border = changed < place.from ? place.from : changed > place.to ? place.to : changed;
        __builtin_memset(place.at + place.from, launch.other, border - place.from);
        __builtin_memset(place.at + border, launch.fill, place.to - border);
    }
}

static void overrun(Error error, unsigned bytes, unsigned array) {
    block.error = error;
    for (int d = 0; d < 3; ++d) block.report.block[d] = block.index[d];
    block.report.line = (int)bytes;
    block.report.other_line = (int)array;
}

// Writes behind the LDS, or behind one of its arrays where the next page begins a few bytes later.
static void check_lds(const Launch& launch) {
    if (!block.places) {
        for (unsigned i = 0; i < LDS_GUARD; ++i)
            if (block.lds[launch.lds_bytes + i] != 0xff) return overrun(LDS_OVERRUN, i, 0);
        return;
    }
    for (unsigned i = 0; i < hk_lds_count; ++i)
        for (unsigned byte = hk_lds[i].bytes; byte < block.places[i].to; ++byte)
            if (block.places[i].at[byte] != unwritten(launch, hk_lds[i], byte))
                return overrun(LDS_ARRAY_OVERRUN, byte - hk_lds[i].bytes, i);
}

static void run_block(const Launch& launch, const Arena& arena, unsigned long long linear) {
    block.index[0] = (unsigned)(linear % launch.grid[0]);
    block.index[1] = (unsigned)(linear / launch.grid[0] % launch.grid[1]);
    block.index[2] = (unsigned)(linear / launch.grid[0] / launch.grid[1]);
    block.threads = block.alive = launch.threads;
    block.barrier_arrived = block.barrier_generation = 0;
    for (unsigned w = 0; w < launch.threads / WAVE; ++w) block.waves[w].generation = block.waves[w].arrived = 0;
    for (unsigned t = 0; t < launch.threads; ++t) {
        prepare_fiber(arena, t);
        __builtin_memset(block.own[t], 0, OWN_CLEARED);
    }
    order_threads(launch, linear);
    clear_lds(launch);
    block.current = block.order[0];
    block.in_kernel = true;
#if HK_ASM_SWITCH
    hk_switch(&block.home, block.fibers[block.current].sp);
#else
    if (!_setjmp(block.home)) enter(block.fibers[block.current]);
#endif
    block.in_kernel = false;
    if (block.error == OK) check_lds(launch);
}

// Makes faults of this OS thread leave the kernel, and takes that back; see faults_host.h.
static void catch_faults(const Arena& arena, bool on);

}  // namespace hk

#define HK_API extern "C" __attribute__((visibility("default")))

HK_API const unsigned long hk_workspace_bytes;
const unsigned long hk_workspace_bytes = sizeof(hk::Workspace);

// Runs blocks [first, last) of the launch. Returns hk::Error; the report says where.
// No two calls share an arena at a time.
HK_API int hk_run(const hk::Launch* launch, void** args, unsigned long long first, unsigned long long last,
                  const hk::Arena* arena, hk::Report* report) {
    hk::block.error = hk::OK;
    hk::block.args = args;
    hk::block.flush_f16 = launch->flush_f16 != 0;
    hk::work_in(*arena);
    if (arena->lds) hk::catch_faults(*arena, true);
    for (unsigned long long b = first; b < last && hk::block.error == hk::OK; ++b) hk::run_block(*launch, *arena, b);
    if (arena->lds) hk::catch_faults(*arena, false);
    *report = hk::block.report;
    return hk::block.error;
}

// ---- the kernel vocabulary -------------------------------------------------------------------------------------

__device__ __forceinline__ int thread() { return (int)hk::block.current; }
__device__ __forceinline__ int lane() { return thread() & 31; }
__device__ __forceinline__ int wave() { return thread() >> 5; }
__device__ __forceinline__ int block_x() { return (int)hk::block.index[0]; }
__device__ __forceinline__ int block_y() { return (int)hk::block.index[1]; }
__device__ __forceinline__ int block_z() { return (int)hk::block.index[2]; }

__device__ __forceinline__ void block_sync(hk::At at = hk::here()) { hk::barrier(at); }

__device__ __forceinline__ float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__device__ __forceinline__ float max_f32(float a, float b) { return __builtin_fmaxf(a, b); }
__device__ __forceinline__ float min_f32(float a, float b) { return __builtin_fminf(a, b); }
__device__ __forceinline__ float abs_f32(float a) { return __builtin_fabsf(a); }
__device__ __forceinline__ float rint_f32(float a) { return __builtin_rintf(a); }
__device__ __forceinline__ float exp2_f32(float x) { return exp2f(x); }

__device__ __forceinline__ float f16_to_f32(unsigned short bits) { return (float)__builtin_bit_cast(_Float16, bits); }
__device__ __forceinline__ unsigned short f32_to_f16(float x) {
    return __builtin_bit_cast(unsigned short, (_Float16)x);
}

__device__ __forceinline__ unsigned short load_u16(const unsigned char* p) {
    unsigned short w;
    __builtin_memcpy(&w, p, 2);
    return w;
}
__device__ __forceinline__ void store_u16(unsigned char* p, unsigned short w) { __builtin_memcpy(p, &w, 2); }

template <int COUNT>
struct Codes {
    signed char raw[COUNT];
};

template <int COUNT>
__device__ __forceinline__ Codes<COUNT> fetch_codes(const unsigned char* p) {
    Codes<COUNT> codes;
    __builtin_memcpy(codes.raw, p, COUNT);
    return codes;
}

template <int COUNT>
__device__ __forceinline__ void unpack_codes(const Codes<COUNT>& codes, float (&code)[COUNT]) {
    for (int i = 0; i < COUNT; ++i) code[i] = (float)codes.raw[i];
}

// See wave.h for what the lanes bring and receive.
__device__ __forceinline__ int first_row_of(int l, int count) { return l * count / 32; }

__device__ __forceinline__ float wave_sum(float x, hk::At at = hk::here()) {
    const float one[1] = {x};
    const int parity = hk::wave_op(one, at, [](hk::Wave& w, int p) {
        w.result[p][0] = hk::tree(w.lanes[p][0], [](float a, float b) { return a + b; });
    });
    return hk::block.waves[wave()].result[parity][0];
}

__device__ __forceinline__ float wave_max(float x, hk::At at = hk::here()) {
    const float one[1] = {x};
    const int parity = hk::wave_op(one, at, [](hk::Wave& w, int p) {
        w.result[p][0] = hk::tree(w.lanes[p][0], [](float a, float b) { return max_f32(a, b); });
    });
    return hk::block.waves[wave()].result[parity][0];
}

template <int COUNT>
__device__ __forceinline__ float wave_sum_rows(const float (&x)[COUNT], hk::At at = hk::here()) {
    const int parity = hk::wave_op(x, at, [](hk::Wave& w, int p) {
        for (int row = 0; row < COUNT; ++row) {
            float parts[32];
            for (int l = 0; l < 32; ++l) parts[l] = w.lanes[p][row ^ first_row_of(l, COUNT)][l];
            w.result[p][row] = hk::tree(parts, [](float a, float b) { return a + b; });
        }
    });
    return hk::block.waves[wave()].result[parity][first_row_of(lane(), COUNT)];
}
