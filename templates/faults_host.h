// Faults of the processor in a kernel on the CPU: an access to a page that nobody may touch, a division by zero.
//
// Under a memory check a fault breaks off the launch, as a deadlock does. The handler notes what happened and has the
// OS thread go on where hk_run waits for the block. It runs on a stack of its own: a fiber's may be what overflowed. It
// finds the thread's block by the thread's pointer: thread_local storage of a thread that never ran this kernel would
// have to be allocated, which a handler must not do.
#if HK_ASM_SWITCH && __linux__
#include <signal.h>
#include <ucontext.h>

namespace hk {

constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL}, FAULT_COUNT = 4;
static struct sigaction handled_before[FAULT_COUNT];

struct Catching {
    void* thread;
    Block* block;
};
static Catching catching[256];  // more than the OS threads that run blocks
static thread_local stack_t stack_before;

static void* this_thread() {
    void* pointer;
    asm("movq %%fs:0, %0" : "=r"(pointer));
    return pointer;
}

// The entry of a thread; of nobody: one that is free, which is then the caller's.
static Catching* entry_of(void* thread, void* owner) {
    for (Catching& one : catching) {
        void* found = thread;
        if (__atomic_compare_exchange_n(&one.thread, &found, owner, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return &one;
    }
    return nullptr;
}

static void catch_faults(const Arena& arena, bool on) {
    void* const self = this_thread();
    if (!on) {
        sigaltstack(&stack_before, nullptr);
        entry_of(self, nullptr);
        return;
    }
    stack_t stack = {};
    stack.ss_sp = ((Workspace*)arena.workspace)->signals;
    stack.ss_size = sizeof(Workspace::signals);
    sigaltstack(&stack, &stack_before);
    if (Catching* own = entry_of(nullptr, self)) own->block = &block;
}

// As if there were no handler here. Where nothing else handles it, the faulting instruction runs again and ends the
// process.
static void pass_on(int number, siginfo_t* info, void* context) {
    for (int i = 0; i < FAULT_COUNT; ++i) {
        const struct sigaction& old = handled_before[i];
        if (FAULTS[i] != number) continue;
        if (old.sa_flags & SA_SIGINFO) return old.sa_sigaction(number, info, context);
        if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) return old.sa_handler(number);
        if (info->si_code <= 0 && old.sa_handler == SIG_IGN) return;
        sigaction(number, &old, nullptr);
        if (info->si_code <= 0) raise(number);
    }
}

static void on_fault(int number, siginfo_t* info, void* context) {
    void* const self = this_thread();
    Catching* const own = entry_of(self, self);
    if (!own || !own->block->in_kernel || info->si_code <= 0) return pass_on(number, info, context);  // <= 0: by kill()
    Block& b = *own->block;
    greg_t* const registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    Report& r = b.report;
    for (int i = 0; i < 3; ++i) r.block[i] = b.index[i];
    r.thread = b.current;
    r.signal = number;
    r.code = info->si_code;
    r.write = (registers[REG_ERR] & 2) != 0;
    r.address = (unsigned long)info->si_addr;
    r.instruction = (unsigned long)registers[REG_RIP];
    r.stack = (unsigned long)registers[REG_RSP];
    b.error = FAULT;
    registers[REG_RSI] = (greg_t)b.home;  // as hk_switch does it: the fibers of the block are abandoned
    registers[REG_RIP] = (greg_t)&hk_load;
}

}  // namespace hk

// Handles faults of this process, or does so no longer. One kernel at a time, and in turn with its launches.
HK_API void hk_handle_faults(int on) {
    struct sigaction own = {};
    own.sa_sigaction = hk::on_fault;
    own.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < hk::FAULT_COUNT; ++i)
        sigaction(hk::FAULTS[i], on ? &own : &hk::handled_before[i], on ? &hk::handled_before[i] : nullptr);
}
#else
static void hk::catch_faults(const Arena&, bool) {}
#endif
