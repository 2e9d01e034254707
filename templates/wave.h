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

// The row of a group of `count` (a power of two) that lane l ends up with in wave_sum_rows.
__device__ __forceinline__ int first_row_of(int l, int count) { return l * count / 32; }

template <int MASK, int COUNT>
__device__ __forceinline__ float wave_sum_rows_step(const float (&x)[COUNT]) {
    constexpr int HALF = COUNT > 1 ? COUNT / 2 : 1;
    float kept[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) kept[i] = x[i] + lane_xor<MASK>(x[COUNT > 1 ? HALF + i : 0]);
    if constexpr (MASK == 1)
        return kept[0];
    else
        return wave_sum_rows_step<MASK / 2>(kept);
}

// COUNT (a power of two) sums at once. Register i of lane l holds the lane's part of row i ^ first_row_of(l): then
// the half that a lane gives away is the same registers in every lane, and no select is needed. Lane l receives the
// sum of row first_row_of(l), in the tree of wave_sum. 8 sums take 4 + 2 + 1 + 1 + 1 = 9 exchanges instead of 40.
template <int COUNT>
__device__ __forceinline__ float wave_sum_rows(const float (&x)[COUNT]) {
    return wave_sum_rows_step<16>(x);
}

// The sum of the lanes up to each, its own with it: rows of 16 lanes by steps of 1, 2, 4, 8, then the first row's sum
// onto the second.
template <class T>
__device__ __forceinline__ T wave_scan_sum(T x) {
    x += row_up<1>(x);
    x += row_up<2>(x);
    x += row_up<4>(x);
    x += row_up<8>(x);
    const T first = lane_get_uniform(x, 15);
    return lane() < 16 ? x : x + first;
}

// The sum of the lanes before each.
template <class T>
__device__ __forceinline__ T wave_scan_sum_exclusive(T x) {
    const T sum = wave_scan_sum(x), before = row_up<1>(sum), first = lane_get_uniform(sum, 15);
    return lane() == 16 ? first : before;
}
