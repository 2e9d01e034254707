// Arithmetic that instructions have and C does not.
typedef uint8_t u8;
typedef uint16_t u16;
typedef int16_t i16;
typedef uint32_t u32;
typedef int32_t i32;
typedef uint64_t u64;
typedef int64_t i64;

#define INLINE static inline __attribute__((always_inline))

INLINE float f(u32 bits) { return __builtin_bit_cast(float, bits); }
INLINE u32 u(float x) { return __builtin_bit_cast(u32, x); }
INLINE float h(u32 bits) { return (float)__builtin_bit_cast(_Float16, (u16)bits); }
INLINE u32 uh(float x) { return __builtin_bit_cast(u16, (_Float16)x); }
INLINE int is_nan(u32 x) { return (x & 0x7fffffff) > 0x7f800000; }
INLINE int signals(u32 x) { return is_nan(x) && !(x & 0x400000); }
INLINE int exponent(u32 x) { return x >> 23 & 255; }
INLINE int subnormal(float x) { return !exponent(u(x)) && x != 0; }
INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 most(i64 a, i64 b) { return a > b ? a : b; }
INLINE i64 middle(i64 a, i64 b, i64 c) { return most(least(a, b), least(most(a, b), c)); }

// A subnormal number is zero to the transcendental unit.
INLINE float normal(float x) { return exponent(u(x)) ? x : f(u(x) & 0x80000000); }

// Of two, the one that is a number; IEEE mode, which gfx12 has not, makes a signalling NaN quiet and takes that.
INLINE u32 max_f32(u32 a, u32 b, int ieee) {
    u32 best = f(a) > f(b) ? a : b;
    best = (a | b) << 1 ? best : a & b;
    best = is_nan(b) ? a : best;
    best = is_nan(a) ? (is_nan(b) ? a | 0x400000 : b) : best;
    best = ieee && signals(b) ? b | 0x400000 : best;
    return ieee && signals(a) ? a | 0x400000 : best;
}
INLINE u32 min_f32(u32 a, u32 b, int ieee) {
    u32 best = f(a) < f(b) ? a : b;
    best = (a | b) << 1 ? best : a | b;
    best = is_nan(b) ? a : best;
    best = is_nan(a) ? (is_nan(b) ? a | 0x400000 : b) : best;
    best = ieee && signals(b) ? b | 0x400000 : best;
    return ieee && signals(a) ? a | 0x400000 : best;
}

// The middle one; with one that is no number the least of the rest.
INLINE u32 med3_f32(u32 a, u32 b, u32 c, int ieee) {
    if (is_nan(a) || is_nan(b) || is_nan(c)) return min_f32(min_f32(a, b, ieee), c, ieee);
    return max_f32(min_f32(a, b, ieee), min_f32(max_f32(a, b, ieee), c, ieee), ieee);
}

// 2^x, rounded once from a result of 1e-12: the same bits on every machine, which no C library promises. The degree is
// that of Taylor's series for 2^t with |t| <= 1/2.
INLINE float exp2_of(float x) {
    const double at = x < -160.0f ? -160.0 : x > 160.0f ? 160.0 : (double)x, whole = rint(at);
    const double t = (at - whole) * 0.69314718055994530942;
    double sum = 1.0 / 479001600;
    sum = sum * t + 1.0 / 39916800;
    sum = sum * t + 1.0 / 3628800;
    sum = sum * t + 1.0 / 362880;
    sum = sum * t + 1.0 / 40320;
    sum = sum * t + 1.0 / 5040;
    sum = sum * t + 1.0 / 720;
    sum = sum * t + 1.0 / 120;
    sum = sum * t + 1.0 / 24;
    sum = sum * t + 1.0 / 6;
    sum = sum * t + 0.5;
    sum = sum * t + 1.0;
    sum = sum * t + 1.0;
    const double power = __builtin_bit_cast(double, (u64)((i64)whole + 1023) << 52);
    const float found = (float)(sum * power);
    return x != x ? x : found;
}

// What v_sin and v_cos take: turns; beyond 256 of them there is no answer.
INLINE double turns(float x) { return x > 256.0f || x < -256.0f ? 0.0 : (double)x - rint((double)x); }

INLINE i32 to_i32(float x) {
    return x != x ? 0 : x >= 2147483648.0f ? 0x7fffffff : x <= -2147483648.0f ? -0x7fffffff - 1 : (i32)x;
}
INLINE u32 to_u32(float x) { return !(x > 0) ? 0 : x >= 4294967296.0f ? ~0u : (u32)x; }

// Division by refinement (VOP3: V_DIV_SCALE_F32, V_DIV_FMAS_F32, V_DIV_FIXUP_F32): what is scaled out of the way of
// overflow, and of subnormal numbers, is scaled back.
INLINE u32 div_scale(u32 value, u32 divisor, u32 dividend, int l, u32* scaled) {
    const float d = f(divisor), n = f(dividend);
    const u32 up = u(ldexpf(f(value), 64));
    if (d == 0 || n == 0) return 0x7fc00000;
    if (exponent(dividend) - exponent(divisor) >= 96) {
        *scaled |= 1u << l;
        return value == divisor ? up : value;
    }
    if (subnormal(d)) return up;
    const int small_inverse = subnormal((float)(1.0 / d)), small_quotient = subnormal((float)((double)n / d));
    if (small_inverse && small_quotient) {
        *scaled |= 1u << l;
        return value == divisor ? up : value;
    }
    if (small_inverse) return u(ldexpf(f(value), -64));
    if (small_quotient) {
        *scaled |= 1u << l;
        return value == dividend ? up : value;
    }
    return exponent(dividend) <= 23 ? up : value;
}
INLINE float div_fmas(float a, float b, float c, u32 scaled) {
    const float sum = fmaf(a, b, c);
    return scaled ? ldexpf(sum, exponent(u(c)) > 127 ? 64 : -64) : sum;
}
INLINE u32 div_fixup(u32 quotient, u32 divisor, u32 dividend) {
    const u32 sign = (divisor ^ dividend) & 0x80000000;
    const float d = f(divisor), n = f(dividend);
    if (is_nan(dividend)) return dividend | 0x400000;
    if (is_nan(divisor)) return divisor | 0x400000;
    if ((n == 0 && d == 0) || (isinf(n) && isinf(d))) return 0xffc00000;
    if (d == 0 || isinf(n)) return sign | 0x7f800000;
    if (isinf(d) || n == 0 || exponent(dividend) - exponent(divisor) < -150) return sign;
    return is_nan(quotient) ? sign | 0x7f800000 : (quotient & 0x7fffffff) | sign;
}

// a b + c of f16, rounded once: where the sum in double is not exact, its last bit says so and no tie is left.
INLINE u32 fma_f16(u32 a, u32 b, u32 c) {
    const double product = (double)h(a) * h(b), addend = h(c), sum = product + addend;
    const double back = sum - product, lost = (product - (sum - back)) + (addend - back);
    u64 bits = __builtin_bit_cast(u64, sum);
    if (lost != 0 && !(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : -1ull;
    const double odd = __builtin_bit_cast(double, bits);
    const float near = (float)odd;
    u32 word = u(near);  // the same once more, to f32
    if ((double)near != odd && !(word & 1) && !is_nan(word)) word += fabs(odd) > fabs((double)near) ? 1 : -1u;
    return uh(f(word));
}

INLINE u32 bfe_i32(u32 x, u32 offset, u32 width) {
    return width ? (u32)((i32)(x >> offset << (32 - width)) >> (32 - width)) : 0;
}
INLINE u64 bits_of(u64 x, u32 offset, u32 width) {
    return width >= 64 ? x >> offset : x >> offset & ((1ull << width) - 1);
}
INLINE u64 bits_with_sign(u64 x, u32 offset, u32 width) {
    if (!width) return 0;
    return width >= 64 ? (u64)((i64)x >> offset) : (u64)((i64)(x >> offset << (64 - width)) >> (64 - width));
}

// V_PERM_B32: four bytes of eight, or signs of words, or constants.
INLINE u32 byte_of(u64 x, u32 select) {
    const u32 sign = (u32)(x >> (16 * (select & 3) + 15) & 1) * 255;
    return select < 8 ? (u32)(x >> 8 * select & 255) : select < 12 ? sign : select == 12 ? 0 : 255;
}
INLINE u32 bytes_of(u64 x, u32 select) {
    return byte_of(x, select & 255) | byte_of(x, select >> 8 & 255) << 8 | byte_of(x, select >> 16 & 255) << 16 |
           byte_of(x, select >> 24) << 24;
}

// V_CMP_CLASS_F32: a bit for what a number is.
INLINE u32 class_of(u32 x) {
    const int negative = x >> 31, e = exponent(x);
    if (is_nan(x)) return signals(x) ? 1 : 2;
    const int kind = e == 255 ? 0 : e ? 1 : x << 1 ? 2 : 3;  // infinite, normal, subnormal, zero
    return negative ? 4u << kind : 0x200u >> kind;
}
