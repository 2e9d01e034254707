// Matrix fragments on gfx11 and gfx12: v_wmma_f32_16x16x16_f16, wave32.
{% include "matrix_maps.h" %}
#if defined(__GFX12__)
namespace fragment = gfx12;
#else
namespace fragment = gfx11;
#endif

// Sixteen bytes: the unit of loads and copies.
typedef unsigned Chunk __attribute__((ext_vector_type(4)));

// Loads are not moved across it. Where all of an unrolled loop's loads would otherwise come first, and spill.
__device__ __forceinline__ void schedule_fence() { __builtin_amdgcn_sched_barrier(0); }

// Two f32 as f16, rounded to nearest even, low half first; and back.
__device__ __forceinline__ unsigned pack_f16(float x, float y) {
    typedef _Float16 half2 __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(unsigned, (half2){(_Float16)x, (_Float16)y});
}
__device__ __forceinline__ void unpack_f16(unsigned word, float& x, float& y) {
    x = f16_to_f32((unsigned short)word);
    y = f16_to_f32((unsigned short)(word >> 16));
}

// Two words of f16 pairs to their low halves, their high halves.
__device__ __forceinline__ unsigned low_halves(unsigned x, unsigned y) {
    return __builtin_amdgcn_perm(y, x, 0x05040100);
}
__device__ __forceinline__ unsigned high_halves(unsigned x, unsigned y) {
    return __builtin_amdgcn_perm(y, x, 0x07060302);
}

// Four int8 codes as f16, exactly: with its sign bit flipped a code is the byte code + 128, which under the exponent
// 0x64 is the number 1152 + code.
__device__ __forceinline__ void codes_to_f16(unsigned codes, unsigned& first, unsigned& second) {
    typedef _Float16 half2 __attribute__((ext_vector_type(2)));
    const unsigned flipped = codes ^ 0x80808080u;
    const half2 offset = {(_Float16)1152, (_Float16)1152};
    const unsigned a = __builtin_amdgcn_perm(0x64646464u, flipped, 0x04010400);
    const unsigned b = __builtin_amdgcn_perm(0x64646464u, flipped, 0x04030402);
    first = __builtin_bit_cast(unsigned, __builtin_bit_cast(half2, a) - offset);
    second = __builtin_bit_cast(unsigned, __builtin_bit_cast(half2, b) - offset);
}

// The products of two f16 pairs, rounded.
__device__ __forceinline__ unsigned mul_f16(unsigned x, unsigned y) {
    typedef _Float16 half2 __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(unsigned, __builtin_bit_cast(half2, x) * __builtin_bit_cast(half2, y));
}

// 4 COUNT bytes from an even address.
template <int COUNT>
__device__ __forceinline__ void load_words(const unsigned char* p, unsigned (&word)[COUNT]) {
    __builtin_memcpy(word, p, 4 * COUNT);
}

// Whether the operation reads subnormal f16 operands as they are. CDNA2 takes them for zero; what RDNA3 and RDNA4 do is
// published nowhere. With false the kernels are right either way (LOW, in matrix.h).
constexpr bool READS_SUBNORMALS = false;

{% include "matrix.h" %}

typedef _Float16 Halves __attribute__((ext_vector_type(2 * fragment::A_WORDS)));
typedef float Eight __attribute__((ext_vector_type(8)));

__device__ __forceinline__ void wmma(float (&x)[8], const unsigned (&a)[fragment::A_WORDS],
                                     const unsigned (&b)[fragment::A_WORDS]) {
    Eight c;
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = x[i];
#if defined(__GFX12__)
    c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(__builtin_bit_cast(Halves, a),
                                                         __builtin_bit_cast(Halves, b), c);
#else
    c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(Halves, a), __builtin_bit_cast(Halves, b), c);
#endif
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = c[i];
}

// c += a b, by all 32 lanes.
__device__ __forceinline__ void mma(Acc& c, const FragA& a, const FragB& b) { wmma(c.x, b.word, a.word); }
__device__ __forceinline__ void mma(AccT& c, const FragA& a, const FragB& b) { wmma(c.x, a.word, b.word); }

{% include "matrix_terms.h" %}

// The fragment is complete here: what makes it is not moved behind, where its operands would have to stay in registers.
__device__ __forceinline__ void complete(Acc& c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) asm volatile("" : "+v"(c.x[i]));
}

// An AccT as a B operand: its columns stay columns, its rows become k.
__device__ __forceinline__ FragB b_of(const unsigned (&pairs)[4]) {
    FragB b;
    operand_of(pairs, b.word);
    return b;
}

template <int CHUNKS>
__device__ __forceinline__ void load_operand(unsigned (&word)[fragment::A_WORDS], const Chunk* tile, int row0, int k0) {
#pragma unroll
    for (int c = 0; c < fragment::A_WORDS / 4; ++c) {
        const int within = fragment::A_WORDS == 4 ? lane() >> 4 : 0;
        const Chunk chunk = tile[tile_chunk<CHUNKS>(row0, lane() & 15, (k0 >> 3) + c, within)];
#pragma unroll
        for (int i = 0; i < 4; ++i) word[4 * c + i] = chunk[i];
    }
}

// A[row0 .. + 15][k0 .. + 15] from a tile [row][k]; B[k0 .. + 15][col0 .. + 15] from a tile [column][k].
template <int CHUNKS>
__device__ __forceinline__ void load_a(FragA& a, const Chunk* tile, int row0, int k0) {
    load_operand<CHUNKS>(a.word, tile, row0, k0);
}
template <int CHUNKS>
__device__ __forceinline__ void load_b(FragB& b, const Chunk* tile, int col0, int k0) {
    load_operand<CHUNKS>(b.word, tile, col0, k0);
}

// Two B fragments from a tile [k][column]: 16 k x 32 columns. Column c of fragment f is column pair_col(f, c)
// of the 32: even and odd ones, so that a lane reads whole words and never half of one.
__device__ __forceinline__ int pair_col(int f, int c) { return 2 * c + f; }
template <int CHUNKS>
__device__ __forceinline__ unsigned tile_pair(const Chunk* tile, int k, int col0) {
    constexpr int MASK = Tile<CHUNKS>::MASK;
    const int turned = k & MASK, chunk0 = col0 >> 3, far = fragment::B_WORDS == 4 ? (lane() >> 4) * 8 * CHUNKS : 0;
    const int chunk = ((lane() >> 2 & 3) ^ (turned & 3)) + ((chunk0 ^ turned) & MASK & ~3) + (chunk0 & ~MASK);
    return ((const unsigned*)tile)[4 * (far + k * CHUNKS + chunk) + (lane() & 3)];
}
template <int CHUNKS>
__device__ __forceinline__ void load_b_pair(FragB (&b)[2], const Chunk* tile, int k0, int col0) {
#pragma unroll
    for (int w = 0; w < fragment::B_WORDS; ++w) {
        const unsigned x = tile_pair<CHUNKS>(tile, k0 + 2 * w, col0), y = tile_pair<CHUNKS>(tile, k0 + 2 * w + 1, col0);
        b[0].word[w] = low_halves(x, y);
        b[1].word[w] = high_halves(x, y);
    }
}

// Two C fragments whose B operands came from load_b_pair: 32 columns from col0 on of each row, to where `to` points for
// the lane's rows; nowhere where that is null.
__device__ __forceinline__ void store_pair(float* const (&to)[fragment::ROW_SLOTS], int col0, const Acc& first,
                                           const Acc& second) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float* at = to[fragment::row_slot(i)];
        if (at == nullptr) continue;
        at[col0 + pair_col(0, fragment::acc_col(i, lane()))] = first.x[i];
        at[col0 + pair_col(1, fragment::acc_col(i, lane()))] = second.x[i];
    }
}

// Copy 16 bytes from global memory to LDS, zeros where not `valid`; `from` must be readable all the same. Asynchronous
// where the hardware can: they have arrived after copies_done, for the other threads after a block_sync behind that.
__device__ __forceinline__ void copy_16(Chunk* to, const void* from, bool valid) {
    const Chunk chunk = *(const Chunk*)from, zero = {};
    *to = valid ? chunk : zero;
}
__device__ __forceinline__ void copies_commit() {}
template <int PENDING>
__device__ __forceinline__ void copies_done() {}
