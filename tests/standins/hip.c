// ROCm's HIP runtime without a card: what `tests/standin_lab.py` builds as libamdhip64.so and hip-python loads.
//
// Memory is host memory; a launch runs the host-built shared object of the same kernel over the whole grid. What a
// capture forbids is the runtime's own.
#define FIRST_CURRENT 0
#define COPIES_END_CAPTURES 1
#define KERNEL_SYMBOL "%s.kd"
#include "calls.h"

static int image_status(const Elf64_Ehdr* image, int device) {
    static const struct { const char* name; int machine; } known[] = {
        {"gfx1100", 0x41}, {"gfx1101", 0x46}, {"gfx1151", 0x4a}, {"gfx1200", 0x48}, {"gfx1201", 0x4e}};
    char arch[256];
    arch_of(device, arch, sizeof arch);
    if (image->e_machine != 224) return INVALID_IMAGE;
    for (size_t i = 0; i < sizeof known / sizeof *known; ++i)
        if (!strncmp(arch, known[i].name, strlen(known[i].name)))
            return (int)(image->e_flags & 0xff) == known[i].machine ? SUCCESS : NO_BINARY;
    return NO_BINARY;
}

// ---- devices -------------------------------------------------------------------------------------------------------

int hipGetLastError(void) {
    const int status = last_error;
    last_error = SUCCESS;
    return status;
}

int hipGetDeviceCount(int* count) {
    *count = 0;
    CHECK(enter(__func__));
    *count = device_count();
    return leave(SUCCESS);
}

int hipSetDevice(int device) {
    CHECK(enter(__func__));
    REQUIRE(device >= 0 && device < device_count(), INVALID_DEVICE);
    current = device;
    return leave(SUCCESS);
}

int hipRuntimeGetVersion(int* version) {
    *version = 70200000;
    return SUCCESS;
}

// Offsets in hipDeviceProp_tR0600, 1472 bytes.
int hipGetDevicePropertiesR0600(byte* properties, int device) {
    CHECK(enter(__func__));
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

typedef struct {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
} PointerAttributes;

int hipPointerGetAttributes(PointerAttributes* out, void* pointer) {
    CHECK(enter(__func__));
    const Object* o = memory_at(pointer, 1);
    REQUIRE(o, INVALID_VALUE);  // not a complaint: it is how one asks
    *out = (PointerAttributes){.type = 2, .device = o->device, .device_pointer = pointer};
    return leave(SUCCESS);
}

int hipStreamGetDevice(void* handle, int* device) {
    CHECK(enter(__func__));
    const Object* stream = find(handle, STREAM, __func__);
    REQUIRE(stream, INVALID_HANDLE);
    *device = stream->device;
    return leave(SUCCESS);
}

int hipDeviceSynchronize(void) { return synchronize(__func__); }
int hipMalloc(void** pointer, size_t size) { return allocate(__func__, pointer, size); }
int hipFree(void* pointer) { return release(__func__, pointer); }
int hipMemcpyHtoD(void* to, void* from, size_t size) { return copy(__func__, to, from, size, 1); }
int hipMemcpyDtoH(void* to, void* from, size_t size) { return copy(__func__, to, from, size, 0); }
int hipStreamCreateWithFlags(Object** stream, unsigned flags) { return stream_create(__func__, stream, flags); }
int hipStreamDestroy(void* stream) { return stream_destroy(__func__, stream); }
int hipStreamSynchronize(void* stream) { return stream_synchronize(__func__, stream); }
int hipStreamWaitEvent(void* stream, void* event, unsigned flags) {
    return stream_wait(__func__, stream, event, flags);
}
int hipEventCreate(Object** event) { return event_create(__func__, event); }
int hipEventDestroy(void* event) { return event_destroy(__func__, event); }
int hipEventRecord(void* event, void* stream) { return event_record(__func__, event, stream); }
int hipEventSynchronize(void* event) { return event_synchronize(__func__, event); }
int hipEventElapsedTime(float* ms, void* start, void* stop) { return event_elapsed(__func__, ms, start, stop); }
int hipModuleLoadData(Object** module, const void* image) { return module_load(__func__, module, image); }
int hipModuleUnload(void* module) { return module_unload(__func__, module); }
int hipModuleGetFunction(Object** function, void* module, const char* name) {
    return module_function(__func__, function, module, name);
}
int hipModuleLaunchKernel(
    void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared_bytes, void* stream, void** params, void** extra) {
    const Launching how = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, 0, stream};
    return launch(__func__, function, &how, params, extra);
}
int hipStreamBeginCapture(void* stream, int mode) { return capture_begin(__func__, stream, mode); }
int hipStreamEndCapture(void* stream, Object** graph) { return capture_end(__func__, stream, graph); }
int hipGraphInstantiateWithFlags(Object** executable, void* graph, unsigned long long flags) {
    return instantiate(__func__, executable, graph, flags);
}
int hipGraphDestroy(void* graph) { return graph_destroy(__func__, graph, GRAPH); }
int hipGraphExecDestroy(void* executable) { return graph_destroy(__func__, executable, EXEC); }
int hipGraphLaunch(void* executable, void* stream) { return graph_launch(__func__, executable, stream); }
