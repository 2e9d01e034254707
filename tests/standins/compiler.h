// What the stand-ins for a runtime compiler share: hiprtc.c and nvrtc.c give it the names of theirs.
//
// For a kernel whose source lies in STANDIN_KERNELS as ENTRY.ARCH.source it gives the code ENTRY.ARCH.code beside it,
// made beforehand; for any other source, the options and the source. Words in the source or in STANDIN_COMPILE make it
// fail in the ways a real one does; on the arch in STANDIN_UNKNOWN_ARCH it aborts.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    char *source, *code, log[4096];
    size_t code_size;
} Program;

static int create(void** made, const char* text) {
    Program* program = calloc(1, sizeof *program);
    program->source = strdup(text);
    *made = program;
    return 0;
}

static char* read_file(const char* folder, const char* entry, const char* arch, const char* kind, size_t* size) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.%s.%s", folder, entry, arch, kind);
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

// The code of a kernel that the test has prepared; whether the source is one of a kernel at all.
static int prepared(Program* program, const char* arch) {
    const char* folder = getenv("STANDIN_KERNELS");
    const char* at = folder ? strstr(program->source, "extern \"C\" __global__ __launch_bounds__(") : NULL;
    at = at ? strstr(at, ") void ") : NULL;
    char entry[128];
    if (!at || sscanf(at, ") void %127[a-z0-9_]", entry) != 1) return 0;
    size_t size;
    char* known = read_file(folder, entry, arch, "source", &size);
    program->code = read_file(folder, entry, arch, "code", &program->code_size);
    if (!known || !program->code || strcmp(known, program->source))
        snprintf(program->log, sizeof program->log, "kernel:1:1: error: not prepared: %s for %s\n", entry, arch);
    free(known);
    return 1;
}

static void echo(Program* program, int count, const char* const* options) {
    program->code = calloc(1, 1 << 17);
    strcpy(program->code, "options:");
    for (int i = 0; i < count; ++i) sprintf(program->code + strlen(program->code), " %s", options[i]);
    sprintf(program->code + strlen(program->code), "\nsource: %s", program->source);
    program->code_size = strlen(program->code);
}

static int told(const Program* program, const char* word) {
    const char* environment = getenv("STANDIN_COMPILE");
    return strstr(program->source, word) || (environment && strstr(environment, word));
}

enum { INVALID_OPTION = 5, COMPILATION = 6 };

// `option`: what comes ahead of the arch's name in the option that says it.
static int compile(Program* program, int count, const char* const* options, const char* option) {
    const char* arch = "";
    for (int i = 0; i < count; ++i)
        if (!strncmp(options[i], option, strlen(option))) arch = options[i] + strlen(option);
    const char* unknown = getenv("STANDIN_UNKNOWN_ARCH");
    if (told(program, "ABORT") || (unknown && !strcmp(arch, unknown))) abort();
    if (told(program, "HANG")) sleep(60);
    if (told(program, "OPTION")) return INVALID_OPTION;
    if (told(program, "WARN")) strcpy(program->log, "kernel:1:1: warning: mind this\n");
    if (told(program, "ENVIRONMENT"))
        snprintf(program->log, sizeof program->log, "%s%s", getenv("TMPDIR"), getenv("AMD_COMGR_CACHE"));
    if (told(program, "WRONG")) strcpy(program->log, "kernel:7:9: error: no such thing\n1 error generated.\n");
    else if (!prepared(program, arch)) echo(program, count, options);
    return strstr(program->log, "error:") ? COMPILATION : 0;
}

static int log_size(const Program* program, size_t* size) {
    *size = strlen(program->log) + 1;
    return 0;
}

static int log_text(const Program* program, char* out) {
    strcpy(out, program->log);
    return 0;
}

static int code_size(const Program* program, size_t* size) {
    *size = program->code_size;
    return 0;
}

static int code(const Program* program, char* out) {
    memcpy(out, program->code, program->code_size);
    return 0;
}

static int destroy(void** made) {
    Program* program = *made;
    free(program->source);
    free(program->code);
    free(program);
    *made = NULL;
    return 0;
}
