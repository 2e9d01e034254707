// Dialect: NVIDIA through NVRTC, no CUDA header needed. A warp has the 32 lanes of a wave32.
#define SHARED(type, name, count, offset) __shared__ type name[count]
#define SHARED_ALIGNED(align, type, name, count, offset) __shared__ __align__(align) type name[count]

__device__ __forceinline__ int thread() { return threadIdx.x; }
__device__ __forceinline__ int lane() { return threadIdx.x & 31; }
__device__ __forceinline__ int wave() { return threadIdx.x >> 5; }
__device__ __forceinline__ int block_x() { return blockIdx.x; }
__device__ __forceinline__ int block_y() { return blockIdx.y; }
__device__ __forceinline__ int block_z() { return blockIdx.z; }

// All threads of the block arrive; shared memory written before is visible after.
__device__ __forceinline__ void block_sync() { __syncthreads(); }

// The value that lane (lane ^ MASK) holds.
template <int MASK>
__device__ __forceinline__ float lane_xor(float x) {
    return __shfl_xor_sync(0xffffffffu, x, MASK);
}

__device__ __forceinline__ float fma_f32(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ float max_f32(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float min_f32(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ float abs_f32(float a) { return fabsf(a); }
__device__ __forceinline__ float rint_f32(float a) { return rintf(a); }
__device__ __forceinline__ float exp2_f32(float x) {  // MUFU.EX2; ftz spares the scaling of subnormal results
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float f16_to_f32(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
// The bits go through a 32-bit register on purpose. From a 16-bit one ptxas 13.0 takes a byte of them by F2I.U8.F16,
// the number rounded to an integer instead of its bits; seen on an H200 as wrong scales in the KV cache.
__device__ __forceinline__ unsigned short f32_to_f16(float x) {
    unsigned bits;
    asm("{ .reg .b16 h, z; mov.b16 z, 0; cvt.rn.f16.f32 h, %1; mov.b32 %0, {h, z}; }" : "=r"(bits) : "f"(x));
    return (unsigned short)bits;
}

// A Q8_0 block starts at an even address, no more: wider loads are made of aligned words.
__device__ __forceinline__ unsigned short load_u16(const unsigned char* p) {
    return *(const unsigned short*)(const void*)p;
}
__device__ __forceinline__ void store_u16(unsigned char* p, unsigned short w) { *(unsigned short*)(void*)p = w; }

// Four codes as floats. The byte with its sign bit flipped is the unsigned number code + 128; as the low byte of
// 0x4B000000 it is the float 2^23 + code + 128, and the subtraction is exact. One permute and one add a code, where a
// conversion instruction runs at a quarter of that rate.
__device__ __forceinline__ void codes_of_word(unsigned word, float* code) {
    const unsigned flipped = word ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        code[i] = __uint_as_float(__byte_perm(flipped, 0x4B000000u, 0x7440 + i)) - 8388736.0f;
}

// COUNT (1, 2, 4 or 8) int8 codes as they lie in memory, from an even address (any for COUNT 1). Four and more are
// kept as the aligned words they lie in, the last one being the word of the last byte, never one behind it.
template <int COUNT>
struct Codes {
    unsigned word[COUNT < 4 ? 1 : COUNT / 4 + 1], shift;
};

template <int COUNT>
__device__ __forceinline__ Codes<COUNT> fetch_codes(const unsigned char* p) {
    Codes<COUNT> codes;
    if constexpr (COUNT == 1) {
        codes.word[0] = p[0];
    } else if constexpr (COUNT == 2) {
        codes.word[0] = load_u16(p);
    } else {
        const unsigned odd = (unsigned)(unsigned long long)p & 2;
        const unsigned* words = (const unsigned*)(const void*)(p - odd);
#pragma unroll
        for (int i = 0; i < COUNT / 4; ++i) codes.word[i] = words[i];
        codes.word[COUNT / 4] = words[COUNT / 4 - 1 + odd / 2];
        codes.shift = 8 * odd;
    }
    return codes;
}

template <int COUNT>
__device__ __forceinline__ void unpack_codes(const Codes<COUNT>& codes, float (&code)[COUNT]) {
    if constexpr (COUNT < 4) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) code[i] = (float)(signed char)(codes.word[0] >> (8 * i) & 0xff);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT / 4; ++i)
            codes_of_word(__funnelshift_r(codes.word[i], codes.word[i + 1], codes.shift), code + 4 * i);
    }
}
