// NVIDIA's runtime compiler without a compiler: what `tests/standin_lab.py` builds as libnvrtc.so.N and cuda-bindings
// loads. STANDIN_NVRTC names a function that fails.
#include "compiler.h"

static int failing(const char* function) {
    const char* named = getenv("STANDIN_NVRTC");
    return named && !strcmp(named, function) ? 11 : 0;  // an internal error
}
#define MAY_FAIL \
    if (failing(__func__)) return failing(__func__)

int nvrtcVersion(int* major, int* minor) {
    MAY_FAIL;
    *major = 13;
    *minor = 0;
    return 0;
}

int nvrtcCreateProgram(
    void** program, const char* text, const char* name, int count, const char** headers, const char** names) {
    (void)name, (void)count, (void)headers, (void)names;
    MAY_FAIL;
    return create(program, text);
}

int nvrtcCompileProgram(void* program, int count, const char** options) {
    return compile(program, count, options, "--gpu-architecture=");
}

int nvrtcGetProgramLogSize(void* program, size_t* size) { return log_size(program, size); }
int nvrtcGetProgramLog(void* program, char* out) {
    MAY_FAIL;
    return log_text(program, out);
}
int nvrtcGetCUBINSize(void* program, size_t* size) {
    MAY_FAIL;
    return code_size(program, size);
}
int nvrtcGetCUBIN(void* program, char* out) { return code(program, out); }
int nvrtcDestroyProgram(void** program) { return destroy(program); }
