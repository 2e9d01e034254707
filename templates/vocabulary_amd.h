// More words on AMD: the transcendental unit, bits, exchanges and votes of a wave, atomics, wide accesses.

__device__ __forceinline__ unsigned f32_to_bits(float x) { return __builtin_bit_cast(unsigned, x); }
__device__ __forceinline__ float bits_to_f32(unsigned bits) { return __builtin_bit_cast(float, bits); }

__device__ __forceinline__ float sqrt_f32(float x) { return __builtin_sqrtf(x); }  // v_sqrt_f32 and what rounds it
__device__ __forceinline__ float floor_f32(float x) { return __builtin_floorf(x); }

// One instruction each. A subnormal number is zero to these.
__device__ __forceinline__ float rcp_f32(float x) { return __builtin_amdgcn_rcpf(x); }
__device__ __forceinline__ float rsqrt_f32(float x) { return __builtin_amdgcn_rsqf(x); }
__device__ __forceinline__ float log2_f32(float x) { return __builtin_amdgcn_logf(x); }
__device__ __forceinline__ float sin_of_turns(float x) { return __builtin_amdgcn_sinf(x); }
__device__ __forceinline__ float cos_of_turns(float x) { return __builtin_amdgcn_cosf(x); }

__device__ __forceinline__ int popcount_u32(unsigned x) { return __builtin_popcount(x); }
__device__ __forceinline__ int clz_u32(unsigned x) { return x ? __builtin_clz(x) : 32; }
__device__ __forceinline__ int ctz_u32(unsigned x) { return x ? __builtin_ctz(x) : 32; }
__device__ __forceinline__ unsigned reverse_bits_u32(unsigned x) { return __builtin_bitreverse32(x); }

// Byte i of the result is the one that digit i of SELECT names: 0 to 3 of low, 4 to 7 of high.
template <unsigned SELECT>
__device__ __forceinline__ unsigned byte_perm(unsigned low, unsigned high) {
    static_assert((SELECT & ~0x7777u) == 0, "byte_perm takes four digits from 0 to 7: byte_perm<0x5410>(low, high)");
    constexpr unsigned BYTES = (SELECT & 7) | (SELECT & 0x70) << 4 | (SELECT & 0x700) << 8 | (SELECT & 0x7000) << 12;
    return __builtin_amdgcn_perm(high, low, BYTES);
}

// The value of another lane, each its own; its index counts modulo 32. Through the LDS unit, without any LDS.
template <class T>
__device__ __forceinline__ T lane_get(T x, int from) {
    static_assert(sizeof(T) == 4, "lanes exchange values of 4 bytes");
    return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(4 * from, __builtin_bit_cast(int, x)));
}

// The value of one lane, the same for all. It comes out in a scalar register.
template <class T>
__device__ __forceinline__ T lane_get_uniform(T x, int from) {
    static_assert(sizeof(T) == 4, "lanes exchange values of 4 bytes");
    return __builtin_bit_cast(T, __builtin_amdgcn_readlane(__builtin_bit_cast(int, x), from));
}

// What the lane COUNT below holds, in a row of 16 lanes; 0 in the first COUNT. A modifier of the next VALU instruction.
template <int COUNT, class T>
__device__ __forceinline__ T row_up(T x) {
    const int bits = __builtin_bit_cast(int, x);
    return __builtin_bit_cast(T, __builtin_amdgcn_update_dpp(0, bits, 0x110 | COUNT, 0xf, 0xf, true));
}

__device__ __forceinline__ unsigned wave_ballot(bool x) { return __builtin_amdgcn_ballot_w32(x); }
__device__ __forceinline__ bool wave_any(bool x) { return wave_ballot(x) != 0; }
__device__ __forceinline__ bool wave_all(bool x) { return wave_ballot(x) == 0xffffffffu; }

// *p += x for all threads of the device; what was there before. Sums of f32 depend on an order that nobody knows.
__device__ __forceinline__ int atomic_add(int* p, int x) {
    return __hip_atomic_fetch_add(p, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// By built-in: of an atomicrmw some compilers make a loop. Which memory it is they know before they choose.
__device__ __forceinline__ float atomic_add(float* p, float x) {
    typedef __attribute__((address_space(1))) float* Global;
    typedef __attribute__((address_space(3))) float* Local;
    if (__builtin_amdgcn_is_shared(p)) return __builtin_amdgcn_ds_faddf((Local)p, x, 0, 0, false);
    return __builtin_amdgcn_global_atomic_fadd_f32((Global)p, x);
}

// What one access moves, as the compiler must see it: of a memcpy it forgets what the address is a multiple of.
template <int BYTES, int ALIGN>
struct Access {
    typedef unsigned char Type __attribute__((ext_vector_type(BYTES), aligned(ALIGN), may_alias));
};

// COUNT elements by one access. Global memory takes any address here, LDS one that is a multiple of the bytes.
template <int COUNT, int ALIGN = 0, class T>
__device__ __forceinline__ Vec<T, COUNT> load_vec(const T* p) {
    typedef typename Access<sizeof(T) * COUNT, VecAlign<T, COUNT, ALIGN>::VALUE>::Type Type;
    return __builtin_bit_cast(Vec<T, COUNT>, *(const Type*)(const void*)p);
}
template <int ALIGN = 0, class T, int COUNT>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, COUNT>& v) {
    typedef typename Access<sizeof(T) * COUNT, VecAlign<T, COUNT, ALIGN>::VALUE>::Type Type;
    *(Type*)(void*)p = __builtin_bit_cast(Type, v);
}
