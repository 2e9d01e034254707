// Reductions over the 32 lanes of a wave, built on lane_xor. Every dialect that has lane_xor shares them.
// The tree is fixed, xor 16, 8, 4, 2, 1: a sum has the same bits in every kernel and on every device.

__device__ __forceinline__ float wave_sum(float x) {
    x += lane_xor<16>(x);
    x += lane_xor<8>(x);
    x += lane_xor<4>(x);
    x += lane_xor<2>(x);
    return x + lane_xor<1>(x);
}

__device__ __forceinline__ float wave_max(float x) {
    x = max_f32(x, lane_xor<16>(x));
    x = max_f32(x, lane_xor<8>(x));
    x = max_f32(x, lane_xor<4>(x));
    x = max_f32(x, lane_xor<2>(x));
    return max_f32(x, lane_xor<1>(x));
}

// One halving step: the lanes whose MASK bit is set keep the upper half of x, the others the lower, and each adds
// what its partner held of the half it keeps.
template <int MASK, int COUNT>
__device__ __forceinline__ float wave_sum_step(const float (&x)[COUNT]) {
    if constexpr (COUNT == 1) {
        const float s = x[0] + lane_xor<MASK>(x[0]);
        if constexpr (MASK == 1) return s;
        else {
            const float one[1] = {s};
            return wave_sum_step<MASK / 2>(one);
        }
    } else {
        const bool upper = (lane() & MASK) != 0;
        float kept[COUNT / 2];
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const float keep = upper ? x[COUNT / 2 + i] : x[i];
            const float give = upper ? x[i] : x[COUNT / 2 + i];
            kept[i] = keep + lane_xor<MASK>(give);
        }
        return wave_sum_step<MASK / 2>(kept);
    }
}

// COUNT (a power of two) sums at once: lane l receives the sum over the wave of x[l * COUNT / 32].
// 8 sums take 4 + 2 + 1 + 1 + 1 = 9 exchanges instead of 40, in the same tree as wave_sum.
template <int COUNT>
__device__ __forceinline__ float wave_sum_scatter(const float (&x)[COUNT]) {
    return wave_sum_step<16>(x);
}
