// What the stand-ins for a driver know of the objects that a program has made, and what a test sees and sets.
//
// Every handle and pointer is looked up before it is used, every argument checked. Wrong use gives an error status and
// a line in `standin_complaints`. The numbers of the statuses are the same in CUDA and HIP.
//
// STANDIN_ARCHS       one arch for each device, comma-separated; empty: no device
// STANDIN_KERNELS     folder with ENTRY.so (the host build) and ENTRY.args of each kernel; see `host_build`
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
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_HANDLE = 400, ILLEGAL_STATE = 401,
    NOT_FOUND = 500, NOT_READY = 600, LAUNCH_FAILURE = 719, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
    CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907,
};
enum { NO_CAPTURE, CAPTURING, SPOILED };
enum { RELAXED = 2 };
enum { DEVICES = 16, ARGUMENTS = 32 };

typedef __typeof__(hk_run) HostRun;  // this and its structs: the host device's words for its runtime, put in front

enum Kind { MEMORY, STREAM, EVENT, MODULE, FUNCTION, GRAPH, EXEC, CONTEXT, OWN_STREAM, KINDS };
static const char* const kind_names[KINDS] = {
    "memory", "stream", "event", "module", "function", "graph", "executable graph", "context", "thread's stream"};

typedef struct Object Object;
typedef struct Work Work;
typedef struct Node {  // a launch, with its arguments copied
    struct Node* next;
    Object* function;
    unsigned grid[3], threads;
    unsigned long long values[ARGUMENTS];
} Node;
typedef struct { Node *first, **last; } Nodes;

struct Object {
    Object* next;
    enum Kind kind;
    int device;
    union {
        struct { byte* base; size_t size; } memory;
        struct { int state, mode, blocking; pthread_t thread; Object* graph; Work* last; } stream;
        struct { Work* mark; int captured; } event;
        struct { byte* image; size_t size; } module;
        struct {
            Object* module;
            HostRun* run;
            unsigned long workspace;
            unsigned lds, run_threads, threads, arena, waits, allowed;
            char signature[ARGUMENTS + 1], entry[128];
        } function;
        Nodes graph;
    };
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Object* objects;
static char complaints[1 << 16];
static int pending[DEVICES];  // a device's fault that its next wait will report
static _Thread_local int current = FIRST_CURRENT, last_error;

static void complain(const char* format, ...) {
    const size_t used = strlen(complaints);
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
void standin_fail(const char* call, int after, int status) {
    for (int i = 0; i < 8; ++i)
        if (!faults[i].call[0]) {
            strcpy(faults[i].call, call);
            faults[i].after = after;
            faults[i].status = status;
            return;
        }
}

int standin_calls(const char* call) {
    for (int i = 0; i < 64; ++i)
        if (!strcmp(calls[i].call, call)) return calls[i].count;
    return 0;
}

int standin_live(const char* kind) {
    int found = 0;
    for (Object* o = objects; o; o = o->next) found += !strcmp(kind_names[o->kind], kind);
    return found;
}

// Kernels with `part` in their name take this long, and events show the time that kernels have taken on their device.
// The first match counts; without any, events show the machine's clock.
static struct { char part[48]; double fixed_us, block_us; } costs[8];
static double busy_ms[DEVICES];

void standin_cost(const char* part, double fixed_us, double block_us) {
    for (int i = 0; i < 8; ++i)
        if (!costs[i].part[0]) {
            strcpy(costs[i].part, part);
            costs[i].fixed_us = fixed_us;
            costs[i].block_us = block_us;
            return;
        }
}

// ---- objects -------------------------------------------------------------------------------------------------------

enum { GUARD = 256, GUARD_BYTE = 0xDB, FRESH_BYTE = 0xC7 };

static int guards_intact(const Object* o) {
    for (size_t i = 0; i < GUARD; ++i)
        if (o->memory.base[i] != GUARD_BYTE || o->memory.base[GUARD + o->memory.size + i] != GUARD_BYTE) return 0;
    return 1;
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

static int is_live(const void* handle, enum Kind kind) {
    for (Object* o = objects; o; o = o->next)
        if (o == handle && o->kind == kind) return 1;
    return 0;
}

static Object* find(void* handle, enum Kind kind, const char* call) {
    if (is_live(handle, kind)) return handle;
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

static void append(Nodes* nodes, const Node* node) {
    Node* copy = malloc(sizeof *copy);
    *copy = *node;
    copy->next = NULL;
    if (!nodes->last) nodes->last = &nodes->first;
    *nodes->last = copy;
    nodes->last = &copy->next;
}

static void free_nodes(Nodes* nodes) {
    for (Node *node = nodes->first, *next; node; node = next) {
        next = node->next;
        free(node);
    }
    *nodes = (Nodes){0};
}

// ---- entering a call -----------------------------------------------------------------------------------------------

static const char* archs(void) {
    const char* text = getenv("STANDIN_ARCHS");
    return text ? text : "";
}

static void arch_of(int device, char* name, size_t size) {
    const char* from = archs();
    while (device--) from = strchr(from, ',') + 1;
    snprintf(name, size, "%.*s", (int)strcspn(from, ","), from);
}

static int device_count(void) {
    int count = archs()[0] != 0;
    for (const char* p = archs(); *p; ++p) count += *p == ',';
    return count;
}

static int leave(int status) {
    if (status) last_error = status;
    pthread_mutex_unlock(&lock);
    return status;
}

// Take the lock and note the call: its status, if it is to fail before it has begun.
static int enter_bare(const char* call) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 64; ++i) {
        if (!calls[i].call[0]) strcpy(calls[i].call, call);
        if (!strcmp(calls[i].call, call)) {
            ++calls[i].count;
            break;
        }
    }
    if (!device_count()) return NO_DEVICE;
    for (int i = 0; i < 8; ++i)
        if (!strcmp(faults[i].call, call) && faults[i].after-- == 0) {
            faults[i].call[0] = 0;
            return faults[i].status;
        }
    return SUCCESS;
}

// The same, for a call that works on this thread's current device.
static int enter(const char* call) {
    const int status = enter_bare(call);
    return status || current >= 0 ? status : INVALID_CONTEXT;
}

#define REQUIRE(condition, status) \
    if (!(condition)) return leave(status)
#define CHECK(expression)                         \
    {                                             \
        const int checked = expression;           \
        if (checked) return leave(checked);       \
    }
