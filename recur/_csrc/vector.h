/* One register of REAL: VREAL with LANES numbers, and the few operations the kernels need.
   Included once for each number type, by target.c, which defines REAL, INT, UINT, NAME, IS_DOUBLE.

   GCC's and clang's vector extensions carry the arithmetic, so that one source serves SSE2, AVX2,
   AVX-512 and NEON; a compiler without them gets RECUR_VECTOR_BYTES = 0, one number a "register".
   Only the fused multiply-add is an intrinsic: the extensions cannot name it, and contraction by
   the compiler is off, because what it fuses may differ from one inlined copy to the next, and
   then a sample's bits would depend on its place in the batch. */

#if RECUR_VECTOR_BYTES
#define LANES ((ptrdiff_t)(RECUR_VECTOR_BYTES / sizeof(REAL)))
typedef REAL NAME(vreal) __attribute__((vector_size(RECUR_VECTOR_BYTES)));
typedef INT NAME(vint) __attribute__((vector_size(RECUR_VECTOR_BYTES)));
typedef UINT NAME(vuint) __attribute__((vector_size(RECUR_VECTOR_BYTES)));
typedef REAL NAME(unaligned) __attribute__((vector_size(RECUR_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#else
#define LANES ((ptrdiff_t)1)
typedef REAL NAME(vreal);
typedef INT NAME(vint);
typedef UINT NAME(vuint);
typedef REAL NAME(unaligned);
#endif
#define VREAL NAME(vreal)
#define VINT NAME(vint)
#define VUINT NAME(vuint)

INLINE VREAL NAME(load)(const REAL *p) { return *(const NAME(unaligned) *)p; }
INLINE void NAME(store)(REAL *p, VREAL v) { *(NAME(unaligned) *)p = v; }

/* x - 0 is x for every x; 0 + x would lose the sign of -0 */
INLINE VREAL NAME(splat)(REAL x) {
#if RECUR_VECTOR_BYTES
    return x - (VREAL){0};
#else
    return x;
#endif
}

/* the first n numbers; the others are 0 */
INLINE VREAL NAME(load_part)(const REAL *p, ptrdiff_t n) {
    if (n >= LANES) return NAME(load)(p);
    REAL part[LANES_MAX] = {0};
    for (ptrdiff_t j = 0; j < n; j++) part[j] = p[j];
    return NAME(load)(part);
}
INLINE void NAME(store_part)(REAL *p, VREAL v, ptrdiff_t n) {
    if (n >= LANES) {
        NAME(store)(p, v);
        return;
    }
    REAL part[LANES_MAX];
    NAME(store)(part, v);
    for (ptrdiff_t j = 0; j < n; j++) p[j] = part[j];
}

/* a * b + c, rounded once where the target can, twice on those that cannot */
INLINE VREAL NAME(madd)(VREAL a, VREAL b, VREAL c) {
#if RECUR_VECTOR_BYTES == 64 && IS_DOUBLE
    return (VREAL)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif RECUR_VECTOR_BYTES == 64
    return (VREAL)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif RECUR_VECTOR_BYTES == 32 && IS_DOUBLE
    return (VREAL)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif RECUR_VECTOR_BYTES == 32
    return (VREAL)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif RECUR_VECTOR_BYTES == 16 && defined(__aarch64__) && IS_DOUBLE
    return (VREAL)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#elif RECUR_VECTOR_BYTES == 16 && defined(__aarch64__)
    return (VREAL)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE VUINT NAME(bits)(VREAL v) {
    VUINT u;
    memcpy(&u, &v, sizeof u);
    return u;
}
INLINE VREAL NAME(from_bits)(VUINT u) {
    VREAL v;
    memcpy(&v, &u, sizeof v);
    return v;
}
/* all ones where a < b, zeros elsewhere and for NaN */
INLINE VUINT NAME(less)(VREAL a, VREAL b) {
#if RECUR_VECTOR_BYTES
    return (VUINT)(a < b);
#else
    return (VUINT)0 - (VUINT)(a < b);
#endif
}
INLINE VREAL NAME(select)(VUINT mask, VREAL yes, VREAL no) {
    return NAME(from_bits)((mask & NAME(bits)(yes)) | (~mask & NAME(bits)(no)));
}
/* the smaller and the larger of v and a limit; NaN passes through v (min and max of x86 give their
   second operand when either is NaN) */
INLINE VREAL NAME(at_most)(VREAL v, VREAL limit) {
#if RECUR_VECTOR_BYTES == 64 && IS_DOUBLE
    return (VREAL)_mm512_min_pd((__m512d)limit, (__m512d)v);
#elif RECUR_VECTOR_BYTES == 64
    return (VREAL)_mm512_min_ps((__m512)limit, (__m512)v);
#elif RECUR_VECTOR_BYTES == 32 && IS_DOUBLE
    return (VREAL)_mm256_min_pd((__m256d)limit, (__m256d)v);
#elif RECUR_VECTOR_BYTES == 32
    return (VREAL)_mm256_min_ps((__m256)limit, (__m256)v);
#else
    return NAME(select)(NAME(less)(limit, v), limit, v);
#endif
}
INLINE VREAL NAME(at_least)(VREAL v, VREAL limit) {
#if RECUR_VECTOR_BYTES == 64 && IS_DOUBLE
    return (VREAL)_mm512_max_pd((__m512d)limit, (__m512d)v);
#elif RECUR_VECTOR_BYTES == 64
    return (VREAL)_mm512_max_ps((__m512)limit, (__m512)v);
#elif RECUR_VECTOR_BYTES == 32 && IS_DOUBLE
    return (VREAL)_mm256_max_pd((__m256d)limit, (__m256d)v);
#elif RECUR_VECTOR_BYTES == 32
    return (VREAL)_mm256_max_ps((__m256)limit, (__m256)v);
#else
    return NAME(select)(NAME(less)(v, limit), limit, v);
#endif
}

/* n numbers further; an absent array stays absent */
INLINE REAL *NAME(at)(const void *base, ptrdiff_t n) { return base ? (REAL *)base + n : NULL; }
