// What Python and the machine both know. cffi reads this file: no directives, no types of headers.

enum { HK_NONE, HK_VECTOR, HK_SCALAR, HK_CONSTANT };  // where an operand is
enum { HK_WORD, HK_LOW, HK_HIGH, HK_PAIR, HK_MASK };  // what of it is meant

// Of a source, in the order in which they are applied.
enum {
    HK_SWAP_LOW = 1,    // packed: the low half is the high one
    HK_SWAP_HIGH = 2,   // packed: the high half is the low one
    HK_NEGATE_LOW = 4,  // packed
    HK_NEGATE_HIGH = 8,
    HK_SHIFT = 16,     // the high half, as the low one
    HK_FROM_F16 = 32,  // an f16, as f32
    HK_ABS32 = 64,
    HK_NEGATE32 = 128,
    HK_ABS16 = 256,
    HK_NEGATE16 = 512,
};

enum {
    HK_PAIRED = 1,    // the next one begins with it: v_dual
    HK_CLAMP = 2,     // the f32 result, to 0 .. 1
    HK_TO_EXEC = 4,   // v_cmpx
    HK_SELECTS = 8,   // of its two sources a lane takes one, by the mask
    HK_RETURNS = 16,  // an atomic that gives what was there
    HK_APART = 32,    // the low part of its result depends on the low parts of its sources alone
};

enum { HK_LOADS, HK_SHARED_OPS, HK_CONSTANTS, HK_STORES, HK_COUNTERS };  // what is waited for

typedef struct {
    unsigned char kind, part;
    unsigned short mods, reg, needs;  // needs: the part of it that the result depends on
    unsigned value;
} hk_source;

typedef struct {
    unsigned short code, flags;
    unsigned char result, part;    // HK_VECTOR, HK_SCALAR or none; the part of it that is written
    unsigned short reg, mask_reg;  // mask_reg: of a result that is a mask, or of the carry; 65535: none
    short map;                     // of lanes, for an operand through DPP; -1: none
    hk_source source[4];
    int offset[2];        // bytes, of each address
    int target;           // index of the instruction that is jumped to
    int place;            // a number for its line
    short wait[4];        // by counter, how many may be left; -1: any
} hk_op;

typedef struct {
    const hk_op* ops;
    const signed char* maps;  // 32 each: the lane that a lane reads, -1 for none
    unsigned count, vgprs, lds_bytes, threads;
    unsigned user_sgprs, ids;  // ids: bits of x, y, z, which come in registers (gfx11)
    int gfx12, ieee;
} hk_program;

typedef struct {
    unsigned long long from, to;
    int writable;
} hk_extent;  // bytes that may be accessed

typedef struct {
    unsigned grid[3];
    int flushed;  // the matrix unit takes subnormal f16 for zero
    unsigned long long kernarg, seed, most;  // most: instructions of a wave
    const hk_extent* extents;  // by address
    unsigned extent_count, turn;  // turn: most instructions of a wave before another's turn
} hk_launch;

typedef struct {
    unsigned short kind, wave;
    short lane, reg;  // -1: none
    unsigned op, other, block[3];  // other: of a race, the other wave; of an operand, its counter or its lanes
    unsigned long long address;
} hk_finding;

typedef struct {
    hk_finding found[16];
    unsigned count;
    unsigned long long *runs, *lanes;  // of each instruction: how often, and by how many lanes
} hk_outcome;

int hk_machine_run(const hk_program*, const hk_launch*, unsigned long long first, unsigned long long last, hk_outcome*);
