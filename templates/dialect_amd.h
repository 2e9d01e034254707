// Dialect: AMD gfx11 and gfx12 in wave32, for clang with no HIP headers and for hiprtc.
#ifndef __HIPCC_RTC__  // hiprtc brings these words itself; an offline clang needs them spelled out.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#endif
#define SHARED(type, name, count, offset) __shared__ type name[count]
#define SHARED_ALIGNED(align, type, name, count, offset) __shared__ __attribute__((aligned(align))) type name[count]

// Thread identity. The wave index is made scalar, so that what depends on it stays in SGPRs.
__device__ __forceinline__ int thread() { return __builtin_amdgcn_workitem_id_x(); }
__device__ __forceinline__ int lane() { return thread() & 31; }
__device__ __forceinline__ int wave() { return __builtin_amdgcn_readfirstlane(thread() >> 5); }
__device__ __forceinline__ int block_x() { return __builtin_amdgcn_workgroup_id_x(); }
__device__ __forceinline__ int block_y() { return __builtin_amdgcn_workgroup_id_y(); }
__device__ __forceinline__ int block_z() { return __builtin_amdgcn_workgroup_id_z(); }

// All threads of the block arrive; LDS written before is visible after. A one-wave block costs no s_barrier.
__device__ __forceinline__ void block_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// The value that lane (lane ^ MASK) holds. Within a row of 16 lanes it is a modifier of the next VALU instruction.
template <int MASK>
__device__ __forceinline__ float lane_xor(float x) {
    const int bits = __builtin_bit_cast(int, x);
    if constexpr (MASK == 16)
        return __builtin_bit_cast(float,
                                  __builtin_amdgcn_permlanex16(bits, bits, 0x76543210, 0xfedcba98, false, false));
    else
        return __builtin_bit_cast(float, __builtin_amdgcn_update_dpp(bits, bits, 0x160 | MASK, 0xf, 0xf, true));
}

__device__ __forceinline__ float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__device__ __forceinline__ float max_f32(float a, float b) { return __builtin_fmaxf(a, b); }
__device__ __forceinline__ float min_f32(float a, float b) { return __builtin_fminf(a, b); }
__device__ __forceinline__ float abs_f32(float a) { return __builtin_fabsf(a); }
__device__ __forceinline__ float rint_f32(float a) { return __builtin_rintf(a); }
__device__ __forceinline__ float exp2_f32(float x) { return __builtin_amdgcn_exp2f(x); }  // v_exp_f32

__device__ __forceinline__ float f16_to_f32(unsigned short bits) { return (float)__builtin_bit_cast(_Float16, bits); }
__device__ __forceinline__ unsigned short f32_to_f16(float x) {
    return __builtin_bit_cast(unsigned short, (_Float16)x);
}

// Unaligned loads: global memory on these archs takes any address.
__device__ __forceinline__ unsigned short load_u16(const unsigned char* p) {
    unsigned short w;
    __builtin_memcpy(&w, p, 2);
    return w;
}
__device__ __forceinline__ void store_u16(unsigned char* p, unsigned short w) { __builtin_memcpy(p, &w, 2); }

// COUNT (1, 2, 4 or 8) int8 codes as they lie in memory, from any address; in words, which stay in registers.
template <int COUNT>
struct Codes {
    unsigned word[(COUNT + 3) / 4];
};

template <int COUNT>
__device__ __forceinline__ Codes<COUNT> fetch_codes(const unsigned char* p) {
    Codes<COUNT> codes;
    codes.word[0] = 0;
    __builtin_memcpy(codes.word, p, COUNT);
    return codes;
}

// Flipping the sign bit makes a code the unsigned number code + 128, which one v_cvt_f32_ubyteN converts;
// subtracting 128 is exact.
template <int COUNT>
__device__ __forceinline__ void unpack_codes(const Codes<COUNT>& codes, float (&code)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        code[i] = (float)((codes.word[i / 4] ^ 0x80808080u) >> (8 * (i % 4)) & 0xff) - 128.0f;
}
