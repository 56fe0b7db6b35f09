/* Products with a matrix that is used as it lies: a dense layer over a window, and its backward.

   out (rows, units) = bias + a (rows, depth) times the matrix transposed, whose entry (unit, k) is
   w[unit * row_step + k * depth_step]; one of the steps is 1.

   A block of the matrix, at most DENSE_DEPTH columns of DENSE_BYTES together, is packed into the
   thread's scratch, and all rows pass over it while it lies in the second cache.  Between blocks the
   accumulators wait in `out`, which keeps their bits: the order is that of product.h, so the result
   is that of a product packed beforehand, whatever the blocks and the number of threads. */

#define DENSE_DEPTH 512
#define DENSE_BYTES ((ptrdiff_t)512 << 10)
#define DENSE_PANELS (DENSE_BYTES / (DENSE_DEPTH * 2 * LANES * (ptrdiff_t)sizeof(REAL)))
/* Packing a number takes the time of so many multiply-adds (measured). */
#define PACKING 8

typedef struct NAME(dense_job) {
    const REAL *packed, *bias, *a;
    ptrdiff_t a_step, depth, units; /* of this block; units counts from the block's first */
    int fresh;                      /* nothing waits in out yet */
    REAL *out;
    ptrdiff_t out_step;
} NAME(dense_job);

static void NAME(dense_block)(const void *context, const NAME(block) *b) {
    const NAME(dense_job) *job = context;
    const ptrdiff_t width = 2 * LANES;
    ALIGNED REAL acc[ROW_BLOCK * MAX_VECTORS * LANES];
    for (ptrdiff_t e = 0; e < b->rows * b->panels; e++) {
        const ptrdiff_t row = b->row + (b->panels == 1 ? e : 0), panel = b->panel + (b->panels == 1 ? 0 : e);
        const REAL *from = job->fresh ? job->bias : job->out + row * job->out_step;
        for (ptrdiff_t j = 0, unit = panel * width; j < width; j += LANES, unit += LANES)
            NAME(store)(acc + e * width + j,
                        from && unit < job->units ? NAME(load_part)(from + unit, job->units - unit) : SPLAT(0));
    }
    NAME(multiply)(2, b, job->a, job->a_step, job->depth, job->packed, acc, width,
                   NAME(panel_span)(2, job->depth, job->packed, b->next));
    for (ptrdiff_t e = 0; e < b->rows * b->panels; e++) {
        const ptrdiff_t row = b->row + (b->panels == 1 ? e : 0), panel = b->panel + (b->panels == 1 ? 0 : e);
        for (ptrdiff_t j = 0, unit = panel * width; j < width; j += LANES, unit += LANES)
            if (unit < job->units)
                NAME(store_part)(job->out + row * job->out_step + unit, NAME(load)(acc + e * width + j), job->units - unit);
    }
}

/* numbers of scratch that each thread needs */
static ptrdiff_t NAME(dense_scratch)(ptrdiff_t units, ptrdiff_t depth) {
    const ptrdiff_t width = 2 * LANES, panels = (units + width - 1) / width;
    return (panels < DENSE_PANELS ? panels : DENSE_PANELS) * width * (depth < DENSE_DEPTH ? depth : DENSE_DEPTH) + LANES_MAX;
}

static void NAME(dense)(const void *w, ptrdiff_t row_step, ptrdiff_t depth_step, ptrdiff_t units, ptrdiff_t depth,
                        const void *bias, const void *a, ptrdiff_t rows, void *out, void *scratch, int id, int count) {
    const ptrdiff_t width = 2 * LANES, panels = (units + width - 1) / width;
    REAL *packed = (REAL *)scratch + id * NAME(dense_scratch)(units, depth);
    ptrdiff_t first = 0, last = panels, row = 0, end = rows;
    /* Threads share the panels, or the rows, for which each of them packs the whole matrix. */
    const ptrdiff_t most = (panels + count - 1) / count;
    if (most * (rows + PACKING) <= panels * ((rows + count - 1) / count + PACKING))
        NAME(share)(panels, id, count, &first, &last);
    else
        NAME(share)(rows, id, count, &row, &end);
    /* blocks of even depth */
    const ptrdiff_t blocks = depth > DENSE_DEPTH ? (depth + DENSE_DEPTH - 1) / DENSE_DEPTH : 1;
    for (ptrdiff_t panel = first; panel < last; panel += DENSE_PANELS) {
        const ptrdiff_t some = last - panel < DENSE_PANELS ? last - panel : DENSE_PANELS, unit = panel * width;
        for (ptrdiff_t i = 0; i < blocks; i++) {
            const ptrdiff_t k = depth * i / blocks, deep = depth * (i + 1) / blocks - k;
            const recur_layout part = {1, 2, units - unit < some * width ? units - unit : some * width, deep};
            NAME(pack)(&part, (const REAL *)w + unit * row_step + k * depth_step, row_step, depth_step, packed);
            const NAME(dense_job) job = {packed, bias ? (const REAL *)bias + unit : NULL,
                                         (const REAL *)a + row * depth + k, depth, deep, units - unit, i == 0,
                                         (REAL *)out + row * units + unit, units};
            NAME(cover)(NAME(dense_block), &job, 2, end - row, 0, some, i);
        }
    }
}
#undef DENSE_DEPTH
#undef DENSE_BYTES
#undef DENSE_PANELS
#undef PACKING
