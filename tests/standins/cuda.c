// CUDA's driver without a card: what `tests/standin_lab.py` builds as libcuda.so.1 and cuda-bindings loads.
//
// Memory is host memory; a launch runs the host-built shared object of the same kernel over the whole grid. A thread
// has no context until it makes one current. Copies are no part of a relaxed capture and do not end it; a wait for the
// context does. What makes a cubin right is not seen, only that it is one, for the device, and has the kernel.
#define FIRST_CURRENT -1
#define COPIES_END_CAPTURES 0
#define KERNEL_SYMBOL ".text.%s"
#include "calls.h"

static int initialised;
static Object* contexts[DEVICES];
static _Thread_local int pushed[8], pushed_count;
enum { STATIC_SHARED = 48 * 1024, MOST_SHARED = 227 * 1024 };

static int image_status(const Elf64_Ehdr* image, int device) {
    char arch[256], flags[32];
    arch_of(device, arch, sizeof arch);
    snprintf(flags, sizeof flags, "sm_%u", image->e_flags >> 8 & 0xff);
    if (image->e_machine != 190) return INVALID_IMAGE;
    return strcmp(arch, flags) ? NO_BINARY : SUCCESS;
}

// ---- devices and contexts ------------------------------------------------------------------------------------------

int cuInit(unsigned flags) {
    CHECK(enter_bare(__func__));
    REQUIRE(!flags, INVALID_VALUE);
    initialised = 1;
    return leave(SUCCESS);
}

// For calls that need no context.
static int enter_initialised(const char* call) {
    const int status = enter_bare(call);
    return status || initialised ? status : NOT_INITIALIZED;
}

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}

int cuDeviceGetCount(int* count) {
    *count = 0;
    CHECK(enter_initialised(__func__));
    *count = device_count();
    return leave(SUCCESS);
}

int cuDeviceGet(int* device, int ordinal) {
    CHECK(enter_initialised(__func__));
    REQUIRE(ordinal >= 0 && ordinal < device_count(), INVALID_DEVICE);
    *device = ordinal;
    return leave(SUCCESS);
}

int cuDeviceGetName(char* name, int size, int device) {
    CHECK(enter_initialised(__func__));
    REQUIRE(device >= 0 && device < device_count(), INVALID_DEVICE);
    snprintf(name, (size_t)size, "Stub Hopper");
    return leave(SUCCESS);
}

int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    CHECK(enter_initialised(__func__));
    REQUIRE(device >= 0 && device < device_count(), INVALID_DEVICE);
    *bytes = 80ull << 30;
    return leave(SUCCESS);
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
    CHECK(enter_initialised(__func__));
    REQUIRE(device >= 0 && device < device_count(), INVALID_DEVICE);
    char arch[256];
    arch_of(device, arch, sizeof arch);
    const int capability = atoi(arch + strlen("sm_"));
    switch (attribute) {
        case 16: *value = 48; break;
        case 38: *value = 6 << 20; break;
        case 75: *value = capability / 10; break;
        case 76: *value = capability % 10; break;
        default: return leave(INVALID_VALUE);
    }
    return leave(SUCCESS);
}

int cuDevicePrimaryCtxRetain(Object** context, int device) {
    *context = NULL;
    CHECK(enter_initialised(__func__));
    REQUIRE(device >= 0 && device < device_count(), INVALID_DEVICE);
    if (!contexts[device]) {
        contexts[device] = add(CONTEXT);
        contexts[device]->device = device;
    }
    *context = contexts[device];
    return leave(SUCCESS);
}

int cuCtxSetCurrent(void* handle) {
    CHECK(enter_initialised(__func__));
    const Object* context = find(handle, CONTEXT, __func__);
    REQUIRE(context, INVALID_CONTEXT);
    current = context->device;
    return leave(SUCCESS);
}

int cuCtxPushCurrent_v2(void* handle) {
    CHECK(enter_initialised("cuCtxPushCurrent"));
    const Object* context = find(handle, CONTEXT, "cuCtxPushCurrent");
    REQUIRE(context && pushed_count < 8, INVALID_CONTEXT);
    pushed[pushed_count++] = current;
    current = context->device;
    return leave(SUCCESS);
}

int cuCtxPopCurrent_v2(Object** context) {
    CHECK(enter("cuCtxPopCurrent"));
    REQUIRE(pushed_count, INVALID_CONTEXT);
    *context = contexts[current];
    current = pushed[--pushed_count];
    return leave(SUCCESS);
}

int cuCtxGetDevice(int* device) {
    CHECK(enter(__func__));
    *device = current;
    return leave(SUCCESS);
}

int cuStreamGetCtx(void* handle, Object** context) {
    CHECK(enter(__func__));
    const Object* stream = find(handle, STREAM, __func__);
    REQUIRE(stream, INVALID_HANDLE);
    *context = contexts[stream->device];
    return leave(SUCCESS);
}

int cuPointerGetAttribute(void* value, int attribute, void* pointer) {
    CHECK(enter(__func__));
    const Object* o = memory_at(pointer, 1);
    REQUIRE(o && attribute == 9, INVALID_VALUE);  // not a complaint: it is how one asks
    *(int*)value = o->device;
    return leave(SUCCESS);
}

// ---- launches ------------------------------------------------------------------------------------------------------

int cuModuleGetFunction(Object** function, void* module, const char* name) {
    const int status = module_function(__func__, function, module, name);
    if (!status) (*function)->function.allowed = STATIC_SHARED;
    return status;
}

int cuFuncSetAttribute(void* handle, int attribute, int value) {
    CHECK(enter(__func__));
    Object* function = find(handle, FUNCTION, __func__);
    REQUIRE(function, INVALID_HANDLE);
    REQUIRE(attribute == 8 && value >= 0 && value <= MOST_SHARED, INVALID_VALUE);
    function->function.allowed = (unsigned)value;
    return leave(SUCCESS);
}

int cuLaunchKernel(
    void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared_bytes, void* stream, void** params, void** extra) {
    const Launching how = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, 0, stream};
    return launch(__func__, function, &how, params, extra);
}

typedef struct { int id, padding; union { int value; byte bytes[64]; }; } Attribute;
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    const Attribute* attributes;
    unsigned count;
} Config;
enum { MAY_BEGIN_EARLY = 6 };

int cuLaunchKernelEx(const Config* config, void* function, void** params, void** extra) {
    Launching how = {.shared_bytes = config->shared_bytes, .stream = config->stream};
    memcpy(how.grid, config->grid, sizeof how.grid);
    memcpy(how.block, config->block, sizeof how.block);
    for (unsigned i = 0; i < config->count; ++i) {
        if (config->attributes[i].id != MAY_BEGIN_EARLY) return INVALID_VALUE;
        how.early = config->attributes[i].value != 0;
    }
    return launch(__func__, function, &how, params, extra);
}

int cuCtxSynchronize(void) { return synchronize(__func__); }
int cuMemAlloc_v2(void** pointer, size_t size) { return allocate("cuMemAlloc", pointer, size); }
int cuMemFree_v2(void* pointer) { return release("cuMemFree", pointer); }
int cuMemcpyHtoD_v2(void* to, void* from, size_t size) { return copy("cuMemcpyHtoD", to, from, size, 1); }
int cuMemcpyDtoH_v2(void* to, void* from, size_t size) { return copy("cuMemcpyDtoH", to, from, size, 0); }
int cuStreamCreate(Object** stream, unsigned flags) { return stream_create(__func__, stream, flags); }
int cuStreamDestroy_v2(void* stream) { return stream_destroy("cuStreamDestroy", stream); }
int cuStreamSynchronize(void* stream) { return stream_synchronize(__func__, stream); }
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) { return stream_wait(__func__, stream, event, flags); }
int cuEventCreate(Object** event, unsigned flags) {
    (void)flags;
    return event_create(__func__, event);
}
int cuEventDestroy_v2(void* event) { return event_destroy("cuEventDestroy", event); }
int cuEventRecord(void* event, void* stream) { return event_record(__func__, event, stream); }
int cuEventSynchronize(void* event) { return event_synchronize(__func__, event); }
int cuEventElapsedTime_v2(float* ms, void* start, void* stop) {
    return event_elapsed("cuEventElapsedTime", ms, start, stop);
}
int cuModuleLoadData(Object** module, const void* image) { return module_load(__func__, module, image); }
int cuModuleUnload(void* module) { return module_unload(__func__, module); }
int cuStreamBeginCapture_v2(void* stream, int mode) { return capture_begin("cuStreamBeginCapture", stream, mode); }
int cuStreamEndCapture(void* stream, Object** graph) { return capture_end(__func__, stream, graph); }
int cuGraphInstantiateWithFlags(Object** executable, void* graph, unsigned long long flags) {
    return instantiate("cuGraphInstantiate", executable, graph, flags);
}
int cuGraphDestroy(void* graph) { return graph_destroy(__func__, graph, GRAPH); }
int cuGraphExecDestroy(void* executable) { return graph_destroy(__func__, executable, EXEC); }
int cuGraphLaunch(void* executable, void* stream) { return graph_launch(__func__, executable, stream); }

// How the bindings find a function: by its plain name, whatever the library calls its newest form. An older driver
// lacks what STANDIN_LACKS names.
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags, int* found) {
    (void)version, (void)flags;
    static const char* const forms[] = {"%s", "%s_v2", "%sWithFlags"};
    char symbol[128];
    *function = NULL;
    const char* lacks = getenv("STANDIN_LACKS");
    for (int i = 0; i < 3 && !*function && !(lacks && !strcmp(lacks, name)); ++i) {
        snprintf(symbol, sizeof symbol, forms[i], name);
        *function = dlsym(RTLD_DEFAULT, symbol);
    }
    if (found) *found = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
