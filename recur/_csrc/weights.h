/* The formats of packed weights.  Sums and everything else are REAL whatever the format: weights are
   widened in registers as they are read, which is exact, so a product has the bits of one with the
   same numbers stored in full.

   BF16  the upper half of a float
   F16   the half precision of IEEE 754
   INT8  whole numbers from -127 to 127 times a scale for each row of the matrix

   load_row reads the `vectors` registers of one k.  Where widening would cost shuffles, the numbers of
   two or four registers are interleaved, so that a 32-bit word holds one lane of each of them: `place`
   is where number `column` of that row lies. */

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define PART_OF_WORD(i, n) ((n) - 1 - (i))
#else
#define PART_OF_WORD(i, n) (i) /* the i-th of n from the low end */
#endif
#define HIGH_BYTE ((UINT)0xff000000)
#define HIGH_HALF ((UINT)0xffff0000)

#if FORMAT == BF16 || FORMAT == INT8
INLINE VUINT NAME(load_words)(const void *p) {
    VUINT words;
    memcpy(&words, p, sizeof words);
    return words;
}
#endif
#if FORMAT == BF16 || FORMAT == INT8 || FORMAT == F16
/* unsigned halves of words, one to a lane */
INLINE VUINT NAME(load_halves)(const void *p) {
#if RECUR_VECTOR_BYTES == 64
    return (VUINT)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif RECUR_VECTOR_BYTES == 32
    return (VUINT)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#elif RECUR_VECTOR_BYTES
    typedef uint16_t narrow __attribute__((vector_size(RECUR_VECTOR_BYTES / 2)));
    narrow n;
    memcpy(&n, p, sizeof n);
    return __builtin_convertvector(n, VUINT);
#else
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return half;
#endif
}
#endif

#if FORMAT == FULL

typedef REAL NAME(weight);
#define WEIGHT NAME(weight)
#define SCALES 0
INLINE void NAME(load_row)(const int vectors, const WEIGHT *p, VREAL *w) {
    UNROLL for (int v = 0; v < vectors; v++) w[v] = NAME(load)(p + v * LANES);
}
INLINE ptrdiff_t NAME(place)(int vectors, ptrdiff_t column) { return column; }
INLINE REAL NAME(from_weight)(WEIGHT w) { return w; }

#elif FORMAT == INT8

typedef int8_t NAME(weight);
#define WEIGHT NAME(weight)
#define SCALES 4 /* a scale, a float, is as long as this many weights */

/* the byte at place i of each word, as a whole number times 2^24 */
INLINE VREAL NAME(widen_byte)(VUINT words, const int i) {
#if RECUR_VECTOR_BYTES == 64
    const int at = 0x808080 | i << 24; /* i to the high byte, zeros below */
    const __m512i top = _mm512_set4_epi32(at + 0x0c000000, at + 0x08000000, at + 0x04000000, at);
    return (VREAL)_mm512_cvtepi32_ps(_mm512_shuffle_epi8((__m512i)words, top));
#elif RECUR_VECTOR_BYTES == 32
    const int at = 0x808080 | i << 24;
    const __m128i top = _mm_set_epi32(at + 0x0c000000, at + 0x08000000, at + 0x04000000, at);
    return (VREAL)_mm256_cvtepi32_ps(_mm256_shuffle_epi8((__m256i)words, _mm256_broadcastsi128_si256(top)));
#elif RECUR_VECTOR_BYTES
    return __builtin_convertvector((VINT)(words << (24 - 8 * i) & HIGH_BYTE), VREAL);
#else
    return (REAL)(VINT)(words << (24 - 8 * i) & HIGH_BYTE);
#endif
}
/* one register of bytes that lie side by side */
INLINE VREAL NAME(widen_bytes)(const WEIGHT *p) {
#if RECUR_VECTOR_BYTES == 64
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
    return (VREAL)_mm512_cvtepi32_ps(wide);
#elif RECUR_VECTOR_BYTES == 32
    const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return (VREAL)_mm256_cvtepi32_ps(wide);
#elif RECUR_VECTOR_BYTES
    typedef int8_t narrow __attribute__((vector_size(RECUR_VECTOR_BYTES / 4)));
    narrow n;
    memcpy(&n, p, sizeof n);
    return __builtin_convertvector(__builtin_convertvector(n, VINT), VREAL);
#else
    return (REAL)*p;
#endif
}
INLINE void NAME(load_row)(const int vectors, const WEIGHT *p, VREAL *w) {
    if (vectors == 4) {
        const VUINT words = NAME(load_words)(p);
#if RECUR_VECTOR_BYTES == 64
        /* Two by shuffles and two by masks, which more ports can run.  A word read from one byte
           before has byte 2 on top: before the first row of a panel there are its scales. */
        const VUINT earlier = NAME(load_words)(p - 1);
        UNROLL for (int v = 0; v < 2; v++) w[v] = NAME(widen_byte)(words, v);
        w[2] = (VREAL)_mm512_cvtepi32_ps((__m512i)(earlier & HIGH_BYTE));
        w[3] = (VREAL)_mm512_cvtepi32_ps((__m512i)(words & HIGH_BYTE));
#else
        UNROLL for (int v = 0; v < 4; v++) w[v] = NAME(widen_byte)(words, v);
#endif
    } else {
        UNROLL for (int v = 0; v < vectors; v++) w[v] = NAME(widen_bytes)(p + v * LANES);
    }
}
/* what load_row gives is this many times too large */
INLINE REAL NAME(excess)(int vectors) { return vectors == 4 ? 0x1p24f : 1; }
INLINE ptrdiff_t NAME(place)(int vectors, ptrdiff_t column) {
    return vectors == 4 ? column % LANES * 4 + PART_OF_WORD(column / LANES, 4) : column;
}
INLINE REAL NAME(from_weight)(WEIGHT w) { return w; }

/* The scale of a row: its largest number becomes 127.  It is rounded up to 17 bits, so that each
   weight times its scale is a float without rounding, and to quantise such a row again gives the
   same whole numbers and scale. */
static REAL NAME(scale_of)(const REAL *row, ptrdiff_t step, ptrdiff_t depth) {
    REAL largest = 0;
    for (ptrdiff_t k = 0; k < depth; k++) {
        const REAL size = fabsf(row[k * step]);
        if (size > largest) largest = size;
    }
    REAL scale = largest / 127;
    UINT bits;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits + 0x7f) & ~(UINT)0x7f;
    memcpy(&scale, &bits, sizeof scale);
    return scale < 0x1p-100f ? 0 : scale; /* kernels must not meet a subnormal scale */
}
static WEIGHT NAME(to_weight)(REAL w, REAL scale) {
    return scale > 0 ? (WEIGHT)rintf(w / scale) : 0;
}

#else /* 16 bits */

typedef uint16_t NAME(weight);
#define WEIGHT NAME(weight)
#define SCALES 0

static REAL NAME(scale_of)(const REAL *row, ptrdiff_t step, ptrdiff_t depth) { return 1; }

#if FORMAT == BF16

/* two registers by words, then the one that is left */
INLINE void NAME(load_row)(const int vectors, const WEIGHT *p, VREAL *w) {
    UNROLL for (int v = 0; v + 1 < vectors; v += 2) {
        const VUINT words = NAME(load_words)(p + v * LANES);
        w[v] = NAME(from_bits)(words << 16);
        w[v + 1] = NAME(from_bits)(words & HIGH_HALF);
    }
    if (vectors % 2) w[vectors - 1] = NAME(from_bits)(NAME(load_halves)(p + (vectors - 1) * LANES) << 16);
}
INLINE ptrdiff_t NAME(place)(int vectors, ptrdiff_t column) {
    const ptrdiff_t v = column / LANES, lane = column % LANES;
    if (v == vectors - 1 && v % 2 == 0) return column;
    return v / 2 * 2 * LANES + 2 * lane + PART_OF_WORD(v % 2, 2);
}
INLINE REAL NAME(from_weight)(WEIGHT w) {
    const UINT bits = (UINT)w << 16;
    REAL full;
    memcpy(&full, &bits, sizeof full);
    return full;
}
/* to nearest, ties to even; the caller has checked the range */
static WEIGHT NAME(to_weight)(REAL w, REAL scale) {
    UINT bits;
    memcpy(&bits, &w, sizeof bits);
    return (WEIGHT)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#else /* F16 */

/* Half a float's exponent has another bias.  Below 2^-14 a half is a multiple of 2^-24 without one:
   there the same bits in the mantissa of 2^-14 are that much above 2^-14.  No step meets a subnormal
   float, which the kernels would read as zero. */
INLINE VREAL NAME(widen)(VUINT half) {
    const VUINT size = (half & 0x7fff) << 13;
    const VREAL tiny = NAME(from_bits)(size | (UINT)113 << 23) - 0x1p-14f;
    const VREAL large = NAME(from_bits)(size + ((UINT)112 << 23));
    const VREAL least = NAME(splat)(0x1p-14f);
    const VUINT is_tiny = NAME(less)(large, least);
    return NAME(from_bits)((half & 0x8000) << 16 | NAME(bits)(NAME(select)(is_tiny, tiny, large)));
}
INLINE VREAL NAME(load_weights)(const WEIGHT *p) {
#if RECUR_VECTOR_BYTES == 64
    return (VREAL)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif RECUR_VECTOR_BYTES == 32
    return (VREAL)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    return NAME(widen)(NAME(load_halves)(p));
#endif
}
INLINE void NAME(load_row)(const int vectors, const WEIGHT *p, VREAL *w) {
    UNROLL for (int v = 0; v < vectors; v++) w[v] = NAME(load_weights)(p + v * LANES);
}
INLINE ptrdiff_t NAME(place)(int vectors, ptrdiff_t column) { return column; }
INLINE REAL NAME(from_weight)(WEIGHT w) {
    WEIGHT halves[LANES_MAX] = {w};
    REAL full[LANES_MAX];
    NAME(store)(full, NAME(load_weights)(halves));
    return full[0];
}
/* to nearest, ties to even; the caller has checked the range */
static WEIGHT NAME(to_weight)(REAL w, REAL scale) {
    UINT bits;
    memcpy(&bits, &w, sizeof bits);
    const WEIGHT sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= (UINT)113 << 23) {
        bits -= (UINT)112 << 23;
        return sign | (WEIGHT)((bits + 0xfff + (bits >> 13 & 1)) >> 13);
    }
    const REAL half = 0.5f, shifted = half + fabsf(w); /* the sum is rounded to a multiple of 2^-24 */
    UINT from;
    memcpy(&bits, &shifted, sizeof bits);
    memcpy(&from, &half, sizeof from);
    return sign | (WEIGHT)(bits - from);
}

#endif
#endif
