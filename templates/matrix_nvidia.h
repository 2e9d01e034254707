// Matrix fragments on NVIDIA: mma.sync m16n8k16, two for 16 columns. f16 is never a type of its own here, only half a
// 32-bit word.
{% include "matrix_maps.h" %}
namespace fragment = mma16;

// Sixteen bytes: the unit of loads and copies.
struct alignas(16) Chunk {
    unsigned word[4];
    __device__ __forceinline__ unsigned& operator[](int i) { return word[i]; }
    __device__ __forceinline__ unsigned operator[](int i) const { return word[i]; }
};

// Loads are not moved across it. Where all of an unrolled loop's loads would otherwise come first, and spill.
__device__ __forceinline__ void schedule_fence() {}

// Two f32 as f16, rounded to nearest even, low half first; and back.
__device__ __forceinline__ unsigned pack_f16(float x, float y) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(y), "f"(x));
    return word;
}
__device__ __forceinline__ void unpack_f16(unsigned word, float& x, float& y) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(x), "=f"(y) : "r"(word));
}

// Two words of f16 pairs to their low halves, their high halves.
__device__ __forceinline__ unsigned low_halves(unsigned x, unsigned y) { return __byte_perm(x, y, 0x5410); }
__device__ __forceinline__ unsigned high_halves(unsigned x, unsigned y) { return __byte_perm(x, y, 0x7632); }

// Four int8 codes as f16, exactly: with its sign bit flipped a code is the byte code + 128, which under the exponent
// 0x64 is the number 1152 + code.
__device__ __forceinline__ void codes_to_f16(unsigned codes, unsigned& first, unsigned& second) {
    const unsigned flipped = codes ^ 0x80808080u, offset = 0xe480e480u;  // -1152 twice
    const unsigned a = __byte_perm(flipped, 0x64646464u, 0x4140), b = __byte_perm(flipped, 0x64646464u, 0x4342);
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(first) : "r"(a), "r"(offset));
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(second) : "r"(b), "r"(offset));
}

// The products of two f16 pairs, rounded.
__device__ __forceinline__ unsigned mul_f16(unsigned x, unsigned y) {
    unsigned product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
    return product;
}

// 4 COUNT bytes from an even address, by aligned words; the last one loaded is that of the last byte.
template <int COUNT>
__device__ __forceinline__ void load_words(const unsigned char* p, unsigned (&word)[COUNT]) {
    const unsigned odd = (unsigned)(unsigned long long)p & 2;
    const unsigned* words = (const unsigned*)(const void*)(p - odd);
    unsigned raw[COUNT + 1];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) raw[i] = words[i];
    raw[COUNT] = words[COUNT - 1 + odd / 2];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) word[i] = __funnelshift_r(raw[i], raw[i + 1], 8 * odd);
}

// Whether the operation reads subnormal f16 operands as they are. PTX leaves it open; the chips do (matrix_probe asks).
constexpr bool READS_SUBNORMALS = true;

{% include "matrix.h" %}

// Volatile, as all that the whole warp must reach together: it stays out of branches.
__device__ __forceinline__ void mma_8(float (&c)[8], int at, const FragA& a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, "
                 "{ %0, %1, %2, %3};"
        : "+f"(c[at]), "+f"(c[at + 1]), "+f"(c[at + 2]), "+f"(c[at + 3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
}

// c += a b, by all 32 lanes.
__device__ __forceinline__ void mma(Acc& c, const FragA& a, const FragB& b) {
    mma_8(c.x, 0, a, b.word[0], b.word[1]);
    mma_8(c.x, 4, a, b.word[2], b.word[3]);
}
__device__ __forceinline__ void mma(AccT& c, const FragA& a, const FragB& b) {
    mma_8(c.x, 0, a, b.word[0], b.word[1]);
    mma_8(c.x, 4, a, b.word[2], b.word[3]);
}

{% include "matrix_terms.h" %}

// The fragment is complete here: what makes it is not moved behind, where its operands would have to stay in registers.
__device__ __forceinline__ void complete(Acc&) {}

// An AccT as a B operand: its columns stay columns, its rows become k.
__device__ __forceinline__ FragB b_of(const unsigned (&pairs)[4]) {
    FragB b;
#pragma unroll
    for (int w = 0; w < 4; ++w)
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b.word[w]) : "r"(pairs[w]));
    return b;
}

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Four 8x8 blocks: lane l brings the address of row l % 8 of block l / 8.
__device__ __forceinline__ void ldmatrix(unsigned (&word)[4], const Chunk* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(shared_address(row)));
}
__device__ __forceinline__ void ldmatrix_trans(unsigned (&word)[4], const Chunk* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(shared_address(row)));
}

// A[row0 .. + 15][k0 .. + 15] from a tile [row][k]; B[k0 .. + 15][col0 .. + 15] from a tile [column][k].
template <int CHUNKS>
__device__ __forceinline__ void load_a(FragA& a, const Chunk* tile, int row0, int k0) {
    ldmatrix(a.word, tile + tile_chunk<CHUNKS>(row0, lane() & 15, k0 >> 3, lane() >> 4));
}
template <int CHUNKS>
__device__ __forceinline__ void load_b(FragB& b, const Chunk* tile, int col0, int k0) {
    ldmatrix(b.word, tile + tile_chunk<CHUNKS>(col0, (lane() & 7) + (lane() >> 1 & 8), k0 >> 3, lane() >> 3 & 1));
}

// Two B fragments from a tile [k][column]: 16 k x 32 columns.
// Column c of fragment f is column pair_col(f, c) of the 32.
__device__ __forceinline__ int pair_col(int f, int c) { return 16 * f + c; }
template <int CHUNKS>
__device__ __forceinline__ void load_b_pair(FragB (&b)[2], const Chunk* tile, int k0, int col0) {
#pragma unroll
    for (int f = 0; f < 2; ++f)
        ldmatrix_trans(b[f].word, tile + tile_chunk<CHUNKS>(k0, lane() & 15, (col0 >> 3) + 2 * f, lane() >> 4));
}

// Two C fragments whose B operands came from load_b_pair: 32 columns from col0 on of each row, to where `to` points for
// the lane's rows; nowhere where that is null.
__device__ __forceinline__ void store_pair(float* const (&to)[fragment::ROW_SLOTS], int col0, const Acc& first,
                                           const Acc& second) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        float* at = to[fragment::row_slot(i)];
        if (at == nullptr) continue;
        const int column = col0 + fragment::acc_col(i, lane());
        *(float2*)(void*)(at + column) = make_float2(first.x[i], first.x[i + 1]);
        *(float2*)(void*)(at + column + 16) = make_float2(second.x[i], second.x[i + 1]);
    }
}

// Copy 16 bytes from global memory to LDS, zeros where not `valid`; `from` must be readable all the same. Asynchronous
// where the hardware can: they have arrived after copies_done, for the other threads after a block_sync behind that.
__device__ __forceinline__ void copy_16(Chunk* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_done() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
