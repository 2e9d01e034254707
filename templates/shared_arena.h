// More shared memory than a kernel may declare: one arena, whose size the launch gives, and arrays at offsets in it.
// The strictest reader of an array is the matrix unit, whose swizzle pattern repeats every 1,024 bytes.
#undef SHARED
#define SHARED(type, name, count, offset)                            \
    extern __shared__ __align__(1024) unsigned char shared_arena[]; \
    type* const name = (type*)(shared_arena + (offset))
#undef SHARED_ALIGNED
#define SHARED_ALIGNED(align, type, name, count, offset) SHARED(type, name, count, offset)
