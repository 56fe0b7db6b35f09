/* Row-wise work outside the cells: softmax cross entropy and column sums. */

/* sum and maximum of a register's numbers, always in the same order */
INLINE REAL NAME(sum_lanes)(VREAL v) {
    REAL part[LANES_MAX], sum = 0;
    NAME(store)(part, v);
    for (ptrdiff_t j = 0; j < LANES; j++) sum += part[j];
    return sum;
}

INLINE REAL NAME(largest)(const REAL *row, ptrdiff_t n) {
    REAL best = row[0];
    for (ptrdiff_t c = 1; c < n; c++) best = best < row[c] ? row[c] : best;
    return best;
}

INLINE REAL NAME(logarithm)(REAL x) {
#if IS_DOUBLE
    return log(x);
#else
    return logf(x);
#endif
}

/* With s = softmax(row): loss = w sum_c t_c (log-sum-exp - row_c), d = w (s sum_c t_c - t).
   Differences are taken to the row's largest logit.  A target of 0 on a logit of -inf costs 0. */
static void NAME(softmax_cross_entropy)(const void *logits, const int64_t *label, const void *target,
                                        const void *weights, void *loss, void *dlogits,
                                        ptrdiff_t rows, ptrdiff_t classes) {
    for (ptrdiff_t row = 0; row < rows; row++) {
        const REAL *x = (const REAL *)logits + row * classes;
        const REAL *want = target ? (const REAL *)target + row * classes : NULL;
        REAL *d = (REAL *)dlogits + row * classes;
        const REAL weight = weights ? ((const REAL *)weights)[row] : 1;
        if (weight == 0) {
            memset(d, 0, classes * sizeof(REAL));
            ((REAL *)loss)[row] = 0;
            continue;
        }
        const REAL top = NAME(largest)(x, classes);
        VREAL total = SPLAT(0);
        for (ptrdiff_t c = 0; c < classes; c += LANES) {
            const VREAL e = NAME(exponential)(NAME(load_part)(x + c, classes - c) - SPLAT(top));
            NAME(store_part)(d + c, e, classes - c);
            total += NAME(load_part)(d + c, classes - c);
        }
        const REAL sum = NAME(sum_lanes)(total), log_sum = NAME(logarithm)(sum);
        REAL wanted = 1, cost = 0;
        if (want) {
            wanted = 0;
            for (ptrdiff_t c = 0; c < classes; c++) {
                wanted += want[c];
                if (want[c] != 0) cost += want[c] * (log_sum - (x[c] - top));
            }
        } else {
            cost = log_sum - (x[label[row]] - top);
        }
        const VREAL scale = SPLAT(weight * wanted / sum);
        for (ptrdiff_t c = 0; c < classes; c += LANES) {
            VREAL v = scale * NAME(load_part)(d + c, classes - c);
            if (want) v -= SPLAT(weight) * NAME(load_part)(want + c, classes - c);
            NAME(store_part)(d + c, v, classes - c);
        }
        if (!want) d[label[row]] -= weight;
        ((REAL *)loss)[row] = weight * cost;
    }
}

/* out (columns,) = or += the sum of a's rows; eight registers of columns at a time, so that a row is
   read a few cache lines at a stretch */
static void NAME(sum_rows)(const void *a, ptrdiff_t a_step, ptrdiff_t rows, ptrdiff_t columns, int accumulate, void *out) {
    ptrdiff_t c = 0;
    for (; c + 8 * LANES <= columns; c += 8 * LANES) {
        REAL *to = (REAL *)out + c;
        VREAL sum[8];
        UNROLL for (int v = 0; v < 8; v++) sum[v] = accumulate ? NAME(load)(to + v * LANES) : SPLAT(0);
        for (ptrdiff_t row = 0; row < rows; row++) {
            const REAL *from = (const REAL *)a + row * a_step + c;
            UNROLL for (int v = 0; v < 8; v++) sum[v] += NAME(load)(from + v * LANES);
        }
        UNROLL for (int v = 0; v < 8; v++) NAME(store)(to + v * LANES, sum[v]);
    }
    for (; c < columns; c += LANES) {
        REAL *to = (REAL *)out + c;
        VREAL sum = accumulate ? NAME(load_part)(to, columns - c) : SPLAT(0);
        for (ptrdiff_t row = 0; row < rows; row++)
            sum += NAME(load_part)((const REAL *)a + row * a_step + c, columns - c);
        NAME(store_part)(to, sum, columns - c);
    }
}
