// ROCm's runtime compiler without a compiler: what `tests/standin_lab.py` builds as libhiprtc.so and hip-python loads.
#include "compiler.h"

int hiprtcVersion(int* major, int* minor) {
    *major = 9;
    *minor = 0;
    return 0;
}

int hiprtcCreateProgram(
    void** program, const char* text, const char* name, int count, const char** headers, const char** names) {
    (void)name, (void)count, (void)headers, (void)names;
    return create(program, text);
}

int hiprtcCompileProgram(void* program, int count, const char** options) {
    puts("chatter on standard output");
    return compile(program, count, options, "--offload-arch=");
}

int hiprtcGetProgramLogSize(void* program, size_t* size) { return log_size(program, size); }
int hiprtcGetProgramLog(void* program, char* out) { return log_text(program, out); }
int hiprtcGetCodeSize(void* program, size_t* size) { return code_size(program, size); }
int hiprtcGetCode(void* program, char* out) { return code(program, out); }
int hiprtcDestroyProgram(void** program) { return destroy(program); }
