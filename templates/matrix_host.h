// Matrix fragments on the CPU: the operation as all lanes see it, with the lane map of any of the GPUs.
{% include "matrix_maps.h" %}
namespace fragment = gfx11;

// Sixteen bytes: the unit of loads and copies.
struct alignas(16) Chunk {
    unsigned word[4];
    unsigned& operator[](int i) { return word[i]; }
    unsigned operator[](int i) const { return word[i]; }
};

// The value that lane (lane ^ MASK) holds.
namespace hk {
static __attribute__((noinline)) float exchange(float x, unsigned mask, const At& at) {
    const float one[1] = {x};
    const int parity = wave_op(one, at, [](Wave&, int) {});
    return block.waves[block.current / WAVE].lanes[parity][0][block.current % WAVE ^ mask];
}
}  // namespace hk
template <int MASK>
__device__ __forceinline__ float lane_xor(float x, hk::At at = hk::here()) {
    return hk::exchange(x, MASK, at);
}

// Loads are not moved across it. Where all of an unrolled loop's loads would otherwise come first, and spill.
__device__ __forceinline__ void schedule_fence() {}

// Two f32 as f16, rounded to nearest even, low half first; and back.
__device__ __forceinline__ unsigned pack_f16(float x, float y) { return f32_to_f16(x) | (unsigned)f32_to_f16(y) << 16; }
__device__ __forceinline__ void unpack_f16(unsigned word, float& x, float& y) {
    x = f16_to_f32((unsigned short)word);
    y = f16_to_f32((unsigned short)(word >> 16));
}

// Two words of f16 pairs to their low halves, their high halves.
__device__ __forceinline__ unsigned low_halves(unsigned x, unsigned y) { return (x & 0xffff) | y << 16; }
__device__ __forceinline__ unsigned high_halves(unsigned x, unsigned y) { return x >> 16 | (y & 0xffff0000u); }

// Four int8 codes as f16, exactly.
__device__ __forceinline__ void codes_to_f16(unsigned codes, unsigned& first, unsigned& second) {
    const auto code = [codes](int i) { return (float)(signed char)(codes >> (8 * i)); };
    first = pack_f16(code(0), code(1));
    second = pack_f16(code(2), code(3));
}

// The products of two f16 pairs, rounded.
__device__ __forceinline__ unsigned mul_f16(unsigned x, unsigned y) {
    float a, b, c, d;
    unpack_f16(x, a, b);
    unpack_f16(y, c, d);
    return pack_f16(a * c, b * d);
}

// 4 COUNT bytes from an even address.
template <int COUNT>
__device__ __forceinline__ void load_words(const unsigned char* p, unsigned (&word)[COUNT]) {
    __builtin_memcpy(word, p, 4 * COUNT);
}

// As on AMD, which the emulation stands for: LOW, in matrix.h. Whether it reads subnormal operands says the launch.
constexpr bool READS_SUBNORMALS = false;

{% include "matrix.h" %}

// The operation, from the words all lanes brought: A_WORDS, then B_WORDS, then eight f32. Every product is exact in
// f32; the sixteen are added up, k ascending, and their sum to c. The result takes the place of the first eight values.
namespace hk {
using Index = int (*)(int, int);
// A pair of f16 as the operation reads it: subnormal ones are zero, with their sign, where the launch says so.
static __forceinline__ unsigned read(unsigned pair) {
    if (!block.flush_f16) return pair;
    const unsigned low = pair & 0x7c00u ? 0xffffu : 0x8000u, high = pair & 0x7c000000u ? 0xffff0000u : 0x80000000u;
    return pair & (low | high);
}
template <int COUNT, Index LINE, Index K>
static __forceinline__ void operand(const Wave& w, int p, int first, float (&to)[WAVE / 2][WAVE / 2]) {
    for (int i = 0; i < COUNT; ++i)
        for (int l = 0; l < (int)WAVE; ++l) {
            const unsigned word = __builtin_bit_cast(unsigned, w.lanes[p][first + i][l]);
            unpack_f16(read(word), to[K(2 * i, l)][LINE(2 * i, l)], to[K(2 * i + 1, l)][LINE(2 * i + 1, l)]);
            // What two lanes hold must be the same: the hardware does not say whose it takes.
            const bool twice = COUNT == 8 && l >= 16;
            if (twice && __builtin_bit_cast(unsigned, w.lanes[p][first + i][l - 16]) != word)
                to[K(2 * i, l)][LINE(2 * i, l)] = __builtin_nanf("");
        }
}
template <Index ROW, Index COL>
static void multiply(Wave& w, int p) {
    constexpr int A = fragment::A_WORDS, B = fragment::B_WORDS;
    float a[16][16], b[16][16], c[16][16], sum[16][16] = {};  // a is [k][row]
    operand<A, fragment::a_row, fragment::a_k>(w, p, 0, a);
    operand<B, fragment::b_col, fragment::b_k>(w, p, A, b);
    for (int i = 0; i < 8; ++i)
        for (int l = 0; l < (int)WAVE; ++l) c[ROW(i, l)][COL(i, l)] = w.lanes[p][A + B + i][l];
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 16; ++k)
            for (int j = 0; j < 16; ++j) sum[i][j] += a[k][i] * b[k][j];
    for (int i = 0; i < 8; ++i)
        for (int l = 0; l < (int)WAVE; ++l) w.lanes[p][i][l] = c[ROW(i, l)][COL(i, l)] + sum[ROW(i, l)][COL(i, l)];
}
static __attribute__((noinline)) void matrix_op(float (&c)[8], const FragA& a, const FragB& b, const At& at,
                                                void (*combine)(Wave&, int)) {  // a call: a kernel has hundreds
    constexpr int A = fragment::A_WORDS, B = fragment::B_WORDS;
    float given[A + B + 8];
    for (int i = 0; i < A; ++i) given[i] = __builtin_bit_cast(float, a.word[i]);
    for (int i = 0; i < B; ++i) given[A + i] = __builtin_bit_cast(float, b.word[i]);
    for (int i = 0; i < 8; ++i) given[A + B + i] = c[i];
    const int parity = wave_op(given, at, combine);
    for (int i = 0; i < 8; ++i) c[i] = block.waves[::wave()].lanes[parity][i][::lane()];
}
}  // namespace hk

// c += a b, by all 32 lanes.
__device__ __forceinline__ void mma(Acc& c, const FragA& a, const FragB& b, hk::At at = hk::here()) {
    hk::matrix_op(c.x, a, b, at, hk::multiply<fragment::acc_row, fragment::acc_col>);
}
__device__ __forceinline__ void mma(AccT& c, const FragA& a, const FragB& b, hk::At at = hk::here()) {
    hk::matrix_op(c.x, a, b, at, hk::multiply<fragment::acct_row, fragment::acct_col>);
}

{% include "matrix_terms.h" %}

// The fragment is complete here: what makes it is not moved behind, where its operands would have to stay in registers.
__device__ __forceinline__ void complete(Acc&) {}

// An AccT as a B operand: its columns stay columns, its rows become k.
// On NVIDIA each word is an 8x8 block to transpose.
__device__ __forceinline__ FragB b_of(const unsigned (&pairs)[4], hk::At at = hk::here()) {
    FragB b;
    if constexpr (fragment::COL_SLOTS == 1) {
        operand_of(pairs, b.word);
    } else {
        float given[4];
        for (int i = 0; i < 4; ++i) given[i] = __builtin_bit_cast(float, pairs[i]);
        const int parity = hk::wave_op(given, at, [](hk::Wave&, int) {});
        for (int i = 0; i < 4; ++i) {
            const float* lanes = hk::block.waves[wave()].lanes[parity][i];
            const auto word = [lanes](int l) { return __builtin_bit_cast(unsigned, lanes[l]); };
            // Column `group` of rows 2 (l % 4), + 1.
            const int group = lane() >> 2, from = 8 * (lane() & 3) + group / 2;
            b.word[i] = group & 1 ? high_halves(word(from), word(from + 4)) : low_halves(word(from), word(from + 4));
        }
    }
    return b;
}

// A[row0 .. + 15][k0 .. + 15] from a tile [row][k]; B[k0 .. + 15][col0 .. + 15] from a tile [column][k].
template <int CHUNKS>
__device__ __forceinline__ void load_a(FragA& a, const Chunk* tile, int row0, int k0) {
    for (int w = 0; w < fragment::A_WORDS; ++w) {
        const int row = row0 + fragment::a_row(2 * w, lane()), k = k0 + fragment::a_k(2 * w, lane());
        a.word[w] = ((const unsigned*)tile)[tile_word<CHUNKS>(row, k)];
    }
}
template <int CHUNKS>
__device__ __forceinline__ void load_b(FragB& b, const Chunk* tile, int col0, int k0) {
    for (int w = 0; w < fragment::B_WORDS; ++w) {
        const int column = col0 + fragment::b_col(2 * w, lane()), k = k0 + fragment::b_k(2 * w, lane());
        b.word[w] = ((const unsigned*)tile)[tile_word<CHUNKS>(column, k)];
    }
}

// Two B fragments from a tile [k][column]: 16 k x 32 columns.
// Column c of fragment f is column pair_col(f, c) of the 32.
__device__ __forceinline__ int pair_col(int f, int c) { return 2 * c + f; }
template <int CHUNKS>
__device__ __forceinline__ void load_b_pair(FragB (&b)[2], const Chunk* tile, int k0, int col0) {
    const unsigned* words = (const unsigned*)tile;
    for (int w = 0; w < fragment::B_WORDS; ++w) {
        const int k = k0 + fragment::b_k(2 * w, lane()), column = col0 + 2 * fragment::b_col(2 * w, lane());
        const unsigned x = words[tile_word<CHUNKS>(k, column)], y = words[tile_word<CHUNKS>(k + 1, column)];
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

// Copies that are on their way, as late as they may be: nothing arrives before it is waited for, and what is
// read before is NaN.
namespace hk {
constexpr int COPIES = 64;
struct Copies {
    unsigned first, next, group;  // none are pending when a block starts: these are what is cleared
    struct {
        Chunk* to;
        const void* from;
        unsigned group;
    } pending[COPIES];
};
static_assert(sizeof(Copies) <= OWN_BYTES && __builtin_offsetof(Copies, pending) <= OWN_CLEARED, "see Workspace::own");

static Copies& own_copies() { return *(Copies*)block.own[block.current]; }
static void arrive(Copies& c) {
    const auto& copy = c.pending[c.first++ % COPIES];
    if (copy.from)
        __builtin_memcpy(copy.to, copy.from, 16);
    else
        __builtin_memset(copy.to, 0, 16);
}
}  // namespace hk

// Copy 16 bytes from global memory to LDS, zeros where not `valid`; `from` must be readable all the same. Asynchronous
// where the hardware can: they have arrived after copies_done, for the other threads after a block_sync behind that.
__device__ __forceinline__ void copy_16(Chunk* to, const void* from, bool valid) {
    hk::Copies& c = hk::own_copies();
    if (c.next - c.first == hk::COPIES) hk::arrive(c);
    __builtin_memset(to, 0xff, 16);
    c.pending[c.next++ % hk::COPIES] = {to, valid ? from : nullptr, c.group};
}
__device__ __forceinline__ void copies_commit() { ++hk::own_copies().group; }
template <int PENDING>
__device__ __forceinline__ void copies_done() {
    hk::Copies& c = hk::own_copies();
    while (c.first != c.next && (int)(c.group - c.pending[c.first % hk::COPIES].group) > PENDING) hk::arrive(c);
}
