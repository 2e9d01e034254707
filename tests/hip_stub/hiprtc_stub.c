// ROCm's runtime compiler without a compiler: what `tests/hip_lab.py` builds as libhiprtc.so and hip-python loads.
//
// For a kernel whose source lies in HIP_STUB_KERNELS as ENTRY.ARCH.hip it gives the code object ENTRY.ARCH.co beside
// it, which an offline clang made of that source; for any other source, the options and the source. Words in the source
// or in HIP_STUB_COMPILE make it fail in the ways a real one does; on the arch in HIP_STUB_UNKNOWN_ARCH it aborts.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *source, *code;
static size_t code_size;
static char log_text[4096];

int hiprtcVersion(int* major, int* minor) {
    *major = 9;
    *minor = 0;
    return 0;
}

int hiprtcCreateProgram(
    void** program, const char* text, const char* name, int count, const char** headers, const char** names) {
    (void)name, (void)count, (void)headers, (void)names;
    source = strdup(text);
    *program = source;
    return 0;
}

static char* read_file(const char* folder, const char* entry, const char* suffix, size_t* size) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.%s", folder, entry, suffix);
    FILE* file = fopen(path, "rb");
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char* bytes = calloc(1, *size + 1);
    *size = fread(bytes, 1, *size, file);
    fclose(file);
    return bytes;
}

// The code object of a kernel that the test has prepared; whether the source is one at all.
static int prepared(const char* arch) {
    const char* folder = getenv("HIP_STUB_KERNELS");
    const char* at = folder ? strstr(source, "extern \"C\" __global__ __launch_bounds__(") : NULL;
    char entry[128], suffix[64];
    if (!at || sscanf(at, "extern \"C\" __global__ __launch_bounds__(%*u) void %127[a-z0-9_]", entry) != 1) return 0;
    snprintf(suffix, sizeof suffix, "%s.hip", arch);
    size_t size;
    const char* known = read_file(folder, entry, suffix, &size);
    snprintf(suffix, sizeof suffix, "%s.co", arch);
    code = read_file(folder, entry, suffix, &code_size);
    if (!known || !code || strcmp(known, source))
        snprintf(log_text, sizeof log_text, "kernel.hip:1:1: error: not prepared: %s for %s\n", entry, arch);
    return 1;
}

static void echo(int count, const char** options) {
    code = calloc(1, 1 << 17);
    strcpy(code, "options:");
    for (int i = 0; i < count; ++i) sprintf(code + strlen(code), " %s", options[i]);
    sprintf(code + strlen(code), "\nsource: %s", source);
    code_size = strlen(code);
}

static int told(const char* word) {
    const char* environment = getenv("HIP_STUB_COMPILE");
    return strstr(source, word) || (environment && strstr(environment, word));
}

int hiprtcCompileProgram(void* program, int count, const char** options) {
    (void)program;
    puts("chatter on standard output");
    const char* arch = "";
    for (int i = 0; i < count; ++i)
        if (!strncmp(options[i], "--offload-arch=", 15)) arch = options[i] + 15;
    const char* unknown = getenv("HIP_STUB_UNKNOWN_ARCH");
    if (told("ABORT") || (unknown && !strcmp(arch, unknown))) abort();
    if (told("HANG")) sleep(60);
    if (told("OPTION")) return 5;
    if (told("WARN")) strcpy(log_text, "kernel.hip:1:1: warning: mind this\n");
    if (told("ENVIRONMENT")) snprintf(log_text, sizeof log_text, "%s%s", getenv("TMPDIR"), getenv("AMD_COMGR_CACHE"));
    if (told("WRONG")) strcpy(log_text, "kernel.hip:7:9: error: no such thing\n1 error generated.\n");
    else if (!prepared(arch)) echo(count, options);
    return strstr(log_text, "error:") ? 6 : 0;
}

int hiprtcGetProgramLogSize(void* program, size_t* size) {
    (void)program;
    *size = strlen(log_text) + 1;
    return 0;
}

int hiprtcGetProgramLog(void* program, char* out) {
    (void)program;
    strcpy(out, log_text);
    return 0;
}

int hiprtcGetCodeSize(void* program, size_t* size) {
    (void)program;
    *size = code_size;
    return 0;
}

int hiprtcGetCode(void* program, char* out) {
    (void)program;
    memcpy(out, code, code_size);
    return 0;
}

int hiprtcDestroyProgram(void** program) {
    (void)program;
    return 0;
}
