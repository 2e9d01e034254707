// c += a b, where one of the two is a second term (split_f16). These products are LOW times too large and have a sum of
// their own, until add_low.
template <class C>
__device__ __forceinline__ void mma_low(C& c, C& low, const FragA& a, const FragB& b) {
    if constexpr (READS_SUBNORMALS)
        mma(c, a, b);
    else
        mma(low, a, b);
}
template <class C>
__device__ __forceinline__ void add_low(C& c, const C& low) {
    if constexpr (!READS_SUBNORMALS)
#pragma unroll
        for (int i = 0; i < 8; ++i) c.x[i] = fma_f32(low.x[i], 1.0f / LOW, c.x[i]);
}
