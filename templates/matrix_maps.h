// Lane maps of the 16x16x16 matrix operation: which elements of A[row][k], B[k][column] and C[row][column] a lane
// holds. A fragment is 32-bit words of two f16, low half first: element i is half i % 2 of word i / 2, and elements 2w
// and 2w + 1 are always neighbours in k. A C fragment is eight f32.
//
// Two C fragments exist, the same matrix dealt out in two ways. `Acc` is the one whose rows lie together: reductions
// along a row are cheap, and it turns into an A operand. `AccT` is its mirror: columns lie together, and it turns into
// a B operand. A lane's elements of an Acc lie in ROW_SLOTS rows, those of an AccT in COL_SLOTS columns; the lanes that
// share them differ in the bits of ROW_LANES, COL_LANES.
//
// The order of k is free where both operands are made by the same kernel. `run_k(i, l)` is the order in which the
// elements of a B column that a lane holds are RUN neighbours, so that they are one load; what A has at a_k must then
// be what run_k says for the same k: `run_place(k)` is where element k of memory belongs.

// gfx11, wave32. Lanes t and t + 16 hold the same operands: row (column) t & 15 with all sixteen k. The instruction's
// own result is D[2i + t / 16][t & 15]. With the operands exchanged it is the transpose, and that is Acc.
namespace gfx11 {
inline constexpr int A_WORDS = 8, B_WORDS = 8, ROW_SLOTS = 1, COL_SLOTS = 1, ROW_LANES = 16, COL_LANES = 16;
__device__ __forceinline__ int a_row(int, int l) { return l & 15; }
__device__ __forceinline__ int a_k(int i, int) { return i; }
__device__ __forceinline__ int b_col(int, int l) { return l & 15; }
__device__ __forceinline__ int b_k(int i, int) { return i; }
__device__ __forceinline__ int acc_row(int, int l) { return l & 15; }
__device__ __forceinline__ int acc_col(int i, int l) { return 2 * i + (l >> 4); }
__device__ __forceinline__ int acct_row(int i, int l) { return 2 * i + (l >> 4); }
__device__ __forceinline__ int acct_col(int, int l) { return l & 15; }
__device__ __forceinline__ int row_slot(int) { return 0; }
__device__ __forceinline__ int col_slot(int) { return 0; }
inline constexpr int RUN = 16;
__device__ __forceinline__ int run_k(int i, int l) { return b_k(i, l); }
__device__ __forceinline__ int run_place(int k) { return k; }
}  // namespace gfx11

// gfx12, wave32. The wave halves share the sixteen k: lane t holds what is here called k 8 (t / 16) .. + 7. The manual
// numbers them otherwise, in A and B alike, and a product is the same. The result of the instruction is
// D[8 (t / 16) + i][t & 15].
namespace gfx12 {
inline constexpr int A_WORDS = 4, B_WORDS = 4, ROW_SLOTS = 1, COL_SLOTS = 1, ROW_LANES = 16, COL_LANES = 16;
__device__ __forceinline__ int a_row(int, int l) { return l & 15; }
__device__ __forceinline__ int a_k(int i, int l) { return 8 * (l >> 4) + i; }
__device__ __forceinline__ int b_col(int, int l) { return l & 15; }
__device__ __forceinline__ int b_k(int i, int l) { return 8 * (l >> 4) + i; }
__device__ __forceinline__ int acc_row(int, int l) { return l & 15; }
__device__ __forceinline__ int acc_col(int i, int l) { return 8 * (l >> 4) + i; }
__device__ __forceinline__ int acct_row(int i, int l) { return 8 * (l >> 4) + i; }
__device__ __forceinline__ int acct_col(int, int l) { return l & 15; }
__device__ __forceinline__ int row_slot(int) { return 0; }
__device__ __forceinline__ int col_slot(int) { return 0; }
inline constexpr int RUN = 8;
__device__ __forceinline__ int run_k(int i, int l) { return b_k(i, l); }
__device__ __forceinline__ int run_place(int k) { return k; }
}  // namespace gfx12

// NVIDIA mma.sync m16n8k16, twice: columns 0-7, then 8-15. Quads of lanes: g = t / 4 is a row or column, t % 4
// a pair of neighbours.
namespace mma16 {
inline constexpr int A_WORDS = 4, B_WORDS = 4, ROW_SLOTS = 2, COL_SLOTS = 4, ROW_LANES = 3, COL_LANES = 28;
__device__ __forceinline__ int a_row(int i, int l) { return (l >> 2) + 8 * (i >> 1 & 1); }
__device__ __forceinline__ int a_k(int i, int l) { return 2 * (l & 3) + (i & 1) + 8 * (i >> 2); }
__device__ __forceinline__ int b_col(int i, int l) { return (l >> 2) + 8 * (i >> 2); }
__device__ __forceinline__ int b_k(int i, int l) { return 2 * (l & 3) + (i & 1) + 8 * (i >> 1 & 1); }
__device__ __forceinline__ int acc_row(int i, int l) { return (l >> 2) + 8 * (i >> 1 & 1); }
__device__ __forceinline__ int acc_col(int i, int l) { return 2 * (l & 3) + (i & 1) + 8 * (i >> 2); }
__device__ __forceinline__ int acct_row(int i, int l) { return acc_row(i, l); }
__device__ __forceinline__ int acct_col(int i, int l) { return acc_col(i, l); }
__device__ __forceinline__ int row_slot(int i) { return i >> 1 & 1; }
__device__ __forceinline__ int col_slot(int i) { return (i & 1) + 2 * (i >> 2); }
inline constexpr int RUN = 4;
__device__ __forceinline__ int run_k(int i, int l) { return 4 * (l & 3) + (i & 3); }
__device__ __forceinline__ int run_place(int k) { return (k & ~15) + 2 * (k >> 2 & 3) + (k & 1) + 8 * (k >> 1 & 1); }
}  // namespace mma16
