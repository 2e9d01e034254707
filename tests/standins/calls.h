// The calls that CUDA's and HIP's drivers have in common. hip.c and cuda.c give them their names.
//
// Such a file defines beforehand: FIRST_CURRENT, the device of a thread that has not chosen one (-1: none); COPIES_END_
// CAPTURES, whether a copy ends every capture; KERNEL_SYMBOL, what a module calls a kernel; `image_status`.
#include <unistd.h>

#include "queues.h"

static int image_status(const Elf64_Ehdr* image, int device);

const char* standin_complaints(void) {
    for (Object* o = objects; o; o = o->next)
        if (o->kind == MEMORY && !guards_intact(o)) complain("memory of %zu bytes: written outside", o->memory.size);
    return complaints;
}

// Take the complaints as read, and have no more faults, costs and schedules.
void standin_forget(void) {
    complaints[0] = 0;
    memset(costs, 0, sizeof costs);
    memset(faults, 0, sizeof faults);
    memset(pending, 0, sizeof pending);
    standin_schedule(0);
}

static int synchronize(const char* call) {
    CHECK(enter(call));
    CHECK(spoil_captures(CAPTURE_UNSUPPORTED, call));
    drain(current);
    return leave(waited(current));
}

// ---- memory --------------------------------------------------------------------------------------------------------

static int allocate(const char* call, void** pointer, size_t size) {
    *pointer = NULL;
    CHECK(enter(call));
    CHECK(unsafe_in_capture(call));
    REQUIRE(size, INVALID_VALUE);
    byte* base = size >> 40 ? NULL : aligned_alloc(GUARD, (size + 3 * GUARD - 1) / GUARD * GUARD);
    REQUIRE(base, OUT_OF_MEMORY);
    memset(base, GUARD_BYTE, GUARD);
    memset(base + GUARD, FRESH_BYTE, size);
    memset(base + GUARD + size, GUARD_BYTE, GUARD);
    Object* o = add(MEMORY);
    o->memory.base = base;
    o->memory.size = size;
    *pointer = base + GUARD;
    return leave(SUCCESS);
}

// Waits for the device.
static int release(const char* call, void* pointer) {
    CHECK(enter(call));
    CHECK(unsafe_in_capture(call));
    if (!pointer) return leave(SUCCESS);
    Object* o = memory_at(pointer, 0);
    if (!o || o->memory.base + GUARD != pointer) {
        complain("%s: %p was not allocated, or is freed already", call, pointer);
        return leave(INVALID_VALUE);
    }
    drain(o->device);
    if (!guards_intact(o)) complain("memory of %zu bytes: written outside", o->memory.size);
    memset(o->memory.base, 0xFF, o->memory.size + 2 * GUARD);
    free(o->memory.base);
    drop(o);
    return leave(SUCCESS);
}

// Between pageable host memory and the device, in the default stream. One to the device waits for what the stream has,
// and may return before the bytes are there: the default stream waits for them, no other does.
static int copy(const char* call, void* to, void* from, size_t size, int to_device) {
    CHECK(enter(call));
    CHECK(COPIES_END_CAPTURES ? spoil_captures(CAPTURE_IMPLICIT, call) : unsafe_in_capture(call));
    const Object* o = memory_at(to_device ? to : from, size);
    if (!o || memory_at(to_device ? from : to, 0)) {
        complain("%s: %zu bytes at %p: not in one allocation, or on both sides", call, size, to_device ? to : from);
        return leave(INVALID_VALUE);
    }
    Work* work = queue(NULL, COPY);
    for (int i = 0; i < work->ahead_count; ++i) force(work->ahead[i]);
    work->to = to;
    work->bytes = memcpy(malloc(size), from, size);
    work->size = size;
    if (!to_device) force(work);
    queued(work);
    return leave(waited(o->device));
}

// ---- streams and events --------------------------------------------------------------------------------------------

static int stream_create(const char* call, Object** stream, unsigned flags) {
    *stream = NULL;
    CHECK(enter(call));
    REQUIRE(flags <= 1, INVALID_VALUE);
    *stream = add(STREAM);
    (*stream)->stream.blocking = !flags;
    return leave(SUCCESS);
}

// What it has queued is done nevertheless.
static int stream_destroy(const char* call, void* handle) {
    CHECK(enter(call));
    Object* stream = find(handle, STREAM, call);
    REQUIRE(stream, INVALID_HANDLE);
    if (stream->stream.state) complain("%s: the stream is being captured", call);
    drop(stream);
    return leave(SUCCESS);
}

static int stream_synchronize(const char* call, void* handle) {
    CHECK(enter(call));
    Object* stream;
    CHECK(stream_of(handle, call, &stream));
    if (stream && stream->stream.state) {
        stream->stream.state = SPOILED;
        complain("%s: the stream is being captured", call);
        return leave(CAPTURE_UNSUPPORTED);
    }
    force(stream ? stream->stream.last : queue(NULL, MARK));
    return leave(waited(current));
}

static int stream_wait(const char* call, void* handle, void* event_handle, unsigned flags) {
    CHECK(enter(call));
    Object* stream;
    CHECK(stream_of(handle, call, &stream));
    const Object* event = find(event_handle, EVENT, call);
    REQUIRE(event && flags == 0, INVALID_VALUE);
    const int captured = stream && stream->stream.state == CAPTURING;
    REQUIRE(!event->event.captured || captured, CAPTURED_EVENT);
    if (captured && !event->event.captured) {
        stream->stream.state = SPOILED;
        complain("%s: a stream that is being captured cannot wait for what is not captured", call);
        return leave(CAPTURE_ISOLATION);
    }
    if (captured || !event->event.mark) return leave(SUCCESS);
    Work* work = queue(stream, MARK);
    put_behind(work, event->event.mark);
    queued(work);
    return leave(SUCCESS);
}

static int event_create(const char* call, Object** event) {
    *event = NULL;
    CHECK(enter(call));
    *event = add(EVENT);
    return leave(SUCCESS);
}

static int event_destroy(const char* call, void* handle) {
    CHECK(enter(call));
    Object* event = find(handle, EVENT, call);
    REQUIRE(event, INVALID_HANDLE);
    drop(event);
    return leave(SUCCESS);
}

static int event_record(const char* call, void* handle, void* stream_handle) {
    CHECK(enter(call));
    Object* stream;
    CHECK(stream_of(stream_handle, call, &stream));
    Object* event = find(handle, EVENT, call);
    REQUIRE(event, INVALID_HANDLE);
    if (event->device != current) {
        complain("%s: an event of device %d on a stream of device %d", call, event->device, current);
        return leave(INVALID_HANDLE);
    }
    REQUIRE(!stream || stream->stream.state != SPOILED, CAPTURE_INVALIDATED);
    event->event.captured = stream && stream->stream.state == CAPTURING;
    event->event.mark = NULL;
    if (!event->event.captured) {
        event->event.mark = queue(stream, MARK);
        queued(event->event.mark);
    }
    return leave(SUCCESS);
}

static int event_synchronize(const char* call, void* handle) {
    CHECK(enter(call));
    const Object* event = find(handle, EVENT, call);
    REQUIRE(event, INVALID_HANDLE);
    REQUIRE(!event->event.captured, CAPTURED_EVENT);
    force(event->event.mark);
    return leave(waited(event->device));
}

static int event_elapsed(const char* call, float* ms, void* start_handle, void* stop_handle) {
    *ms = 0;
    CHECK(enter(call));
    const Object *start = find(start_handle, EVENT, call), *stop = find(stop_handle, EVENT, call);
    REQUIRE(start && stop && start->event.mark && stop->event.mark, INVALID_HANDLE);
    REQUIRE(start->event.mark->done && stop->event.mark->done, NOT_READY);
    *ms = (float)(stop->event.mark->at - start->event.mark->at);
    return leave(SUCCESS);
}

// ---- modules -------------------------------------------------------------------------------------------------------

static int module_load(const char* call, Object** module, const void* image) {
    *module = NULL;
    CHECK(enter(call));
    CHECK(unsafe_in_capture(call));
    const Elf64_Ehdr* head = image;
    REQUIRE(head && !memcmp(head->e_ident, ELFMAG, SELFMAG), INVALID_IMAGE);
    CHECK(image_status(head, current));
    Object* o = add(MODULE);
    o->module.size = head->e_shoff + (size_t)head->e_shentsize * head->e_shnum;
    o->module.image = malloc(o->module.size);
    memcpy(o->module.image, image, o->module.size);
    *module = o;
    return leave(SUCCESS);
}

static int module_unload(const char* call, void* handle) {
    CHECK(enter(call));
    Object* module = find(handle, MODULE, call);
    REQUIRE(module, INVALID_HANDLE);
    for (Object *o = objects, *next; o; o = next) {
        next = o->next;
        if (o->kind == FUNCTION && o->function.module == module) drop(o);
    }
    free(module->module.image);
    drop(module);
    return leave(SUCCESS);
}

static int holds(const Object* module, const char* text) {
    const size_t length = strlen(text) + 1;
    for (size_t i = 1; i + length <= module->module.size; ++i)
        if (!module->module.image[i - 1] && !memcmp(module->module.image + i, text, length)) return 1;
    return 0;
}

// The host build of a kernel; and what ENTRY.args says: LDS bytes and threads of a block there, the most threads of a
// block on the card, LDS bytes that a launch has to give there, whether it waits itself for the launch ahead, and of
// each argument whether it is a pointer.
static int host_build(const char* call, const char* entry, Object* f) {
    const char* folder = getenv("STANDIN_KERNELS");
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.args", folder ? folder : ".", entry);
    FILE* file = fopen(path, "r");
    int read = 0;
    if (file) {
        read = fscanf(file, "%u %u %u %u %u %32s", &f->function.lds, &f->function.run_threads, &f->function.threads,
                      &f->function.arena, &f->function.waits, f->function.signature);
        fclose(file);
    }
    snprintf(path, sizeof path, "%s/%s.so", folder ? folder : ".", entry);
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    f->function.run = library ? (HostRun*)dlsym(library, "hk_run") : NULL;
    const unsigned long* workspace = library ? dlsym(library, "hk_workspace_bytes") : NULL;
    f->function.workspace = workspace ? *workspace : 0;
    if (read == 6 && f->function.run && workspace) return 1;
    complain("%s: no host build of %s at %s", call, entry, path);
    return 0;
}

static int module_function(const char* call, Object** function, void* handle, const char* name) {
    *function = NULL;
    CHECK(enter(call));
    Object* module = find(handle, MODULE, call);
    REQUIRE(module, INVALID_HANDLE);
    char symbol[160];
    snprintf(symbol, sizeof symbol, KERNEL_SYMBOL, name);
    REQUIRE(holds(module, symbol), NOT_FOUND);
    Object* o = add(FUNCTION);
    o->device = module->device;
    o->function.module = module;
    snprintf(o->function.entry, sizeof o->function.entry, "%s", name);
    if (!host_build(call, name, o)) {
        drop(o);
        return leave(NOT_FOUND);
    }
    *function = o;
    return leave(SUCCESS);
}

// Faults that a process was started with, of kernels with a text in their names: a launch that does not come back, and
// one that takes the process with it.
static void planted(const char* entry) {
    const char *hangs = getenv("STANDIN_HANGS"), *crashes = getenv("STANDIN_CRASHES");
    if (crashes && strstr(entry, crashes)) abort();
    if (hangs && strstr(entry, hangs))
        for (;;) pause();
}

// ---- launches and graphs -------------------------------------------------------------------------------------------

typedef struct {
    unsigned grid[3], block[3], shared_bytes, early;
    void* stream;
} Launching;

static int launch(const char* call, void* handle, const Launching* how, void** params, void** extra) {
    CHECK(enter(call));
    Object *function = find(handle, FUNCTION, call), *stream;
    REQUIRE(function && !extra && params, INVALID_VALUE);
    CHECK(stream_of(how->stream, call, &stream));
    REQUIRE(!stream || stream->stream.state != SPOILED, CAPTURE_INVALIDATED);
    const unsigned *grid = how->grid, *block = how->block;
    const unsigned long long items = (unsigned long long)grid[0] * block[0];
    if (function->device != current || !grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535 ||
        block[1] != 1 || block[2] != 1 || !block[0] || block[0] > function->function.threads || items >> 32 ||
        how->shared_bytes != function->function.arena || how->shared_bytes > function->function.allowed ||
        how->early > function->function.waits) {
        complain("%s: %s of device %d on device %d, grid %u x %u x %u, block %u x %u x %u, %u bytes, early %u", call,
                 function->function.entry, function->device, current, grid[0], grid[1], grid[2], block[0], block[1],
                 block[2], how->shared_bytes, how->early);
        return leave(INVALID_VALUE);
    }
    planted(function->function.entry);
    Node node = {NULL, function, {grid[0], grid[1], grid[2]}, block[0], {0}};
    for (int i = 0; function->function.signature[i]; ++i)
        memcpy(&node.values[i], params[i],
               function->function.signature[i] == 'p' ? 8 : function->function.signature[i] - '0');
    REQUIRE(pointers_live(&node, call), INVALID_VALUE);
    if (stream && stream->stream.state == CAPTURING) {
        append(&stream->stream.graph->graph, &node);
    } else {
        Work* work = queue(stream, LAUNCH);
        append(&work->nodes, &node);
        queued(work);
    }
    return leave(SUCCESS);
}

static int capture_begin(const char* call, void* handle, int mode) {
    CHECK(enter(call));
    Object* stream;
    REQUIRE((size_t)handle > 2, CAPTURE_UNSUPPORTED);
    CHECK(stream_of(handle, call, &stream));
    REQUIRE(stream->stream.state == NO_CAPTURE, ILLEGAL_STATE);
    stream->stream.state = CAPTURING;
    stream->stream.mode = mode;
    stream->stream.thread = pthread_self();
    stream->stream.graph = add(GRAPH);
    return leave(SUCCESS);
}

static int capture_end(const char* call, void* handle, Object** graph) {
    *graph = NULL;
    const int injected = enter(call);
    Object* stream = find(handle, STREAM, call);
    REQUIRE(stream && stream->stream.state != NO_CAPTURE, ILLEGAL_STATE);
    Object* made = stream->stream.graph;
    const int spoiled = stream->stream.state == SPOILED;
    stream->stream.state = NO_CAPTURE;
    stream->stream.graph = NULL;
    if (injected || spoiled) {
        free_nodes(&made->graph);
        drop(made);
        return leave(injected ? injected : CAPTURE_INVALIDATED);
    }
    *graph = made;
    return leave(SUCCESS);
}

static int instantiate(const char* call, Object** executable, void* handle, unsigned long long flags) {
    *executable = NULL;
    CHECK(enter(call));
    const Object* graph = find(handle, GRAPH, call);
    REQUIRE(graph && flags == 0, INVALID_VALUE);
    Object* made = add(EXEC);
    made->device = graph->device;
    for (const Node* node = graph->graph.first; node; node = node->next) append(&made->graph, node);
    *executable = made;
    return leave(SUCCESS);
}

// A replay that is queued goes on.
static int graph_destroy(const char* call, void* handle, enum Kind kind) {
    CHECK(enter(call));
    Object* graph = find(handle, kind, call);
    REQUIRE(graph, INVALID_VALUE);
    free_nodes(&graph->graph);
    drop(graph);
    return leave(SUCCESS);
}

static int graph_launch(const char* call, void* handle, void* stream_handle) {
    CHECK(enter(call));
    Object *graph = find(handle, EXEC, call), *stream;
    REQUIRE(graph, INVALID_VALUE);
    CHECK(stream_of(stream_handle, call, &stream));
    REQUIRE(graph->device == current && (!stream || stream->stream.state == NO_CAPTURE), INVALID_VALUE);
    Work* work = queue(stream, LAUNCH);
    for (const Node* node = graph->graph.first; node; node = node->next) append(&work->nodes, node);
    queued(work);
    return leave(SUCCESS);
}
