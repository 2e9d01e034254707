// exp through the hardware's exp2.
__device__ __forceinline__ float exp_f32(float x) { return exp2_f32(x * 1.44269504088896341f); }

// Where every running maximum starts.
// Finite, so that a row with no visible key gives exp(-inf - LOWEST) = 0 and not NaN.
constexpr float LOWEST = -1e30f;
