// The streams of the stand-ins: what is queued on one is done when somebody waits for it, and no sooner.
//
// A piece of work knows the works it has to come behind: the one ahead of it in its stream, those whose event the
// stream was told to wait for, and, between the default stream and a stream that is not "non-blocking", all so far.
// Nothing else holds it: where a program relies on an order that it did not ask for, it gets another, and a wrong
// result. `standin_schedule` picks among the orders that are allowed. A work is done as a whole: that two of them
// overlap, or that one begins early (`Launch.early`), is not seen.
#include "objects.h"

enum What { LAUNCH, COPY, MARK };

struct Work {
    Work* next;  // of what is still to be done, the newest first
    enum What what;
    int device, done, ahead_count;
    Work** ahead;
    Nodes nodes;  // of LAUNCH: one kernel, or those of a graph
    void *to, *bytes;  // of COPY
    size_t size;
    double at;  // when it was done, of MARK
};

static Work* todo;
static Work* default_last[DEVICES];
static _Thread_local Object* own_stream[DEVICES];
static int schedule;
static unsigned long long random_state;

// When work is done: 0, only when it is waited for, and of several streams the newest first; -1, at once, as by a card
// that has nothing else to do; a seed above that, at random times in a random order.
void standin_schedule(int seed) {
    schedule = seed;
    random_state = (unsigned long long)seed;
}

static unsigned pick(unsigned count) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(random_state >> 33) % count;
}

// ---- doing work ----------------------------------------------------------------------------------------------------

static double now_ms(int device) {
    if (costs[0].part[0]) return busy_ms[device];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

// Whether every pointer argument is live memory of the function's device.
static int pointers_live(const Node* node, const char* call) {
    const Object* f = node->function;
    for (int i = 0; f->function.signature[i]; ++i) {
        if (f->function.signature[i] != 'p') continue;
        const Object* o = memory_at((void*)node->values[i], 1);
        if (o && o->device == f->device) continue;
        complain("%s: argument %d of %s is no live memory of device %d", call, i, f->function.entry, f->device);
        return 0;
    }
    return 1;
}

// Run the host build over the whole grid. Whether it could be.
static int run(Node* node) {
    const Object* f = node->function;
    if (!find(node->function, FUNCTION, "a launch") || !pointers_live(node, "a launch")) return 0;
    void* params[ARGUMENTS];
    for (int i = 0; i < ARGUMENTS; ++i) params[i] = &node->values[i];
    const unsigned threads = node->threads == f->function.threads ? f->function.run_threads : node->threads;
    hk_launch launch = {.threads = threads, .lds_bytes = f->function.lds, .fill = 0xff, .other = 0xff};
    memcpy(launch.grid, node->grid, sizeof launch.grid);
    const unsigned long stack = 64 * 1024, ahead = (f->function.workspace + 4095) / 4096 * 4096;
    byte* memory = aligned_alloc(4096, ahead + threads * stack);
    const hk_arena arena = {
        .workspace = memory, .stacks = (char*)memory + ahead, .stack_bytes = stack, .stack_stride = stack};
    hk_report report = {0};
    const unsigned long long blocks = (unsigned long long)node->grid[0] * node->grid[1] * node->grid[2];
    const int failed = f->function.run(&launch, params, 0, blocks, &arena, &report);
    free(memory);
    for (int i = 0; i < 8 && costs[i].part[0]; ++i)
        if (strstr(f->function.entry, costs[i].part)) {
            busy_ms[f->device] += 1e-3 * (costs[i].fixed_us + costs[i].block_us * (double)blocks);
            break;
        }
    if (failed) complain("%s failed on the host with %d at line %d", f->function.entry, failed, report.line);
    return !failed;
}

static void perform(Work* work) {
    if (work->what == COPY) memcpy(work->to, work->bytes, work->size);
    for (Node* node = work->nodes.first; node; node = node->next)
        if (!run(node)) {
            pending[work->device] = LAUNCH_FAILURE;
            break;
        }
    work->at = now_ms(work->device);
    work->done = 1;
    Work** at = &todo;
    while (*at != work) at = &(*at)->next;
    *at = work->next;
    free_nodes(&work->nodes);
    free(work->bytes);
    free(work->ahead);  // the rest stays: events and streams know it
}

// Do a work, and of the others only what it has to come behind.
static void force(Work* work) {
    if (!work || work->done) return;
    for (int i = 0; i < work->ahead_count; ++i) force(work->ahead[i]);
    perform(work);
}

static int ready(const Work* work) {
    for (int i = 0; i < work->ahead_count; ++i)
        if (!work->ahead[i]->done) return 0;
    return 1;
}

// One work that may be done, of a device or of any; NULL if there is none.
static Work* next_work(int device) {
    Work* found = NULL;
    unsigned count = 0;
    for (Work* work = todo; work; work = work->next) {
        if ((device >= 0 && work->device != device) || !ready(work)) continue;
        if (schedule <= 0) return work;
        if (!pick(++count)) found = work;
    }
    return found;
}

// Do all the work of a device. What it finds out about faults, `waited` tells.
static void drain(int device) {
    for (;;) {
        Work* work = next_work(device);
        for (Work* other = todo; !work && other; other = other->next)
            if (other->device == device) work = other;  // it waits for another device
        if (!work) return;
        force(work);
    }
}

// What a wait for the device finds out.
static int waited(int device) {
    const int fault = pending[device];
    pending[device] = SUCCESS;
    return fault;
}

// ---- queueing ------------------------------------------------------------------------------------------------------

static void put_behind(Work* work, Work* earlier) {
    if (!earlier || earlier->done) return;
    work->ahead = realloc(work->ahead, (size_t)(work->ahead_count + 1) * sizeof *work->ahead);
    work->ahead[work->ahead_count++] = earlier;
}

// New work at the end of a stream of the current device, NULL for the default stream. To be filled in, then `queued`.
static Work* queue(Object* stream, enum What what) {
    Work* work = calloc(1, sizeof *work);
    work->what = what;
    work->device = current;
    work->next = todo;
    todo = work;
    put_behind(work, stream ? stream->stream.last : default_last[current]);
    if (stream && stream->stream.blocking) put_behind(work, default_last[current]);
    for (Object* o = objects; !stream && o; o = o->next)
        if ((o->kind == STREAM || o->kind == OWN_STREAM) && o->device == current && o->stream.blocking)
            put_behind(work, o->stream.last);
    *(stream ? &stream->stream.last : &default_last[current]) = work;
    return work;
}

static void queued(Work* work) {
    if (schedule < 0) force(work);
    for (Work* other; schedule > 0 && pick(3) && (other = next_work(-1));) perform(other);
}

// ---- captures ------------------------------------------------------------------------------------------------------

static int spoil_captures(int status, const char* call) {
    int found = 0;
    for (Object* o = objects; o; o = o->next)
        if (o->kind == STREAM && o->stream.state == CAPTURING) {
            o->stream.state = SPOILED;
            found = 1;
        }
    if (found) complain("%s: a stream is being captured", call);
    return found ? status : SUCCESS;
}

// Calls that only a relaxed capture of the same thread allows.
static int unsafe_in_capture(const char* call) {
    for (Object* o = objects; o; o = o->next)
        if (o->kind == STREAM && o->stream.state == CAPTURING && o->stream.mode != RELAXED &&
            pthread_equal(o->stream.thread, pthread_self())) {
            o->stream.state = SPOILED;
            complain("%s: a stream is being captured, and not in relaxed mode", call);
            return CAPTURE_UNSUPPORTED;
        }
    return SUCCESS;
}

// The stream of a handle: 0 with *stream set (NULL for the default stream), or the status to fail with.
static int stream_of(void* handle, const char* call, Object** stream) {
    *stream = NULL;
    if ((size_t)handle <= 1) return SUCCESS;
    if ((size_t)handle == 2) {  // this thread's own default stream
        if (!own_stream[current]) {
            own_stream[current] = add(OWN_STREAM);
            own_stream[current]->stream.blocking = 1;
        }
        *stream = own_stream[current];
        return SUCCESS;
    }
    if (!(*stream = find(handle, STREAM, call))) return INVALID_HANDLE;
    if ((*stream)->device == current) return SUCCESS;
    complain("%s: a stream of device %d, with device %d current", call, (*stream)->device, current);
    return INVALID_HANDLE;
}
