// Matrix fragments: what every dialect shares. See matrix_maps.h for who holds what.
struct FragA {
    unsigned word[fragment::A_WORDS];
};
struct FragB {
    unsigned word[fragment::B_WORDS];
};
struct Acc {
    float x[8];
};
struct AccT {
    float x[8];
};

// The row (column) that slot s of a lane stands for.
__device__ __forceinline__ int slot_row(int s, int l) { return fragment::acc_row(2 * s, l); }
__device__ __forceinline__ int slot_col(int s, int l) { return fragment::acct_col(s % 2 + 4 * (s / 2), l); }

// The reduction of each slot over the lanes that hold parts of the same rows (columns), left in all of them.
template <int LANES, class Op, int COUNT>
__device__ __forceinline__ void reduce_lanes(float (&x)[COUNT]) {
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
        if constexpr ((LANES & 1) != 0) x[s] = Op().of(x[s], lane_xor<1>(x[s]));
        if constexpr ((LANES & 2) != 0) x[s] = Op().of(x[s], lane_xor<2>(x[s]));
        if constexpr ((LANES & 4) != 0) x[s] = Op().of(x[s], lane_xor<4>(x[s]));
        if constexpr ((LANES & 8) != 0) x[s] = Op().of(x[s], lane_xor<8>(x[s]));
        if constexpr ((LANES & 16) != 0) x[s] = Op().of(x[s], lane_xor<16>(x[s]));
    }
}
struct Add {
    __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Larger {
    __device__ __forceinline__ float of(float a, float b) { return max_f32(a, b); }
};
__device__ __forceinline__ void row_max(float (&x)[fragment::ROW_SLOTS]) {
    reduce_lanes<fragment::ROW_LANES, Larger>(x);
}
__device__ __forceinline__ void row_sum(float (&x)[fragment::ROW_SLOTS]) {
    reduce_lanes<fragment::ROW_LANES, Add>(x);
}
__device__ __forceinline__ void col_max(float (&x)[fragment::COL_SLOTS]) {
    reduce_lanes<fragment::COL_LANES, Larger>(x);
}
__device__ __forceinline__ void col_sum(float (&x)[fragment::COL_SLOTS]) {
    reduce_lanes<fragment::COL_LANES, Add>(x);
}

// A number in two f16 terms is hi + lo / LOW. What the first leaves out is at most 2^-11 of it, and often below 2^-14,
// the smallest normal f16. Where the matrix unit may read such numbers as zero it is multiplied with LOW, which makes
// it as large as the first at most; and a first term that would be subnormal is zero, so that the second has it all.
// Read in either way the two terms are x but for an error of 2^-22 |x|, or 2^-25 where that is more.
constexpr float LOW = READS_SUBNORMALS ? 1.0f : 2048.0f;

__device__ __forceinline__ float first_term(float x) {
    return READS_SUBNORMALS || !(abs_f32(x) < 0x1p-14f) ? x : 0.0f;  // NaN stays
}
__device__ __forceinline__ void split_f16(float x, float y, unsigned& hi, unsigned& lo) {
    float hx, hy;
    hi = pack_f16(first_term(x), first_term(y));
    unpack_f16(hi, hx, hy);
    lo = pack_f16((x - hx) * LOW, (y - hy) * LOW);
}

// What weights are multiplied with, and their sum of values divided by at the end. None is above 1; so those down to
// 2^-29 are normal f16 as a first term. Without it a unit that reads subnormals as zero would drop those below 2^-14:
// beside a key of weight 1, thousands of such keys may hold most of a row.
[[maybe_unused]] constexpr float WEIGHT = 32768.0f;

// A C fragment as f16 pairs (word w: elements 2w and 2w + 1) to the words of an operand whose k lie along what
// the lanes of a slot share. gfx12 and NVIDIA hold them as they are wanted; on gfx11 one wave half has the even,
// the other the odd.
__device__ __forceinline__ void operand_of(const unsigned (&pairs)[4], unsigned (&word)[fragment::A_WORDS]) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if constexpr (fragment::A_WORDS == 4) {
            word[w] = pairs[w];
        } else {
            const unsigned other = __builtin_bit_cast(unsigned, lane_xor<16>(__builtin_bit_cast(float, pairs[w])));
            const unsigned even = lane() & 16 ? other : pairs[w], odd = lane() & 16 ? pairs[w] : other;
            word[2 * w] = low_halves(even, odd);
            word[2 * w + 1] = high_halves(even, odd);
        }
    }
}

// An Acc as an A operand: its rows stay rows, its columns become k.
__device__ __forceinline__ FragA a_of(const unsigned (&pairs)[4]) {
    FragA a;
    operand_of(pairs, a.word);
    return a;
}

// LDS tiles of f16: rows of CHUNKS chunks of 16 bytes (eight f16), whose order a row permutes, so that neither the
// lanes that read one chunk of many rows nor those that read one row meet in a bank.
template <int CHUNKS>
struct Tile {
    // Within aligned groups of this many an exchange stays inside the row.
    static constexpr int SPAN = CHUNKS & -CHUNKS;
    static constexpr int MASK = SPAN >= 8 ? 7 : SPAN - 1;
};
template <int CHUNKS>
__device__ __forceinline__ int tile_chunk(int row, int chunk) {
    return row * CHUNKS + (chunk ^ (row & Tile<CHUNKS>::MASK));
}
// The same for row0 + row and chunk0 + chunk, with row0 a multiple of eight and no bit in both of chunk0 and chunk:
// what depends on the lane is the same register for many loads, what does not is the offset in the instruction.
template <int CHUNKS>
__device__ __forceinline__ int tile_chunk(int row0, int row, int chunk0, int chunk) {
    constexpr int MASK = Tile<CHUNKS>::MASK;
    return row * CHUNKS + ((chunk0 & MASK) ^ chunk ^ (row & MASK)) + (row0 * CHUNKS + (chunk0 & ~MASK));
}
// The word of the pair (row, column), (row, column + 1), of an even column.
template <int CHUNKS>
__device__ __forceinline__ int tile_word(int row, int column) {
    return tile_chunk<CHUNKS>(row, column >> 3) * 4 + (column >> 1 & 3);
}
// An A fragment into a tile [row][k], from where load_a takes it.
template <int CHUNKS>
__device__ __forceinline__ void store_a(Chunk* tile, const FragA& a, int row0, int k0) {
#pragma unroll
    for (int w = 0; w < fragment::A_WORDS; ++w) {
        const int row = row0 + fragment::a_row(2 * w, lane()), k = k0 + fragment::a_k(2 * w, lane());
        ((unsigned*)tile)[tile_word<CHUNKS>(row, k)] = a.word[w];
    }
}

// The same matrix dealt out the other way, through 16 x 17 f32 of LDS; for blocks of one wave. NVIDIA holds both alike.
__device__ __forceinline__ Acc rows_of(const AccT& c, float* turn) {
    Acc rows;
    if constexpr (fragment::ROW_SLOTS > 1) {
#pragma unroll
        for (int i = 0; i < 8; ++i) rows.x[i] = c.x[i];
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) turn[fragment::acct_row(i, lane()) * 17 + fragment::acct_col(i, lane())] = c.x[i];
        block_sync();
#pragma unroll
        for (int i = 0; i < 8; ++i) rows.x[i] = turn[fragment::acc_row(i, lane()) * 17 + fragment::acc_col(i, lane())];
        block_sync();
    }
    return rows;
}
