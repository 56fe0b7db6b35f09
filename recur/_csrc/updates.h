/* One update of an optimiser in one pass: bit for bit what the same operations give one array at a
   time, which is why nothing here is a fused multiply-add.  Subnormals are kept. */

INLINE REAL NAME(square_root)(REAL x) {
#if IS_DOUBLE
    return sqrt(x);
#else
    return sqrtf(x);
#endif
}

/* the sum of squares, in parts short enough to keep their digits */
static double NAME(sum_squares)(const void *a_, ptrdiff_t n) {
    const REAL *a = a_;
    double total = 0;
    for (ptrdiff_t i = 0; i < n;) {
        const ptrdiff_t end = n - i < 4096 ? n : i + 4096;
        VREAL sum[4];
        UNROLL for (int v = 0; v < 4; v++) sum[v] = SPLAT(0);
        for (; i + 4 * LANES <= end; i += 4 * LANES)
            UNROLL for (int v = 0; v < 4; v++) {
                const VREAL x = NAME(load)(a + i + v * LANES);
                sum[v] = NAME(madd)(x, x, sum[v]);
            }
        for (; i < end; i += LANES) {
            const VREAL x = NAME(load_part)(a + i, end - i);
            sum[0] = NAME(madd)(x, x, sum[0]);
        }
        REAL part[LANES_MAX];
        NAME(store)(part, (sum[0] + sum[1]) + (sum[2] + sum[3]));
        for (int j = 0; j < LANES; j++) total += part[j];
    }
    return total;
}

static void NAME(descent)(const recur_update *u, ptrdiff_t n) {
    REAL *restrict x = (REAL *)u->x;
    const REAL *restrict g = (const REAL *)u->g;
    const REAL scale = (REAL)u->scale, rate = (REAL)u->rate;
    for (ptrdiff_t i = 0; i < n; i++) x[i] -= g[i] * scale * rate;
}

static void NAME(momentum)(const recur_update *u, ptrdiff_t n) {
    REAL *restrict x = (REAL *)u->x, *restrict v = (REAL *)u->mean;
    const REAL *restrict g = (const REAL *)u->g;
    const REAL scale = (REAL)u->scale, rate = (REAL)u->rate, keep = (REAL)u->keep_mean;
    for (ptrdiff_t i = 0; i < n; i++) {
        v[i] = v[i] * keep + g[i] * scale * rate;
        x[i] -= v[i];
    }
}

static void NAME(adam)(const recur_update *u, ptrdiff_t n) {
    REAL *restrict x = (REAL *)u->x, *restrict m = (REAL *)u->mean, *restrict v = (REAL *)u->square;
    const REAL *restrict g = (const REAL *)u->g;
    const REAL scale = (REAL)u->scale, rate = (REAL)u->rate, decay = (REAL)u->decay;
    const REAL keep_mean = (REAL)u->keep_mean, take_mean = (REAL)(1 - u->keep_mean);
    const REAL keep_square = (REAL)u->keep_square, take_square = (REAL)(1 - u->keep_square);
    const REAL correction = (REAL)u->correction, epsilon = (REAL)u->epsilon;
    for (ptrdiff_t i = 0; i < n; i++) {
        const REAL d = g[i] * scale;
        m[i] = m[i] * keep_mean + d * take_mean;
        v[i] = v[i] * keep_square + d * d * take_square;
        x[i] -= m[i] * rate / (NAME(square_root)(v[i] * correction) + epsilon) + decay * x[i];
    }
}
