// exp through the hardware's exp2.
__device__ __forceinline__ float exp_f32(float x) { return exp2_f32(x * 1.44269504088896341f); }

// Where a running maximum of f32 scores starts: no finite score is below it. Finite itself, so that the maximum of no
// key takes part in differences.
[[maybe_unused]] constexpr float LOWEST = -3.402823466e+38f;

// The exponential e of the score of a key that a row sees; NaN where the score is NaN or infinite. Nothing else would
// tell: a maximum passes over NaN, and exp makes 0 of -inf, which is what a key has that nobody sees.
__device__ __forceinline__ float or_nan(float e, float score) { return fma_f32(score, 0.0f, e); }

// Scores of f16 operands are far above NONE, where their maxima start, or no finite numbers. A key that a row does not
// see has the score HIDDEN, far below it.
[[maybe_unused]] constexpr float NONE = -1e30f, HIDDEN = LOWEST;

// What f32 kernels multiply queries (or keys) with, and scores with to take it back: products of the largest f32 with
// codes, or with keys, are added up before scales make them smaller. Powers of two: no bit changes.
[[maybe_unused]] constexpr float SMALLER = 1.0f / 65536.0f, LARGER = 65536.0f;
