// More words on the CPU. What the GPUs' units do with subnormal numbers, they do too; what no wave may do is an error.
extern "C" {
float log2f(float);
float sinf(float);
float cosf(float);
}

__device__ __forceinline__ unsigned f32_to_bits(float x) { return __builtin_bit_cast(unsigned, x); }
__device__ __forceinline__ float bits_to_f32(unsigned bits) { return __builtin_bit_cast(float, bits); }

__device__ __forceinline__ float sqrt_f32(float x) { return __builtin_sqrtf(x); }
__device__ __forceinline__ float floor_f32(float x) { return __builtin_floorf(x); }

// A subnormal number is zero to these, as it comes and as it goes.
namespace hk {
static inline float normal(float x) { return abs_f32(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
}  // namespace hk
__device__ __forceinline__ float rcp_f32(float x) { return hk::normal(1.0f / hk::normal(x)); }
__device__ __forceinline__ float rsqrt_f32(float x) { return 1.0f / __builtin_sqrtf(hk::normal(x)); }
__device__ __forceinline__ float log2_f32(float x) { return log2f(hk::normal(x)); }
__device__ __forceinline__ float sin_of_turns(float x) { return sinf(x * 6.28318530717958648f); }
__device__ __forceinline__ float cos_of_turns(float x) { return cosf(x * 6.28318530717958648f); }

__device__ __forceinline__ int popcount_u32(unsigned x) { return __builtin_popcount(x); }
__device__ __forceinline__ int clz_u32(unsigned x) { return x ? __builtin_clz(x) : 32; }
__device__ __forceinline__ int ctz_u32(unsigned x) { return x ? __builtin_ctz(x) : 32; }
__device__ __forceinline__ unsigned reverse_bits_u32(unsigned x) { return __builtin_bitreverse32(x); }

// Byte i of the result is the one that digit i of SELECT names: 0 to 3 of low, 4 to 7 of high.
template <unsigned SELECT>
__device__ __forceinline__ unsigned byte_perm(unsigned low, unsigned high) {
    static_assert((SELECT & ~0x7777u) == 0, "byte_perm takes four digits from 0 to 7: byte_perm<0x5410>(low, high)");
    const unsigned long long both = (unsigned long long)high << 32 | low;
    unsigned picked = 0;
    for (int i = 0; i < 4; ++i) picked |= (unsigned)(both >> 8 * (SELECT >> 4 * i & 7) & 0xff) << 8 * i;
    return picked;
}

// ---- what a wave does together ---------------------------------------------------------------------------------

namespace hk {
template <class T>
static __forceinline__ float as_lane(T x) {
    static_assert(sizeof(T) == 4, "lanes exchange values of 4 bytes");
    return __builtin_bit_cast(float, x);
}

static __attribute__((noinline, unused)) float lane_of(float x, int from, const At& at) {
    const float one[1] = {x};
    const int parity = wave_op(one, at, [](Wave&, int) {});
    return block.waves[block.current / WAVE].lanes[parity][0][from & (WAVE - 1)];
}

static __attribute__((noinline, unused)) float lane_of_all(float x, int from, const At& at) {
    const float two[2] = {x, as_lane(from)};
    const int parity = wave_op(two, at, [&at](Wave& w, int p) {
        for (unsigned l = 1; l < WAVE; ++l)
            if (__builtin_memcmp(&w.lanes[p][1][l], &w.lanes[p][1][0], 4)) fail(LANES_DIFFER, at, at);
    });
    return block.waves[block.current / WAVE].lanes[parity][0][from & (WAVE - 1)];
}

static __attribute__((noinline, unused)) unsigned ballot(bool x, const At& at) {
    const float one[1] = {as_lane((int)x)};
    const int parity = wave_op(one, at, [](Wave& w, int p) {
        unsigned votes = 0;
        for (unsigned l = 0; l < WAVE; ++l) votes |= __builtin_bit_cast(unsigned, w.lanes[p][0][l]) << l;
        w.result[p][0] = as_lane(votes);
    });
    return __builtin_bit_cast(unsigned, block.waves[block.current / WAVE].result[parity][0]);
}

// The sums up to each lane, with or without its own, in the order of wave.h: rows of 16 lanes by steps of 1, 2, 4, 8,
// then the first row's sum onto the second.
template <class T>
static __attribute__((noinline, unused)) T scan(T x, bool own, const At& at) {
    const float one[1] = {as_lane(x)};
    const int parity = wave_op(one, at, [own](Wave& w, int p) {
        T sums[WAVE];
        for (unsigned l = 0; l < WAVE; ++l) sums[l] = __builtin_bit_cast(T, w.lanes[p][0][l]);
        for (unsigned step = 1; step < 16; step *= 2)
            for (unsigned l = WAVE; l-- > 0;) sums[l] += l % 16 < step ? T(0) : sums[l - step];
        for (unsigned l = 16; l < WAVE; ++l) sums[l] += sums[15];
        for (unsigned l = 0; l < WAVE; ++l) w.result[p][l] = as_lane(own ? sums[l] : l ? sums[l - 1] : T(0));
    });
    return __builtin_bit_cast(T, block.waves[block.current / WAVE].result[parity][block.current % WAVE]);
}
}  // namespace hk

// The value of another lane, each its own; its index counts modulo 32.
template <class T>
__device__ __forceinline__ T lane_get(T x, int from, hk::At at = hk::here()) {
    return __builtin_bit_cast(T, hk::lane_of(hk::as_lane(x), from, at));
}

// The value of one lane, the same for all.
template <class T>
__device__ __forceinline__ T lane_get_uniform(T x, int from, hk::At at = hk::here()) {
    return __builtin_bit_cast(T, hk::lane_of_all(hk::as_lane(x), from, at));
}

template <class T>
__device__ __forceinline__ T wave_scan_sum(T x, hk::At at = hk::here()) {
    return hk::scan(x, true, at);
}
template <class T>
__device__ __forceinline__ T wave_scan_sum_exclusive(T x, hk::At at = hk::here()) {
    return hk::scan(x, false, at);
}

__device__ __forceinline__ unsigned wave_ballot(bool x, hk::At at = hk::here()) { return hk::ballot(x, at); }
__device__ __forceinline__ bool wave_any(bool x, hk::At at = hk::here()) { return hk::ballot(x, at) != 0; }
__device__ __forceinline__ bool wave_all(bool x, hk::At at = hk::here()) { return hk::ballot(x, at) == 0xffffffffu; }

// ---- memory ----------------------------------------------------------------------------------------------------

// *p += x for all threads of the device; what was there before. Sums of f32 depend on an order that nobody knows.
__device__ __forceinline__ int atomic_add(int* p, int x) { return __atomic_fetch_add(p, x, __ATOMIC_RELAXED); }
__device__ __forceinline__ float atomic_add(float* p, float x) {
    float before, after;
    __atomic_load(p, &before, __ATOMIC_RELAXED);
    do after = before + x;
    while (!__atomic_compare_exchange(p, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

namespace hk {
template <int BYTES>
static __forceinline__ void require_aligned(const void* p, const At& at) {
    if ((unsigned long long)p % BYTES) fail(MISALIGNED, at, {nullptr, BYTES});
}
}  // namespace hk

// COUNT elements by one access.
template <int COUNT, int ALIGN = 0, class T>
__device__ __forceinline__ Vec<T, COUNT> load_vec(const T* p, hk::At at = hk::here()) {
    hk::require_aligned<VecAlign<T, COUNT, ALIGN>::VALUE>(p, at);
    Vec<T, COUNT> v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
}
template <int ALIGN = 0, class T, int COUNT>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, COUNT>& v, hk::At at = hk::here()) {
    hk::require_aligned<VecAlign<T, COUNT, ALIGN>::VALUE>(p, at);
    __builtin_memcpy(p, &v, sizeof(v));
}
