/* The weights' gradient, out (A, B) = or += a^T b over n rows of a (n, A) and b (n, B): for a window
   of steps n is T * batch, a holds gate gradients and b inputs or states.

   Both operands lie with n outermost, so a tile would stride through memory; they are copied first,
   OUTER_DEPTH rows at a time: b into panels of two registers a row, a into strips of one tile's
   height a row.  Every number of `out` is one accumulator, fed in the order of n. */

#define OUTER_DEPTH 256
/* columns of b at a time: their block stays in the second cache */
#define OUTER_WIDTH ((ptrdiff_t)(2048 / sizeof(REAL)))
/* columns of a that are copied at a time: whole cache lines, whatever the tile's height */
#define OUTER_GROUP (8 * TILE_ROWS_2)

static ptrdiff_t NAME(outer_scratch)(ptrdiff_t b_columns) {
    const ptrdiff_t width = b_columns < OUTER_WIDTH ? b_columns : OUTER_WIDTH;
    return OUTER_DEPTH * (width + 2 * LANES + OUTER_GROUP) + LANES_MAX;
}

#define STRIP_NAME(R) NAME(strip_tile_##R)
#define STRIP_TILE(R)                                                                                         \
    static void STRIP_NAME(R)(const REAL *a, ptrdiff_t depth, const REAL *panel, REAL *acc, ptrdiff_t acc_step) { \
        NAME(tile)(R, 1, 2, a, 1, R, depth, panel, 0, acc, acc_step, 0, (NAME(ahead)){0});                    \
    }
typedef void NAME(strip_function)(const REAL *a, ptrdiff_t depth, const REAL *panel, REAL *acc, ptrdiff_t acc_step);
STRIP_TILE(1) STRIP_TILE(2) STRIP_TILE(3) STRIP_TILE(4)
#if TILE_ROWS_2 >= 6
STRIP_TILE(5) STRIP_TILE(6)
#endif
#if TILE_ROWS_2 >= 8
STRIP_TILE(7) STRIP_TILE(8)
#endif
static NAME(strip_function) *const NAME(strip_tiles)[MAX_TILE_ROWS + 1] = {
    0, STRIP_NAME(1), STRIP_NAME(2), STRIP_NAME(3), STRIP_NAME(4),
#if TILE_ROWS_2 >= 6
    STRIP_NAME(5), STRIP_NAME(6),
#endif
#if TILE_ROWS_2 >= 8
    STRIP_NAME(7), STRIP_NAME(8),
#endif
};

/* `depth` rows of `columns` numbers into panels of `width` a row, the last filled up with zeros */
INLINE void NAME(copy_panels)(const REAL *from, ptrdiff_t step, ptrdiff_t depth, ptrdiff_t columns, ptrdiff_t width, REAL *to) {
    for (ptrdiff_t c = 0; c < columns; c += width)
        for (ptrdiff_t k = 0; k < depth; k++, to += width) {
            const ptrdiff_t n = columns - c;
            for (ptrdiff_t j = 0; j < width; j += LANES)
                NAME(store)(to + j, n > j ? NAME(load_part)(from + k * step + c + j, n - j) : SPLAT(0));
        }
}

/* `depth` rows of `columns` numbers into strips of TILE_ROWS_2 a row, the last as narrow as it is;
   row by row, since `from` is usually far away and its rows are whole cache lines */
INLINE void NAME(copy_strips)(const REAL *from, ptrdiff_t step, ptrdiff_t depth, ptrdiff_t columns, REAL *to) {
    const ptrdiff_t whole = columns / TILE_ROWS_2 * TILE_ROWS_2, rest = columns - whole;
    for (ptrdiff_t k = 0; k < depth; k++, from += step) {
        for (ptrdiff_t c = 0; c < columns; c += (ptrdiff_t)(64 / sizeof(REAL))) PREFETCH(from + 8 * step + c);
        for (ptrdiff_t c = 0; c < whole; c += TILE_ROWS_2)
            memcpy(to + c * depth + k * TILE_ROWS_2, from + c, TILE_ROWS_2 * sizeof(REAL));
        for (ptrdiff_t r = 0; r < rest; r++) to[whole * depth + k * rest + r] = from[whole + r];
    }
}

/* one strip of a with every panel of b, into `rows` rows of out from column 0 on */
static void NAME(outer_strip)(const REAL *strip, ptrdiff_t rows, ptrdiff_t depth, const REAL *panels, ptrdiff_t columns,
                              int fresh, REAL *out, ptrdiff_t out_step) {
    const ptrdiff_t width = 2 * LANES;
    for (ptrdiff_t c = 0; c < columns; c += width, panels += depth * width) {
        const ptrdiff_t n = columns - c < width ? columns - c : width;
        if (n == width && !fresh) {
            NAME(strip_tiles)[rows](strip, depth, panels, out + c, out_step);
            continue;
        }
        ALIGNED REAL acc[TILE_ROWS_2 * 2 * LANES];
        memset(acc, 0, sizeof acc);
        if (!fresh)
            for (ptrdiff_t r = 0; r < rows; r++) memcpy(acc + r * width, out + r * out_step + c, n * sizeof(REAL));
        NAME(strip_tiles)[rows](strip, depth, panels, acc, width);
        for (ptrdiff_t r = 0; r < rows; r++) memcpy(out + r * out_step + c, acc + r * width, n * sizeof(REAL));
    }
}

static void NAME(outer)(const void *a_, ptrdiff_t a_step, ptrdiff_t a_columns, const void *b_, ptrdiff_t b_step,
                        ptrdiff_t b_columns, ptrdiff_t n, int accumulate, void *out_, void *scratch, int id, int count) {
    const REAL *a = a_, *b = b_;
    REAL *out = out_, *strips = (REAL *)scratch + id * NAME(outer_scratch)(b_columns);
    REAL *panels = strips + OUTER_DEPTH * OUTER_GROUP;
    ptrdiff_t first, last;
    NAME(share)((a_columns + TILE_ROWS_2 - 1) / TILE_ROWS_2, id, count, &first, &last);
    first *= TILE_ROWS_2;
    last = last * TILE_ROWS_2 < a_columns ? last * TILE_ROWS_2 : a_columns;
    for (ptrdiff_t c = 0; c < b_columns; c += OUTER_WIDTH) {
        const ptrdiff_t width = b_columns - c < OUTER_WIDTH ? b_columns - c : OUTER_WIDTH;
        for (ptrdiff_t k = 0; k < n; k += OUTER_DEPTH) {
            const ptrdiff_t depth = n - k < OUTER_DEPTH ? n - k : OUTER_DEPTH;
            NAME(copy_panels)(b + k * b_step + c, b_step, depth, width, 2 * LANES, panels);
            for (ptrdiff_t group = first; group < last; group += OUTER_GROUP) {
                const ptrdiff_t rows = last - group < OUTER_GROUP ? last - group : OUTER_GROUP;
                NAME(copy_strips)(a + k * a_step + group, a_step, depth, rows, strips);
                for (ptrdiff_t r = 0; r < rows; r += TILE_ROWS_2) {
                    const ptrdiff_t height = rows - r < TILE_ROWS_2 ? rows - r : TILE_ROWS_2;
                    NAME(outer_strip)(strips + r * depth, height, depth, panels, width, k == 0 && !accumulate,
                                      out + (group + r) * b_columns + c, b_columns);
                }
            }
        }
    }
}
#undef OUTER_DEPTH
#undef OUTER_WIDTH
#undef OUTER_GROUP
#undef STRIP_NAME
