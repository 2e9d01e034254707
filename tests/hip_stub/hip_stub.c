// ROCm's HIP runtime without a card: what `tests/hip_lab.py` builds as libamdhip64.so and hip-python loads.
//
// Memory is host memory; a launch runs the host-built shared object of the same kernel over the whole grid, at once.
// Every handle and pointer is looked up before it is used, every argument checked. Wrong use gives an error status and
// a line in `hip_stub_complaints`. Error codes and what a capture forbids are the runtime's own.
//
// HIP_STUB_ARCHS       one arch for each device, comma-separated, as gcnArchName spells it; empty: no device
// HIP_STUB_KERNELS     folder with ENTRY.so (the host build) and ENTRY.args ("lds threads signature") for each kernel;
//                      of each argument the signature says p, a pointer, or the bytes of a number
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned char byte;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    NO_BINARY = 209, INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, LAUNCH_FAILURE = 719,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907,
};
enum { NO_CAPTURE, CAPTURING, SPOILED };
enum { RELAXED = 2 };

typedef struct { unsigned grid[3], threads, lds_bytes, permute; unsigned long long seed; } HostLaunch;
typedef struct { void* workspace; char* stacks; unsigned long stack_bytes, stack_stride; } HostArena;
typedef struct { unsigned block[3], thread; int line, other_line; const char *file, *other_file; } HostReport;
typedef int HostRun(const HostLaunch*, void**, unsigned long long, unsigned long long, const HostArena*, HostReport*);

enum Kind { MEMORY, STREAM, EVENT, MODULE, FUNCTION, GRAPH, EXEC, KINDS };
static const char* const kind_names[KINDS] = {
    "memory", "stream", "event", "module", "function", "graph", "executable graph"};

typedef struct Object Object;
typedef struct Node {  // a launch, with its arguments copied
    struct Node* next;
    Object* function;
    unsigned grid[3], threads;
    unsigned long long values[32];
} Node;

struct Object {
    Object* next;
    enum Kind kind;
    int device;
    union {
        struct { byte* base; size_t size; } memory;
        struct { int state, mode; pthread_t thread; Object* graph; } stream;
        struct { int recorded, captured; double at; } event;
        struct { byte* image; size_t size; } module;
        struct {
            Object* module;
            HostRun* run;
            unsigned long workspace;
            unsigned lds, threads;
            char signature[33], entry[128];
        } function;
        struct { Node *first, **last; } graph;
    };
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Object* objects;
static char complaints[1 << 16];
static int pending[16];  // a device's fault that its next wait will report
// A copy from pageable memory may return before the bytes are there. The default stream waits for it, no other does.
static struct { void *to, *bytes; size_t size; } late;
static _Thread_local int current, last_error;

static void complain(const char* format, ...) {
    size_t used = strlen(complaints);
    va_list args;
    va_start(args, format);
    vsnprintf(complaints + used, sizeof complaints - used - 1, format, args);
    va_end(args);
    strcat(complaints, "\n");
}

// ---- what the tests see and set ------------------------------------------------------------------------------------

static struct { char call[48]; int after, status; } faults[8];
static struct { char call[48]; int count; } calls[64];

// Of the calls from now on, the one behind `after` others fails.
void hip_stub_fail(const char* call, int after, int status) {
    for (int i = 0; i < 8; ++i)
        if (!faults[i].call[0]) {
            strcpy(faults[i].call, call);
            faults[i].after = after;
            faults[i].status = status;
            return;
        }
}

int hip_stub_calls(const char* call) {
    for (int i = 0; i < 64; ++i)
        if (!strcmp(calls[i].call, call)) return calls[i].count;
    return 0;
}

int hip_stub_live(const char* kind) {
    int found = 0;
    for (Object* o = objects; o; o = o->next) found += !strcmp(kind_names[o->kind], kind);
    return found;
}

// Kernels with `part` in their name take this long, and events show the time that kernels have taken on their device.
// The first match counts; without any, events show the machine's clock.
static struct { char part[48]; double fixed_us, block_us; } costs[8];
static double busy_ms[16];

void hip_stub_cost(const char* part, double fixed_us, double block_us) {
    for (int i = 0; i < 8; ++i)
        if (!costs[i].part[0]) {
            strcpy(costs[i].part, part);
            costs[i].fixed_us = fixed_us;
            costs[i].block_us = block_us;
            return;
        }
}

// Take the complaints as read, and have no more faults and costs.
void hip_stub_forget(void) {
    complaints[0] = 0;
    memset(costs, 0, sizeof costs);
    memset(faults, 0, sizeof faults);
    memset(pending, 0, sizeof pending);
}

// ---- objects -------------------------------------------------------------------------------------------------------

enum { GUARD = 256, GUARD_BYTE = 0xDB, FRESH_BYTE = 0xC7 };

static int guards_intact(const Object* o) {
    for (size_t i = 0; i < GUARD; ++i)
        if (o->memory.base[i] != GUARD_BYTE || o->memory.base[GUARD + o->memory.size + i] != GUARD_BYTE) return 0;
    return 1;
}

const char* hip_stub_complaints(void) {
    for (Object* o = objects; o; o = o->next)
        if (o->kind == MEMORY && !guards_intact(o)) complain("memory of %zu bytes: written outside", o->memory.size);
    return complaints;
}

static Object* add(enum Kind kind) {
    Object* o = calloc(1, sizeof *o);
    o->kind = kind;
    o->device = current;
    o->next = objects;
    return objects = o;
}

static void drop(Object* o) {
    Object** at = &objects;
    while (*at != o) at = &(*at)->next;
    *at = o->next;  // never given back: a handle that has ended must not come to life again as another one
}

static Object* find(const void* handle, enum Kind kind, const char* call) {
    for (Object* o = objects; o; o = o->next)
        if (o == handle && o->kind == kind) return o;
    complain("%s: %p is no live %s", call, handle, kind_names[kind]);
    return NULL;
}

static Object* memory_at(const void* pointer, size_t size) {
    for (Object* o = objects; o; o = o->next) {
        if (o->kind != MEMORY) continue;
        const byte* data = o->memory.base + GUARD;
        if ((const byte*)pointer >= data && (const byte*)pointer + size <= data + o->memory.size) return o;
    }
    return NULL;
}

// ---- entering a call -----------------------------------------------------------------------------------------------

static int leave(int status) {
    if (status) last_error = status;
    pthread_mutex_unlock(&lock);
    return status;
}

static const char* archs(void) {
    const char* text = getenv("HIP_STUB_ARCHS");
    return text ? text : "";
}

static void arrive(void) {
    if (late.bytes) memcpy(late.to, late.bytes, late.size);
    free(late.bytes);
    late.bytes = NULL;
}

// What a wait for the device finds out.
static int waited(int device) {
    const int fault = pending[device];
    pending[device] = SUCCESS;
    return fault;
}

static int device_count(void) {
    int count = archs()[0] != 0;
    for (const char* p = archs(); *p; ++p) count += *p == ',';
    return count;
}

static int enter(const char* call) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 64; ++i) {
        if (!calls[i].call[0]) strcpy(calls[i].call, call);
        if (!strcmp(calls[i].call, call)) { ++calls[i].count; break; }
    }
    if (!device_count()) return NO_DEVICE;
    for (int i = 0; i < 8; ++i)
        if (!strcmp(faults[i].call, call) && faults[i].after-- == 0) {
            faults[i].call[0] = 0;
            return faults[i].status;
        }
    return SUCCESS;
}

#define ENTER(call)                      \
    {                                    \
        const int status = enter(#call); \
        if (status) return leave(status); \
    }
#define REQUIRE(condition, status) \
    if (!(condition)) return leave(status)

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

#define DEFAULT_STREAM(stream) ((size_t)(stream) <= 2)

// The stream of a handle: 0 with *stream set (NULL for a default stream), or the status to fail with.
static int stream_of(void* handle, const char* call, Object** stream) {
    *stream = NULL;
    if (DEFAULT_STREAM(handle)) return SUCCESS;
    if (!(*stream = find(handle, STREAM, call))) return INVALID_HANDLE;
    if ((*stream)->device == current) return SUCCESS;
    complain("%s: a stream of device %d, with device %d current", call, (*stream)->device, current);
    return INVALID_HANDLE;
}

// ---- devices -------------------------------------------------------------------------------------------------------

int hipGetLastError(void) {
    const int status = last_error;
    last_error = SUCCESS;
    return status;
}

int hipGetDeviceCount(int* count) {
    *count = 0;
    ENTER(hipGetDeviceCount);
    *count = device_count();
    return leave(SUCCESS);
}

int hipSetDevice(int device) {
    ENTER(hipSetDevice);
    REQUIRE(device >= 0 && device < device_count(), INVALID_DEVICE);
    current = device;
    return leave(SUCCESS);
}

int hipRuntimeGetVersion(int* version) {
    *version = 70200000;
    return SUCCESS;
}

static void arch_of(int device, char* name, size_t size) {
    const char* from = archs();
    while (device--) from = strchr(from, ',') + 1;
    snprintf(name, size, "%.*s", (int)strcspn(from, ","), from);
}

// Offsets in hipDeviceProp_tR0600, 1472 bytes.
int hipGetDevicePropertiesR0600(byte* properties, int device) {
    ENTER(hipGetDevicePropertiesR0600);
    REQUIRE(device >= 0 && device < device_count(), INVALID_DEVICE);
    const unsigned long long memory = 24ull << 30;
    const int multiprocessors = 48, l2_bytes = 6 << 20;
    memset(properties, 0, 1472);
    strcpy((char*)properties, "Stub Radeon");
    memcpy(properties + 288, &memory, sizeof memory);
    memcpy(properties + 388, &multiprocessors, sizeof multiprocessors);
    memcpy(properties + 616, &l2_bytes, sizeof l2_bytes);
    arch_of(device, (char*)properties + 1160, 256);
    return leave(SUCCESS);
}

int hipDeviceSynchronize(void) {
    ENTER(hipDeviceSynchronize);
    const int status = spoil_captures(CAPTURE_UNSUPPORTED, "hipDeviceSynchronize");
    if (status) return leave(status);
    arrive();
    return leave(waited(current));
}

// ---- memory --------------------------------------------------------------------------------------------------------

int hipMalloc(void** pointer, size_t size) {
    *pointer = NULL;
    ENTER(hipMalloc);
    const int status = unsafe_in_capture("hipMalloc");
    if (status) return leave(status);
    byte* base = aligned_alloc(GUARD, (size + 3 * GUARD - 1) / GUARD * GUARD);
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

int hipFree(void* pointer) {
    ENTER(hipFree);
    const int status = unsafe_in_capture("hipFree");
    if (status) return leave(status);
    Object* o = pointer ? memory_at(pointer, 0) : NULL;
    if (!pointer) return leave(SUCCESS);
    if (!o || o->memory.base + GUARD != pointer) {
        complain("hipFree: %p is not what hipMalloc returned, or is freed already", pointer);
        return leave(INVALID_VALUE);
    }
    arrive();
    if (!guards_intact(o)) complain("memory of %zu bytes: written outside", o->memory.size);
    memset(o->memory.base, 0xFF, o->memory.size + 2 * GUARD);
    free(o->memory.base);
    drop(o);
    return leave(SUCCESS);
}

static int copy(void* to, const void* from, size_t size, const void* device_side, const char* call) {
    const int status = spoil_captures(CAPTURE_IMPLICIT, call);
    if (status) return status;
    const Object* o = memory_at(device_side, size);
    if (!o || memory_at(device_side == to ? from : to, 0)) {
        complain("%s: %zu bytes at %p: not in one allocation, or on both sides", call, size, device_side);
        return INVALID_VALUE;
    }
    arrive();
    if (device_side == from) {
        memcpy(to, from, size);
    } else {
        late.to = to;
        late.size = size;
        late.bytes = malloc(size);
        memcpy(late.bytes, from, size);
    }
    return waited(o->device);
}

int hipMemcpyHtoD(void* to, const void* from, size_t size) {
    ENTER(hipMemcpyHtoD);
    return leave(copy(to, from, size, to, "hipMemcpyHtoD"));
}

int hipMemcpyDtoH(void* to, const void* from, size_t size) {
    ENTER(hipMemcpyDtoH);
    return leave(copy(to, from, size, from, "hipMemcpyDtoH"));
}

typedef struct {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
} PointerAttributes;

int hipPointerGetAttributes(PointerAttributes* out, void* pointer) {
    ENTER(hipPointerGetAttributes);
    const Object* o = memory_at(pointer, 1);
    REQUIRE(o, INVALID_VALUE);  // not a complaint: it is how one asks
    memset(out, 0, sizeof *out);
    out->type = 2;
    out->device = o->device;
    out->device_pointer = pointer;
    return leave(SUCCESS);
}

// ---- streams and events --------------------------------------------------------------------------------------------

int hipStreamCreateWithFlags(Object** stream, unsigned flags) {
    *stream = NULL;
    ENTER(hipStreamCreateWithFlags);
    REQUIRE(flags <= 1, INVALID_VALUE);
    *stream = add(STREAM);
    return leave(SUCCESS);
}

int hipStreamDestroy(void* handle) {
    ENTER(hipStreamDestroy);
    Object* stream = find(handle, STREAM, "hipStreamDestroy");
    REQUIRE(stream, INVALID_HANDLE);
    if (stream->stream.state) complain("hipStreamDestroy: the stream is being captured");
    drop(stream);
    return leave(SUCCESS);
}

int hipStreamGetDevice(void* handle, int* device) {
    ENTER(hipStreamGetDevice);
    const Object* stream = find(handle, STREAM, "hipStreamGetDevice");
    REQUIRE(stream, INVALID_HANDLE);
    *device = stream->device;
    return leave(SUCCESS);
}

int hipStreamSynchronize(void* handle) {
    ENTER(hipStreamSynchronize);
    Object* stream;
    const int status = stream_of(handle, "hipStreamSynchronize", &stream);
    if (status) return leave(status);
    if (stream && stream->stream.state) {
        stream->stream.state = SPOILED;
        complain("hipStreamSynchronize: the stream is being captured");
        return leave(CAPTURE_UNSUPPORTED);
    }
    if (!stream) arrive();
    return leave(waited(current));
}

int hipStreamWaitEvent(void* handle, void* event_handle, unsigned flags) {
    ENTER(hipStreamWaitEvent);
    Object* stream;
    const int status = stream_of(handle, "hipStreamWaitEvent", &stream);
    if (status) return leave(status);
    const Object* event = find(event_handle, EVENT, "hipStreamWaitEvent");
    REQUIRE(event && flags == 0, INVALID_VALUE);
    REQUIRE(!event->event.captured || (stream && stream->stream.state == CAPTURING), CAPTURED_EVENT);
    return leave(SUCCESS);
}

int hipEventCreate(Object** event) {
    *event = NULL;
    ENTER(hipEventCreate);
    *event = add(EVENT);
    return leave(SUCCESS);
}

int hipEventDestroy(void* handle) {
    ENTER(hipEventDestroy);
    Object* event = find(handle, EVENT, "hipEventDestroy");
    REQUIRE(event, INVALID_HANDLE);
    drop(event);
    return leave(SUCCESS);
}

int hipEventRecord(void* handle, void* stream_handle) {
    ENTER(hipEventRecord);
    Object* stream;
    const int status = stream_of(stream_handle, "hipEventRecord", &stream);
    if (status) return leave(status);
    Object* event = find(handle, EVENT, "hipEventRecord");
    REQUIRE(event, INVALID_HANDLE);
    if (event->device != current) {
        complain("hipEventRecord: an event of device %d on a stream of device %d", event->device, current);
        return leave(INVALID_HANDLE);
    }
    if (!stream) arrive();  // what waits for the event waits for them
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->event.at = costs[0].part[0] ? busy_ms[current] : 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
    event->event.recorded = 1;
    event->event.captured = stream && stream->stream.state == CAPTURING;
    return leave(SUCCESS);
}

int hipEventSynchronize(void* handle) {
    ENTER(hipEventSynchronize);
    const Object* event = find(handle, EVENT, "hipEventSynchronize");
    REQUIRE(event, INVALID_HANDLE);
    REQUIRE(!event->event.captured, CAPTURED_EVENT);
    return leave(waited(event->device));
}

int hipEventElapsedTime(float* ms, void* start_handle, void* stop_handle) {
    *ms = 0;
    ENTER(hipEventElapsedTime);
    const Object* start = find(start_handle, EVENT, "hipEventElapsedTime");
    const Object* stop = find(stop_handle, EVENT, "hipEventElapsedTime");
    REQUIRE(start && stop && start->event.recorded && stop->event.recorded, INVALID_HANDLE);
    *ms = (float)(stop->event.at - start->event.at);
    return leave(SUCCESS);
}

// ---- modules -------------------------------------------------------------------------------------------------------

static int machine_of(const char* arch) {
    static const struct { const char* name; int machine; } known[] = {
        {"gfx1100", 0x41}, {"gfx1101", 0x46}, {"gfx1151", 0x4a}, {"gfx1200", 0x48}, {"gfx1201", 0x4e}};
    for (size_t i = 0; i < sizeof known / sizeof *known; ++i)
        if (!strncmp(arch, known[i].name, strlen(known[i].name))) return known[i].machine;
    return -1;
}

int hipModuleLoadData(Object** module, const void* image) {
    *module = NULL;
    ENTER(hipModuleLoadData);
    const int status = unsafe_in_capture("hipModuleLoadData");
    if (status) return leave(status);
    const Elf64_Ehdr* head = image;
    REQUIRE(head && !memcmp(head->e_ident, ELFMAG, SELFMAG) && head->e_machine == 224, INVALID_IMAGE);
    char arch[256];
    arch_of(current, arch, sizeof arch);
    REQUIRE((int)(head->e_flags & 0xff) == machine_of(arch), NO_BINARY);
    Object* o = add(MODULE);
    o->module.size = head->e_shoff + (size_t)head->e_shentsize * head->e_shnum;
    o->module.image = malloc(o->module.size);
    memcpy(o->module.image, image, o->module.size);
    *module = o;
    return leave(SUCCESS);
}

int hipModuleUnload(void* handle) {
    ENTER(hipModuleUnload);
    Object* module = find(handle, MODULE, "hipModuleUnload");
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

// The host build of a kernel, and what its code object says of its arguments.
static int host_build(const char* entry, Object* f) {
    const char* folder = getenv("HIP_STUB_KERNELS");
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.args", folder ? folder : ".", entry);
    FILE* file = fopen(path, "r");
    int read = 0;
    if (file) read = fscanf(file, "%u %u %32s", &f->function.lds, &f->function.threads, f->function.signature);
    if (file) fclose(file);
    snprintf(path, sizeof path, "%s/%s.so", folder ? folder : ".", entry);
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    f->function.run = library ? (HostRun*)dlsym(library, "hk_run") : NULL;
    const unsigned long* workspace = library ? dlsym(library, "hk_workspace_bytes") : NULL;
    f->function.workspace = workspace ? *workspace : 0;
    if (read == 3 && f->function.run && workspace) return 1;
    complain("hipModuleGetFunction: no host build of %s at %s", entry, path);
    return 0;
}

int hipModuleGetFunction(Object** function, void* handle, const char* name) {
    *function = NULL;
    ENTER(hipModuleGetFunction);
    Object* module = find(handle, MODULE, "hipModuleGetFunction");
    REQUIRE(module, INVALID_HANDLE);
    char symbol[160];
    snprintf(symbol, sizeof symbol, "%s.kd", name);
    REQUIRE(holds(module, symbol), NOT_FOUND);
    Object* o = add(FUNCTION);
    o->device = module->device;
    o->function.module = module;
    snprintf(o->function.entry, sizeof o->function.entry, "%s", name);
    if (!host_build(name, o)) {
        drop(o);
        return leave(NOT_FOUND);
    }
    *function = o;
    return leave(SUCCESS);
}

// ---- launches ------------------------------------------------------------------------------------------------------

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

static void run(Node* node) {
    const Object* f = node->function;
    void* params[32];
    for (int i = 0; i < 32; ++i) params[i] = &node->values[i];
    const HostLaunch launch = {{node->grid[0], node->grid[1], node->grid[2]}, node->threads, f->function.lds, 0, 0};
    const unsigned long stack = 64 * 1024, ahead = (f->function.workspace + 4095) / 4096 * 4096;
    byte* memory = aligned_alloc(4096, ahead + node->threads * stack);
    const HostArena arena = {memory, (char*)memory + ahead, stack, stack};
    HostReport report = {0};
    const unsigned long long blocks = (unsigned long long)node->grid[0] * node->grid[1] * node->grid[2];
    const int failed = f->function.run(&launch, params, 0, blocks, &arena, &report);
    free(memory);
    for (int i = 0; i < 8 && costs[i].part[0]; ++i)
        if (strstr(f->function.entry, costs[i].part)) {
            busy_ms[f->device] += 1e-3 * (costs[i].fixed_us + costs[i].block_us * (double)blocks);
            break;
        }
    if (failed) {
        complain("%s failed on the host with %d at line %d", f->function.entry, failed, report.line);
        pending[f->device] = LAUNCH_FAILURE;
    }
}

static void append(Object* graph, const Node* node) {
    Node* copy = malloc(sizeof *copy);
    *copy = *node;
    copy->next = NULL;
    *graph->graph.last = copy;
    graph->graph.last = &copy->next;
}

int hipModuleLaunchKernel(
    void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared_bytes, void* stream_handle, void** params, void** extra) {
    ENTER(hipModuleLaunchKernel);
    Object *function = find(handle, FUNCTION, "hipModuleLaunchKernel"), *stream;
    REQUIRE(function && !extra && params, INVALID_VALUE);
    const int status = stream_of(stream_handle, "hipModuleLaunchKernel", &stream);
    if (status) return leave(status);
    REQUIRE(!stream || stream->stream.state != SPOILED, CAPTURE_INVALIDATED);
    const unsigned long long items = (unsigned long long)grid_x * block_x;
    if (function->device != current || !grid_x || !grid_y || !grid_z || block_y != 1 || block_z != 1 || shared_bytes ||
        !block_x || block_x > function->function.threads || items >> 32) {
        complain("hipModuleLaunchKernel: %s of device %d on device %d, grid %u x %u x %u, block %u x %u x %u, %u bytes",
                 function->function.entry, function->device, current, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                 shared_bytes);
        return leave(INVALID_VALUE);
    }
    Node node = {NULL, function, {grid_x, grid_y, grid_z}, block_x, {0}};
    for (int i = 0; function->function.signature[i]; ++i)
        memcpy(&node.values[i], params[i], function->function.signature[i] == 'p' ? 8 : function->function.signature[i] - '0');
    REQUIRE(pointers_live(&node, "hipModuleLaunchKernel"), INVALID_VALUE);
    if (stream && stream->stream.state == CAPTURING)
        append(stream->stream.graph, &node);
    else {
        if (!stream) arrive();
        run(&node);
    }
    return leave(SUCCESS);
}

// ---- graphs --------------------------------------------------------------------------------------------------------

static void free_nodes(Object* graph) {
    for (Node *node = graph->graph.first, *next; node; node = next) {
        next = node->next;
        free(node);
    }
}

int hipStreamBeginCapture(void* handle, int mode) {
    ENTER(hipStreamBeginCapture);
    REQUIRE(!DEFAULT_STREAM(handle), CAPTURE_UNSUPPORTED);
    Object* stream;
    const int status = stream_of(handle, "hipStreamBeginCapture", &stream);
    if (status) return leave(status);
    REQUIRE(stream->stream.state == NO_CAPTURE, ILLEGAL_STATE);
    Object* graph = add(GRAPH);
    graph->graph.last = &graph->graph.first;
    stream->stream.state = CAPTURING;
    stream->stream.mode = mode;
    stream->stream.thread = pthread_self();
    stream->stream.graph = graph;
    return leave(SUCCESS);
}

int hipStreamEndCapture(void* handle, Object** graph) {
    *graph = NULL;
    const int injected = enter("hipStreamEndCapture");
    Object* stream = find(handle, STREAM, "hipStreamEndCapture");
    REQUIRE(stream && stream->stream.state != NO_CAPTURE, ILLEGAL_STATE);
    Object* made = stream->stream.graph;
    const int spoiled = stream->stream.state == SPOILED;
    stream->stream.state = NO_CAPTURE;
    stream->stream.graph = NULL;
    if (injected || spoiled) {
        free_nodes(made);
        drop(made);
        return leave(injected ? injected : CAPTURE_INVALIDATED);
    }
    *graph = made;
    return leave(SUCCESS);
}

int hipGraphInstantiateWithFlags(Object** executable, void* handle, unsigned long long flags) {
    *executable = NULL;
    ENTER(hipGraphInstantiateWithFlags);
    const Object* graph = find(handle, GRAPH, "hipGraphInstantiateWithFlags");
    REQUIRE(graph && flags == 0, INVALID_VALUE);
    Object* made = add(EXEC);
    made->device = graph->device;
    made->graph.last = &made->graph.first;
    for (const Node* node = graph->graph.first; node; node = node->next) append(made, node);
    *executable = made;
    return leave(SUCCESS);
}

static int destroy_graph(void* handle, enum Kind kind, const char* call) {
    Object* graph = find(handle, kind, call);
    if (!graph) return INVALID_VALUE;
    free_nodes(graph);
    drop(graph);
    return SUCCESS;
}

int hipGraphDestroy(void* handle) {
    ENTER(hipGraphDestroy);
    return leave(destroy_graph(handle, GRAPH, "hipGraphDestroy"));
}

int hipGraphExecDestroy(void* handle) {
    ENTER(hipGraphExecDestroy);
    return leave(destroy_graph(handle, EXEC, "hipGraphExecDestroy"));
}

int hipGraphLaunch(void* handle, void* stream_handle) {
    ENTER(hipGraphLaunch);
    Object *graph = find(handle, EXEC, "hipGraphLaunch"), *stream;
    REQUIRE(graph, INVALID_VALUE);
    const int status = stream_of(stream_handle, "hipGraphLaunch", &stream);
    if (status) return leave(status);
    REQUIRE(graph->device == current && (!stream || stream->stream.state == NO_CAPTURE), INVALID_VALUE);
    if (!stream) arrive();
    for (Node* node = graph->graph.first; node; node = node->next) {
        if (!find(node->function, FUNCTION, "hipGraphLaunch") || !pointers_live(node, "hipGraphLaunch")) {
            pending[current] = LAUNCH_FAILURE;  // as on a card: found out by who waits
            break;
        }
        run(node);
    }
    return leave(SUCCESS);
}
