// Online softmax of queries as rows of Acc fragments, in base 2: scores come multiplied with log2(e). A lane keeps the
// statistics of its rows, `sum` only its own part, which the end adds up. A score that is no finite number makes the
// sum of its row NaN.

struct RowState {
    float m[fragment::ROW_SLOTS], sum[fragment::ROW_SLOTS];
};

__device__ __forceinline__ void row_state_start(RowState& state) {
#pragma unroll
    for (int r = 0; r < fragment::ROW_SLOTS; ++r) state.m[r] = NONE, state.sum[r] = 0.0f;
}

// Scores of 16 BLOCKS keys from first_key on become exponentials. The lane's row r sees the keys
// begin[r] .. end[r] - 1; `whole` says that all rows see all of these keys. What was accumulated before is to
// be multiplied with rescale.
template <int BLOCKS>
__device__ __forceinline__ void softmax_step(Acc (&s)[BLOCKS], RowState& state, int first_key, bool whole,
                                             const int (&begin)[fragment::ROW_SLOTS],
                                             const int (&end)[fragment::ROW_SLOTS],
                                             float (&rescale)[fragment::ROW_SLOTS]) {
    float top[fragment::ROW_SLOTS];
#pragma unroll
    for (int r = 0; r < fragment::ROW_SLOTS; ++r) top[r] = state.m[r];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int r = fragment::row_slot(i), key = first_key + 16 * b + fragment::acc_col(i, lane());
            if (!whole && (key < begin[r] || key >= end[r])) s[b].x[i] = HIDDEN;
            top[r] = max_f32(top[r], s[b].x[i]);
        }
    row_max(top);
#pragma unroll
    for (int r = 0; r < fragment::ROW_SLOTS; ++r) {
        rescale[r] = exp2_f32(state.m[r] - top[r]);
        state.m[r] = top[r];
        state.sum[r] *= rescale[r];
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int r = fragment::row_slot(i);
            s[b].x[i] = or_nan(exp2_f32(s[b].x[i] - top[r]), s[b].x[i]);
            state.sum[r] += s[b].x[i];
        }
}

// Sixteen keys' exponentials as A operands, in one term or, WEIGHT times as large, in two.
template <int TERMS>
__device__ __forceinline__ void weights_of(const Acc& e, FragA (&a)[TERMS]) {
    unsigned hi[4], lo[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if constexpr (TERMS == 2)
            split_f16(e.x[2 * w] * WEIGHT, e.x[2 * w + 1] * WEIGHT, hi[w], lo[w]);
        else
            hi[w] = pack_f16(e.x[2 * w], e.x[2 * w + 1]);
    }
    a[0] = a_of(hi);
    if constexpr (TERMS == 2) a[1] = a_of(lo);
}
