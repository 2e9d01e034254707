// Words that are the same text in every dialect.

__device__ __forceinline__ int min_i32(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int max_i32(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ unsigned min_u32(unsigned a, unsigned b) { return a < b ? a : b; }
__device__ __forceinline__ unsigned max_u32(unsigned a, unsigned b) { return a > b ? a : b; }
__device__ __forceinline__ int clamp_i32(int x, int low, int high) { return min_i32(max_i32(x, low), high); }
__device__ __forceinline__ float clamp_f32(float x, float low, float high) { return min_f32(max_f32(x, low), high); }

// The upper 32 bits of the product.
__device__ __forceinline__ int mul_hi_i32(int a, int b) { return (int)((long long)a * b >> 32); }
__device__ __forceinline__ unsigned mul_hi_u32(unsigned a, unsigned b) {
    return (unsigned)((unsigned long long)a * b >> 32);
}

// An angle in turns, less the nearest whole number of them. 1 / (2 pi) is taken in two terms, so that a large angle
// keeps the places behind the point.
__device__ __forceinline__ float turns_of(float x) {
    constexpr float FIRST = 0x1.45f306p-3f, SECOND = 0x1.b9391p-28f;
    return fma_f32(x, SECOND, fma_f32(x, FIRST, -rint_f32(x * FIRST)));
}
__device__ __forceinline__ float sin_f32(float x) { return sin_of_turns(turns_of(x)); }
__device__ __forceinline__ float cos_f32(float x) { return cos_of_turns(turns_of(x)); }

// Up to where the result is a half by a polynomial, which has no difference of nearly equal numbers; its coefficients
// are a minimax fit of (tanh(x) / x - 1) / x^2. From there on 1 - 2 / (exp(2 x) + 1).
__device__ __forceinline__ float tanh_f32(float x) {
    const float size = abs_f32(x), square = x * x;
    float p = fma_f32(square, 0.0164375771f, -0.0526718128f);
    p = fma_f32(square, p, 0.133207248f);
    p = fma_f32(square, p, -0.333329475f);
    const float near = fma_f32(size * square, p, size);
    const float far = fma_f32(-2.0f, rcp_f32(exp2_f32(size * 2.88539008f) + 1.0f), 1.0f);
    return bits_to_f32(f32_to_bits(size < 0.55f ? near : far) | (f32_to_bits(x) & 0x80000000u));
}

// bf16 as its bits: the upper half of a f32.
__device__ __forceinline__ float bf16_to_f32(unsigned short bits) { return bits_to_f32((unsigned)bits << 16); }
{% if dialect != "nvidia" %}
// Rounded to nearest, ties to even; a NaN stays one.
__device__ __forceinline__ unsigned short f32_to_bf16(float x) {
    const unsigned bits = f32_to_bits(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (unsigned short)((x == x ? rounded : bits | 0x400000) >> 16);
}
{% endif %}
