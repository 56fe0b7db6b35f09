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
    recur_layout part; /* of the matrix */
    const REAL *packed, *bias, *a;
    ptrdiff_t a_step;
    int fresh; /* nothing waits in out yet */
    REAL *out;
    ptrdiff_t out_step;
} NAME(dense_job);

static void NAME(dense_block)(const void *context, const NAME(block) *b) {
    const NAME(dense_job) *job = context;
    const ptrdiff_t width = 2 * LANES, depth = job->part.depth;
    ALIGNED REAL acc[ROW_BLOCK * MAX_VECTORS * LANES];
    if (!job->fresh)
        NAME(load_block)(&job->part, b, job->out, job->out_step, acc, width);
    else if (job->bias)
        NAME(load_block)(&job->part, b, job->bias, 0, acc, width);
    else
        NAME(start_block)(b, NULL, width, acc, width);
    NAME(multiply)(2, b, job->a, job->a_step, depth, job->packed, acc, width,
                   NAME(panel_span)(2, depth, job->packed, b->next));
    NAME(store_block)(&job->part, b, job->out, job->out_step, acc, width);
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
            const NAME(dense_job) job = {part, packed, bias ? (const REAL *)bias + unit : NULL,
                                         (const REAL *)a + row * depth + k, depth, i == 0,
                                         (REAL *)out + row * units + unit, units};
            NAME(cover)(NAME(dense_block), &job, 2, end - row, 0, some, i);
        }
    }
}
#undef DENSE_DEPTH
#undef DENSE_BYTES
#undef DENSE_PANELS
#undef PACKING
