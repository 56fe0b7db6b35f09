/* exp, tanh, sigmoid without branches, for every input: NaN passes, +-inf and +-0 are exact.

   All three come from one reduction: x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial for
   q = e^r - 1 = r + r^2 P(r), whose coefficients interpolate (e^r - 1 - r) / r^2 at Chebyshev points
   (relative error 2.4e-8 in float, 7.6e-19 in double).  tanh works on q, not on e^r, so it keeps its
   relative accuracy near 0.  Largest errors measured: below 2.5 ulp. */

#if IS_DOUBLE
#define MANTISSA_BITS 52
#define EXPONENT_BIAS 1023
#define ROUNDING 6755399441055744.0 /* 1.5 * 2^52: adding it rounds to an integer, in the low bits */
#define LOG2_E 1.4426950408889634
#define LN2_HIGH 6.93147180369123816490e-01 /* few bits: n * LN2_HIGH is exact */
#define LN2_LOW 1.90821492927058770002e-10
#define EXP_OVERFLOWS 710.0
#define EXP_VANISHES -746.0
#define TANH_SATURATES 20.0
#else
#define MANTISSA_BITS 23
#define EXPONENT_BIAS 127
#define ROUNDING 12582912.0f
#define LOG2_E 1.44269504f
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
#define EXP_OVERFLOWS 89.0f
#define EXP_VANISHES -105.0f
#define TANH_SATURATES 10.0f
#endif
#define SIGN_BIT ((UINT)1 << (sizeof(REAL) * 8 - 1))
#define LIFT (EXPONENT_BIAS / 2)
#define SPLAT(x) NAME(splat)((REAL)(x))

/* 2^n for n within the exponent's range */
INLINE VREAL NAME(power_of_2)(VINT n) {
    return NAME(from_bits)(((VUINT)n + EXPONENT_BIAS) << MANTISSA_BITS);
}

/* x = n ln 2 + r; returns e^r - 1 */
INLINE VREAL NAME(reduced_expm1)(VREAL x, VINT *n) {
    const VREAL shifted = NAME(madd)(x, SPLAT(LOG2_E), SPLAT(ROUNDING));
    const VREAL whole = shifted - SPLAT(ROUNDING);
    *n = (VINT)(NAME(bits)(shifted) - NAME(bits)(SPLAT(ROUNDING)));
    VREAL r = NAME(madd)(whole, SPLAT(-LN2_HIGH), x);
    r = NAME(madd)(whole, SPLAT(-LN2_LOW), r);
#if IS_DOUBLE
    VREAL p = SPLAT(0x1.1f75aba0b1e2ep-29);
    p = NAME(madd)(p, r, SPLAT(0x1.af52906239de4p-26));
    p = NAME(madd)(p, r, SPLAT(0x1.27e4da1a3bf04p-22));
    p = NAME(madd)(p, r, SPLAT(0x1.71ddffef9e7b1p-19));
    p = NAME(madd)(p, r, SPLAT(0x1.a01a01a741b3cp-16));
    p = NAME(madd)(p, r, SPLAT(0x1.a01a01aca0134p-13));
    p = NAME(madd)(p, r, SPLAT(0x1.6c16c16c16212p-10));
    p = NAME(madd)(p, r, SPLAT(0x1.111111110ff87p-7));
    p = NAME(madd)(p, r, SPLAT(0x1.5555555555556p-5));
    p = NAME(madd)(p, r, SPLAT(0x1.5555555555557p-3));
    p = NAME(madd)(p, r, SPLAT(0x1p-1));
#else
    VREAL p = SPLAT(0x1.6d1606p-10f);
    p = NAME(madd)(p, r, SPLAT(0x1.12106cp-7f));
    p = NAME(madd)(p, r, SPLAT(0x1.555516p-5f));
    p = NAME(madd)(p, r, SPLAT(0x1.5554d8p-3f));
    p = NAME(madd)(p, r, SPLAT(0x1p-1f));
#endif
    return NAME(madd)(r * r, p, r);
}

/* Two factors 2^n, so that results from the smallest subnormal to the largest number come out right */
INLINE VREAL NAME(exponential)(VREAL x) {
    VINT n;
    x = NAME(at_most)(NAME(at_least)(x, SPLAT(EXP_VANISHES)), SPLAT(EXP_OVERFLOWS));
    const VREAL mantissa = NAME(reduced_expm1)(x, &n) + SPLAT(1);
    const VINT half = n >> 1;
    return mantissa * NAME(power_of_2)(half) * NAME(power_of_2)((VINT)((VUINT)n - (VUINT)half));
}

/* e^-|x|: the same bits as above, with a factor that is always 2^-LIFT */
INLINE VREAL NAME(decay)(VREAL x) {
    VINT n;
    x = NAME(at_least)(NAME(from_bits)(NAME(bits)(x) | SIGN_BIT), SPLAT(EXP_VANISHES));
    const VREAL mantissa = NAME(reduced_expm1)(x, &n) + SPLAT(1);
    return mantissa * NAME(power_of_2)((VINT)((VUINT)n + LIFT)) * NAME(power_of_2)((VINT)((VUINT){0} - LIFT));
}

/* with e = e^-|x|: 1 / (1 + e) for x >= 0, e / (1 + e) below: neither overflows nor cancels */
INLINE VREAL NAME(sigmoid)(VREAL x) {
    const VREAL e = NAME(decay)(x);
    return NAME(select)(NAME(less)(x, SPLAT(0)), e, SPLAT(1)) / (SPLAT(1) + e);
}

/* with m = e^(-2|x|) - 1 = 2^n q + (2^n - 1): tanh |x| = -m / (2 + m) */
INLINE VREAL NAME(hyperbolic_tangent)(VREAL x) {
    VINT n;
    const VUINT sign = NAME(bits)(x) & SIGN_BIT;
    const VREAL size = NAME(at_most)(NAME(from_bits)(NAME(bits)(x) & ~SIGN_BIT), SPLAT(TANH_SATURATES));
    const VREAL q = NAME(reduced_expm1)(size * SPLAT(-2), &n);
    const VREAL scale = NAME(power_of_2)(n);
    const VREAL m = NAME(madd)(q, scale, scale - SPLAT(1));
    return NAME(from_bits)((NAME(bits)(m / (SPLAT(-2) - m)) & ~SIGN_BIT) | sign); /* 0 may come out as -0 */
}

INLINE VREAL NAME(hard_sigmoid)(VREAL x) {
    const VREAL line = NAME(madd)(x, SPLAT(0.2), SPLAT(0.5));
    return NAME(at_most)(NAME(at_least)(line, SPLAT(0)), SPLAT(1));
}

INLINE VREAL NAME(activate)(int function, VREAL x) {
    switch (function) {
    case RECUR_TANH: return NAME(hyperbolic_tangent)(x);
    case RECUR_SIGMOID: return NAME(sigmoid)(x);
    case RECUR_RELU: return NAME(at_least)(x, SPLAT(0));
    case RECUR_HARD_SIGMOID: return NAME(hard_sigmoid)(x);
    default: return x;
    }
}

/* the derivative of `activate`, from its result y */
INLINE VREAL NAME(slope)(int function, VREAL y) {
    switch (function) {
    case RECUR_TANH: return NAME(madd)(-y, y, SPLAT(1));
    case RECUR_SIGMOID: return NAME(madd)(-y, y, y);
    case RECUR_RELU: return NAME(select)(NAME(less)(SPLAT(0), y), SPLAT(1), SPLAT(0));
    case RECUR_HARD_SIGMOID:
        return NAME(select)(NAME(less)(SPLAT(0), y) & NAME(less)(y, SPLAT(1)), SPLAT(0.2), SPLAT(0));
    default: return SPLAT(1);
    }
}

static void NAME(map)(int function, const void *x, void *y, ptrdiff_t n) {
    const REAL *from = x;
    REAL *to = y;
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        const VREAL v = NAME(load_part)(from + j, n - j);
        NAME(store_part)(to + j, NAME(activate)(function, v), n - j);
    }
}

static void NAME(map_exp)(const void *x, void *y, ptrdiff_t n) {
    const REAL *from = x;
    REAL *to = y;
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        const VREAL v = NAME(load_part)(from + j, n - j);
        NAME(store_part)(to + j, NAME(exponential)(v), n - j);
    }
}
