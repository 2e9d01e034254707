// More words on NVIDIA: the transcendental unit, bits, exchanges and votes of a warp, atomics, wide accesses.

__device__ __forceinline__ unsigned f32_to_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float bits_to_f32(unsigned bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float sqrt_f32(float x) { return __fsqrt_rn(x); }
__device__ __forceinline__ float floor_f32(float x) { return floorf(x); }

// One instruction each. A subnormal number is zero to these.
__device__ __forceinline__ float rcp_f32(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float rsqrt_f32(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_f32(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// PTX takes radians, of which the unit makes turns again.
__device__ __forceinline__ float sin_of_turns(float x) {
    float y;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 6.28318530717958648f));
    return y;
}
__device__ __forceinline__ float cos_of_turns(float x) {
    float y;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 6.28318530717958648f));
    return y;
}

// bf16 as its bits, rounded to nearest, ties to even; a NaN stays one.
__device__ __forceinline__ unsigned short f32_to_bf16(float x) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
    return (unsigned short)pair;
}

__device__ __forceinline__ int popcount_u32(unsigned x) { return __popc(x); }
__device__ __forceinline__ int clz_u32(unsigned x) { return __clz((int)x); }
__device__ __forceinline__ int ctz_u32(unsigned x) { return __clz((int)__brev(x)); }
__device__ __forceinline__ unsigned reverse_bits_u32(unsigned x) { return __brev(x); }

// Byte i of the result is the one that digit i of SELECT names: 0 to 3 of low, 4 to 7 of high.
template <unsigned SELECT>
__device__ __forceinline__ unsigned byte_perm(unsigned low, unsigned high) {
    static_assert((SELECT & ~0x7777u) == 0, "byte_perm takes four digits from 0 to 7: byte_perm<0x5410>(low, high)");
    return __byte_perm(low, high, SELECT);
}

// The value of another lane, each its own; its index counts modulo 32.
template <class T>
__device__ __forceinline__ T lane_get(T x, int from) {
    static_assert(sizeof(T) == 4, "lanes exchange values of 4 bytes");
    return __shfl_sync(0xffffffffu, x, from);
}

// The value of one lane, the same for all.
template <class T>
__device__ __forceinline__ T lane_get_uniform(T x, int from) {
    return lane_get(x, from);
}

// What the lane COUNT below holds, in a row of 16 lanes; 0 in the first COUNT.
template <int COUNT, class T>
__device__ __forceinline__ T row_up(T x) {
    const T below = __shfl_up_sync(0xffffffffu, x, COUNT, 16);
    return (lane() & 15) < COUNT ? T(0) : below;
}

__device__ __forceinline__ unsigned wave_ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
__device__ __forceinline__ bool wave_any(bool x) { return __any_sync(0xffffffffu, x) != 0; }
__device__ __forceinline__ bool wave_all(bool x) { return __all_sync(0xffffffffu, x) != 0; }

// *p += x for all threads of the device; what was there before. Sums of f32 depend on an order that nobody knows.
__device__ __forceinline__ int atomic_add(int* p, int x) { return atomicAdd(p, x); }
__device__ __forceinline__ float atomic_add(float* p, float x) { return atomicAdd(p, x); }

// What one access moves: a number, or words side by side. Of a struct of small elements ptxas would move each alone.
template <int BYTES>
struct alignas(BYTES) Access {
    unsigned word[BYTES / 4];
};
template <>
struct Access<2> {
    unsigned short half;
};
template <>
struct Access<1> {
    unsigned char byte;
};

// COUNT elements by one access, or by as many as an address that is a multiple of ALIGN alone takes here.
template <int COUNT, int ALIGN = 0, class T>
__device__ __forceinline__ Vec<T, COUNT> load_vec(const T* p) {
    constexpr int EACH = VecAlign<T, COUNT, ALIGN>::VALUE;
    Access<EACH> parts[sizeof(T) * COUNT / EACH];
#pragma unroll
    for (int i = 0; i < (int)sizeof(T) * COUNT / EACH; ++i) parts[i] = ((const Access<EACH>*)(const void*)p)[i];
    Vec<T, COUNT> v;
    memcpy(&v, parts, sizeof(v));
    return v;
}
template <int ALIGN = 0, class T, int COUNT>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, COUNT>& v) {
    constexpr int EACH = VecAlign<T, COUNT, ALIGN>::VALUE;
    Access<EACH> parts[sizeof(T) * COUNT / EACH];
    memcpy(parts, &v, sizeof(v));
#pragma unroll
    for (int i = 0; i < (int)sizeof(T) * COUNT / EACH; ++i) ((Access<EACH>*)(void*)p)[i] = parts[i];
}
