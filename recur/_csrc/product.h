/* Products with a packed matrix.

   Layout.  A matrix of gates * units rows and `depth` columns is cut into panels.  A panel holds
   vectors * LANES units of every gate, k by k: for each column k the weights of gate 0, then gate 1,
   ..., side by side.  So one pass over k feeds all gates of a unit, and reads the panel straight
   through.  Units past the last are zeros.

   Order.  Every output has one accumulator, started by the caller and then fed in the order of k,
   whatever the tile that computes it.  Accumulators travel through memory between blocks of k,
   which keeps their bits.  So the result for one row depends on that row alone. */

/* k at a time, so that the block of a panel stays in the second cache while all rows pass over it: it is
   read far slower than that gives, but each block costs a load and a store of the accumulators */
#define DEPTH_BLOCK 512
/* rows a caller may have under way at once: one accumulator row each */
#define ROW_BLOCK 64
#define MAX_VECTORS 4
#define LINE 64 /* bytes of a line of the caches */

static ptrdiff_t NAME(panels)(const recur_layout *m) {
    const ptrdiff_t width = m->vectors * LANES;
    return (m->units + width - 1) / width;
}
static ptrdiff_t NAME(panel_width)(const recur_layout *m) { return m->gates * m->vectors * LANES; }

/* A square of one register's side: row r of `from` becomes column r of `to`, which has `wanted` rows of
   `columns` numbers; rows from `rows` on are zeros. */
INLINE void NAME(transpose)(const REAL *from, ptrdiff_t from_step, ptrdiff_t rows, REAL *to, ptrdiff_t to_step,
                            ptrdiff_t wanted, ptrdiff_t columns) {
#if RECUR_VECTOR_BYTES && defined(__GNUC__) && !defined(__clang__)
    VREAL v[LANES_MAX];
    UNROLL for (int r = 0; r < LANES; r++)
        v[r] = r < rows ? NAME(load_part)(from + r * from_step, wanted) : SPLAT(0);
    /* each round swaps the halves off the diagonal of squares of side 2 * half */
    UNROLL for (int half = 1; half < LANES; half *= 2) {
        VINT upper, lower;
        UNROLL for (int j = 0; j < LANES; j++) {
            upper[j] = j & half ? (INT)LANES + j - half : j;
            lower[j] = j & half ? (INT)LANES + j : j + half;
        }
        UNROLL for (int r = 0; r < LANES; r++)
            if (!(r & half)) {
                const VREAL a = v[r], b = v[r + half];
                v[r] = __builtin_shuffle(a, b, upper);
                v[r + half] = __builtin_shuffle(a, b, lower);
            }
    }
    UNROLL for (int k = 0; k < LANES; k++)
        if (k < wanted) NAME(store_part)(to + k * to_step, v[k], columns);
#else
    for (ptrdiff_t k = 0; k < wanted && k < LANES; k++)
        for (ptrdiff_t j = 0; j < columns && j < LANES; j++)
            to[k * to_step + j] = j < rows ? from[j * from_step + k] : 0;
#endif
}

/* units of register `group` of a panel: the row of the first, and how many there are, which may be none */
INLINE ptrdiff_t NAME(group_units)(const recur_layout *m, ptrdiff_t panel, ptrdiff_t group, ptrdiff_t *row) {
    const ptrdiff_t gate = group / m->vectors, unit = (panel * m->vectors + group % m->vectors) * LANES;
    *row = gate * m->units + unit;
    return m->units - unit < LANES ? m->units - unit : LANES;
}

static void NAME(pack)(const recur_layout *m, const void *w, ptrdiff_t row_step, ptrdiff_t depth_step, void *packed) {
    const ptrdiff_t width = NAME(panel_width)(m), count = NAME(panels)(m);
    for (ptrdiff_t panel = 0; panel < count; panel++)
        for (ptrdiff_t group = 0; group < m->gates * m->vectors; group++) {
            ptrdiff_t row;
            const ptrdiff_t units = NAME(group_units)(m, panel, group, &row);
            const REAL *from = (const REAL *)w + row * row_step;
            REAL *to = (REAL *)packed + panel * m->depth * width + group * LANES;
            if (row_step == 1) {
                for (ptrdiff_t k = 0; k < m->depth; k++)
                    NAME(store)(to + k * width, units > 0 ? NAME(load_part)(from + k * depth_step, units) : SPLAT(0));
                continue;
            }
            for (ptrdiff_t k = 0; k < m->depth; k += LANES)
                NAME(transpose)(from + k, row_step, units, to + k * width, width, m->depth - k, LANES);
        }
}

/* Packed weights: panels as above, each of them `panel_size` WEIGHTs, of which the first SCALES a
   column are that column's scale, a REAL.  Narrow panels end in a gap, so that the scales of the next
   one are aligned. */
INLINE ptrdiff_t NAME(panel_size)(ptrdiff_t width, ptrdiff_t depth) {
#if SCALES
    return (width * (SCALES + depth) + SCALES - 1) / SCALES * SCALES;
#else
    return width * depth;
#endif
}

static ptrdiff_t NAME(weights_size)(const recur_layout *m) {
    return NAME(panels)(m) * NAME(panel_size)(NAME(panel_width)(m), m->depth) * (ptrdiff_t)sizeof(WEIGHT);
}

static void NAME(pack_weights)(const recur_layout *m, const void *w, ptrdiff_t row_step, ptrdiff_t depth_step,
                               void *packed) {
#if FORMAT == FULL
    NAME(pack)(m, w, row_step, depth_step, packed);
#else
    const ptrdiff_t unit_width = m->vectors * LANES, width = NAME(panel_width)(m), count = NAME(panels)(m);
    for (ptrdiff_t panel = 0; panel < count; panel++)
        for (ptrdiff_t column = 0; column < width; column++) {
            const ptrdiff_t unit = panel * unit_width + column % unit_width, gate = column / unit_width;
            const REAL *from = (const REAL *)w + (gate * m->units + unit) * row_step;
            const ptrdiff_t depth = unit < m->units ? m->depth : 0;
            WEIGHT *to = (WEIGHT *)packed + panel * NAME(panel_size)(width, m->depth);
            const REAL scale = NAME(scale_of)(from, depth_step, depth);
#if SCALES
            ((REAL *)to)[column] = scale / NAME(excess)((int)(width / LANES));
#endif
            to += SCALES * width + NAME(place)((int)(width / LANES), column);
            for (ptrdiff_t k = 0; k < m->depth; k++)
                to[k * width] = k < depth ? NAME(to_weight)(from[k * depth_step], scale) : 0;
        }
#endif
}

static void NAME(unpack)(const recur_layout *m, const void *packed, void *w) {
    const ptrdiff_t width = NAME(panel_width)(m), count = NAME(panels)(m);
    for (ptrdiff_t panel = 0; panel < count; panel++)
        for (ptrdiff_t group = 0; group < m->gates * m->vectors; group++) {
            ptrdiff_t row;
            const ptrdiff_t units = NAME(group_units)(m, panel, group, &row);
            const WEIGHT *from = (const WEIGHT *)packed + panel * NAME(panel_size)(width, m->depth);
            REAL *to = (REAL *)w + row * m->depth;
#if FORMAT == FULL
            for (ptrdiff_t k = 0; k < m->depth; k += LANES)
                NAME(transpose)(from + k * width + group * LANES, width, m->depth - k, to + k, m->depth, units, m->depth - k);
#else
            for (ptrdiff_t j = 0; j < units; j++, to += m->depth) {
#if SCALES
                const REAL scale = ((const REAL *)from)[group * LANES + j] * NAME(excess)((int)(width / LANES));
#else
                const REAL scale = 1;
#endif
                const WEIGHT *column = from + SCALES * width + NAME(place)((int)(width / LANES), group * LANES + j);
                for (ptrdiff_t k = 0; k < m->depth; k++) to[k] = scale * NAME(from_weight)(column[k * width]);
            }
#endif
        }
}

#if FORMAT == F16 && RECUR_VECTOR_BYTES == 64
/* One row by half registers, which gives the same bits: there is no work to share what was widened,
   and to widen into two halves takes 0.7 of the time of a whole register where registers of 64 bytes
   are worked on in halves (measured: Zen 4). */
INLINE void NAME(half_tile)(const int PANELS, const int VECTORS, const REAL *a, ptrdiff_t k_step, ptrdiff_t depth,
                            const WEIGHT *panel, ptrdiff_t panel_step, REAL *acc, ptrdiff_t acc_step) {
    __m256 sum[4][2 * MAX_VECTORS];
    UNROLL for (int p = 0; p < PANELS; p++)
        UNROLL for (int v = 0; v < 2 * VECTORS; v++) sum[p][v] = _mm256_loadu_ps(acc + p * acc_step + v * 8);
    for (ptrdiff_t k = 0; k < depth; k++, panel += VECTORS * LANES) {
        const __m256 x = _mm256_broadcast_ss(a + k * k_step);
        UNROLL for (int p = 0; p < PANELS; p++)
            UNROLL for (int v = 0; v < 2 * VECTORS; v++) {
                const __m128i halves = _mm_loadu_si128((const __m128i *)(panel + p * panel_step + v * 8));
                sum[p][v] = _mm256_fmadd_ps(x, _mm256_maskz_cvtph_ps(0xff, halves), sum[p][v]);
            }
    }
    UNROLL for (int p = 0; p < PANELS; p++)
        UNROLL for (int v = 0; v < 2 * VECTORS; v++) _mm256_storeu_ps(acc + p * acc_step + v * 8, sum[p][v]);
}
#endif

/* Memory that a tile asks for meanwhile: two lines from `at` on, `step` bytes further each k. */
typedef struct NAME(ahead) {
    const char *at;
    ptrdiff_t step;
} NAME(ahead);

/* ROWS rows of `a` times PANELS panels of VECTORS registers; one of ROWS and PANELS is 1.  Number k
   of row r of `a` is at a[r * a_step + k * k_step].  acc holds one row of `acc_step` numbers for each
   row or panel. */
INLINE void NAME(tile)(const int ROWS, const int PANELS, const int VECTORS, const REAL *a, ptrdiff_t a_step,
                       ptrdiff_t k_step, ptrdiff_t depth, const WEIGHT *panel, ptrdiff_t panel_step, REAL *acc,
                       ptrdiff_t acc_step, const int FETCH, NAME(ahead) ahead) {
#if FORMAT == F16 && RECUR_VECTOR_BYTES == 64
    if (ROWS == 1) {
        NAME(half_tile)(PANELS, VECTORS, a, k_step, depth, panel, panel_step, acc, acc_step);
        return;
    }
#endif
    VREAL sum[MAX_TILE_ROWS][MAX_VECTORS];
    UNROLL for (int e = 0; e < ROWS * PANELS; e++)
        UNROLL for (int v = 0; v < VECTORS; v++) sum[e][v] = NAME(load)(acc + e * acc_step + v * LANES);
    for (ptrdiff_t k = 0; k < depth; k++, panel += VECTORS * LANES) {
        if (FETCH) {
            PREFETCH_FAR(ahead.at);
            PREFETCH_FAR(ahead.at + LINE);
            ahead.at += ahead.step;
        }
        UNROLL for (int p = 0; p < PANELS; p++) {
            VREAL w[MAX_VECTORS];
            NAME(load_row)(VECTORS, panel + p * panel_step, w);
            /* measured: fetching ahead helps narrow panels that several rows share, and only those */
            if (ROWS > 1 && VECTORS == 2)
                UNROLL for (int v = 0; v < VECTORS; v++) PREFETCH(panel + (16 * VECTORS + v) * LANES);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const VREAL x = NAME(splat)(a[r * a_step + k * k_step]);
                UNROLL for (int v = 0; v < VECTORS; v++) sum[r + p][v] = NAME(madd)(x, w[v], sum[r + p][v]);
            }
        }
    }
    UNROLL for (int e = 0; e < ROWS * PANELS; e++)
        UNROLL for (int v = 0; v < VECTORS; v++) NAME(store)(acc + e * acc_step + v * LANES, sum[e][v]);
}

typedef void NAME(tile_function)(const REAL *a, ptrdiff_t a_step, ptrdiff_t depth, const WEIGHT *panel,
                                 ptrdiff_t panel_step, REAL *acc, ptrdiff_t acc_step, NAME(ahead) ahead);
#define TILE_NAME(R, P, V) NAME(tile_##R##_##P##_##V)
#define TILE(R, P, V)                                                                              \
    static void TILE_NAME(R, P, V)(const REAL *a, ptrdiff_t a_step, ptrdiff_t depth, const WEIGHT *panel, \
                                   ptrdiff_t panel_step, REAL *acc, ptrdiff_t acc_step, NAME(ahead) ahead) { \
        NAME(tile)(R, P, V, a, a_step, 1, depth, panel, panel_step, acc, acc_step, (R) > 1, ahead); \
    }
TILE(1, 1, 2) TILE(2, 1, 2) TILE(3, 1, 2) TILE(4, 1, 2)
TILE(1, 1, 3) TILE(2, 1, 3) TILE(3, 1, 3) TILE(4, 1, 3)
TILE(1, 1, 4) TILE(2, 1, 4) TILE(3, 1, 4)
TILE(1, 2, 2) TILE(1, 3, 2) TILE(1, 4, 2) TILE(1, 2, 3) TILE(1, 3, 3) TILE(1, 2, 4)
#if REGISTERS >= 16
TILE(5, 1, 2) TILE(6, 1, 2)
#endif
#if REGISTERS >= 32
TILE(7, 1, 2) TILE(8, 1, 2)
TILE(5, 1, 3) TILE(6, 1, 3) TILE(7, 1, 3)
TILE(4, 1, 4) TILE(5, 1, 4) TILE(6, 1, 4)
#endif

/* [vectors][rows]: the tiles of several rows, widest first in use */
static NAME(tile_function) *const NAME(row_tiles)[MAX_VECTORS + 1][MAX_TILE_ROWS + 1] = {
#if REGISTERS >= 32
    [2] = {0, TILE_NAME(1, 1, 2), TILE_NAME(2, 1, 2), TILE_NAME(3, 1, 2), TILE_NAME(4, 1, 2),
           TILE_NAME(5, 1, 2), TILE_NAME(6, 1, 2), TILE_NAME(7, 1, 2), TILE_NAME(8, 1, 2)},
    [3] = {0, TILE_NAME(1, 1, 3), TILE_NAME(2, 1, 3), TILE_NAME(3, 1, 3), TILE_NAME(4, 1, 3),
           TILE_NAME(5, 1, 3), TILE_NAME(6, 1, 3), TILE_NAME(7, 1, 3)},
    [4] = {0, TILE_NAME(1, 1, 4), TILE_NAME(2, 1, 4), TILE_NAME(3, 1, 4), TILE_NAME(4, 1, 4),
           TILE_NAME(5, 1, 4), TILE_NAME(6, 1, 4)},
#else
    [2] = {0, TILE_NAME(1, 1, 2), TILE_NAME(2, 1, 2), TILE_NAME(3, 1, 2), TILE_NAME(4, 1, 2),
           TILE_NAME(5, 1, 2), TILE_NAME(6, 1, 2)},
    [3] = {0, TILE_NAME(1, 1, 3), TILE_NAME(2, 1, 3), TILE_NAME(3, 1, 3), TILE_NAME(4, 1, 3)},
    [4] = {0, TILE_NAME(1, 1, 4), TILE_NAME(2, 1, 4), TILE_NAME(3, 1, 4)},
#endif
};
static const int NAME(tile_rows)[MAX_VECTORS + 1] = {0, 0, TILE_ROWS_2, TILE_ROWS_3, TILE_ROWS_4};

/* [vectors][panels]: the tiles of one row, with as many panels as hide the latency of the adds */
static NAME(tile_function) *const NAME(panel_tiles)[MAX_VECTORS + 1][5] = {
    [2] = {0, TILE_NAME(1, 1, 2), TILE_NAME(1, 2, 2), TILE_NAME(1, 3, 2), TILE_NAME(1, 4, 2)},
    [3] = {0, TILE_NAME(1, 1, 3), TILE_NAME(1, 2, 3), TILE_NAME(1, 3, 3)},
    [4] = {0, TILE_NAME(1, 1, 4), TILE_NAME(1, 2, 4)},
};
static const int NAME(panels_at_once)[MAX_VECTORS + 1] = {0, 0, 4, 3, 2};

/* Weights that are read next: `size` bytes.  Several tiles share a panel, and only the first has to wait
   for it; if all of them ask for a part of the next one, a matrix beyond the second cache comes at an
   even pace while it is needed. */
typedef struct NAME(span) {
    const WEIGHT *at;
    ptrdiff_t size;
} NAME(span);

/* what tile i of `tiles`, `depth` deep, asks for: one line or two each k, the first tiles first; then what
   is near anyway */
INLINE NAME(ahead) NAME(part_of)(const NAME(span) *next, ptrdiff_t i, ptrdiff_t tiles, ptrdiff_t depth,
                                 const WEIGHT *near) {
    ptrdiff_t step = (next->size + tiles * depth - 1) / (tiles * depth);
    step = step < LINE ? LINE : step > 2 * LINE ? 2 * LINE : step;
    if (i * step * depth >= next->size) return (NAME(ahead)){(const char *)near, 0};
    return (NAME(ahead)){(const char *)next->at + i * step * depth, step};
}

/* acc[r] += a[r] times one panel, for up to ROW_BLOCK rows, while what is read next comes nearer */
static void NAME(feed_rows)(int vectors, ptrdiff_t rows, const REAL *a, ptrdiff_t a_step, ptrdiff_t depth,
                            const WEIGHT *panel, REAL *acc, ptrdiff_t acc_step, NAME(span) next) {
    const ptrdiff_t most = NAME(tile_rows)[vectors], tiles = (rows + most - 1) / most;
    const ptrdiff_t width = vectors * LANES, block_size = DEPTH_BLOCK * width * (ptrdiff_t)sizeof(WEIGHT);
    for (ptrdiff_t k = 0; k < depth; k += DEPTH_BLOCK) {
        const ptrdiff_t block = depth - k < DEPTH_BLOCK ? depth - k : DEPTH_BLOCK;
        const WEIGHT *part = panel + k * width;
        NAME(span) after = next;
        if (k + block < depth)
            after = (NAME(span)){part + block * width, (depth - k - block) * width * (ptrdiff_t)sizeof(WEIGHT)};
        if (after.size > block_size) after.size = block_size;
        if (tiles == 1) after.size = 0; /* one tile reads straight on, which the hardware follows */
        for (ptrdiff_t i = 0, row = 0; i < tiles; i++) {
            const ptrdiff_t end = rows * (i + 1) / tiles; /* tiles of even height */
            NAME(row_tiles)[vectors][end - row](a + row * a_step + k, a_step, block, part, 0, acc + row * acc_step,
                                                acc_step, NAME(part_of)(&after, i, tiles, block, part));
            row = end;
        }
    }
}

/* acc[e] += a times panel e, panels `panel_step` WEIGHTs apart: row r of panel p if panels is 1, else the one row with `panels` panels */
static void NAME(feed)(int vectors, ptrdiff_t rows, ptrdiff_t panels, const REAL *a, ptrdiff_t a_step,
                       ptrdiff_t depth, const WEIGHT *panel, ptrdiff_t panel_step, REAL *acc, ptrdiff_t acc_step,
                       NAME(span) next) {
    if (panels == 1)
        NAME(feed_rows)(vectors, rows, a, a_step, depth, panel, acc, acc_step, next);
    else
        NAME(panel_tiles)[vectors][panels](a, a_step, depth, panel, panel_step, acc, acc_step, (NAME(ahead)){0});
}

/* A block of work: rows row..row+rows of one panel, or row `row` of several panels.  Its entry e is
   one row of one panel. */
typedef struct NAME(block) {
    ptrdiff_t row, rows, panel, panels;
    ptrdiff_t next; /* the panel of the block after this one; below 0: none */
} NAME(block);
typedef void NAME(block_function)(const void *job, const NAME(block) *);

/* one panel of packed weights, or nothing if `panel` is below 0 */
INLINE NAME(span) NAME(panel_span)(int vectors, ptrdiff_t depth, const void *packed, ptrdiff_t panel) {
    const ptrdiff_t size = NAME(panel_size)(vectors * LANES, depth);
    if (panel < 0) return (NAME(span)){NULL, 0};
    return (NAME(span)){(const WEIGHT *)packed + panel * size, size * (ptrdiff_t)sizeof(WEIGHT)};
}

/* acc[e] += rows of `a` (which begins at row 0) times packed weights, for the entries of a block; `next` is
   what will be read after it.
   With scales the products of whole numbers are summed from zero, then scaled, then added. */
INLINE void NAME(multiply)(int vectors, const NAME(block) *b, const REAL *a, ptrdiff_t a_step, ptrdiff_t depth,
                           const void *packed, REAL *acc, ptrdiff_t acc_step, NAME(span) next) {
    const ptrdiff_t width = vectors * LANES, panel_step = NAME(panel_size)(width, depth);
    const WEIGHT *panel = (const WEIGHT *)packed + b->panel * panel_step;
    a += b->row * a_step;
#if SCALES == 0
    NAME(feed)(vectors, b->rows, b->panels, a, a_step, depth, panel, panel_step, acc, acc_step, next);
#else
    ALIGNED REAL sums[ROW_BLOCK * MAX_VECTORS * LANES];
    const ptrdiff_t entries = b->rows * b->panels;
    memset(sums, 0, entries * width * sizeof(REAL));
    NAME(feed)(vectors, b->rows, b->panels, a, a_step, depth, panel + SCALES * width, panel_step, sums, width, next);
    for (ptrdiff_t e = 0; e < entries; e++) {
        const REAL *scales = (const REAL *)(panel + (b->panels == 1 ? 0 : e) * panel_step);
        for (ptrdiff_t j = 0; j < width; j += LANES) {
            REAL *to = acc + e * acc_step + j;
            NAME(store)(to, NAME(madd)(NAME(load)(sums + e * width + j), NAME(load)(scales + j), NAME(load)(to)));
        }
    }
#endif
}

/* Cover rows x panels [first, last) by blocks: number `pass` of several passes over the same panels.
   Every other pass goes from the last panel to the first, so that it begins with what the one before
   left in the caches. */
INLINE void NAME(cover)(NAME(block_function) *work, const void *job, int vectors, ptrdiff_t rows,
                        ptrdiff_t first, ptrdiff_t last, ptrdiff_t pass) {
    const ptrdiff_t most = rows == 1 ? NAME(panels_at_once)[vectors] : 1;
    const ptrdiff_t blocks = (last - first + most - 1) / most;
    for (ptrdiff_t row = 0; row < rows; row += ROW_BLOCK, pass++) {
        const ptrdiff_t step = pass % 2 ? -most : most;
        ptrdiff_t p = first + (pass % 2 ? most * (blocks - 1) : 0);
        for (ptrdiff_t i = 1; i <= blocks; i++, p += step) {
            const NAME(block) b = {row, rows - row < ROW_BLOCK ? rows - row : ROW_BLOCK, p,
                                   last - p < most ? last - p : most, i < blocks ? p + step : -1};
            work(job, &b);
        }
    }
}

/* Entries of a block in a matrix of rows of gates * units, `step` numbers from row to row, to and from
   accumulators. */
INLINE void NAME(load_block)(const recur_layout *m, const NAME(block) *b, const REAL *from, ptrdiff_t step, REAL *acc,
                             ptrdiff_t acc_step) {
    for (ptrdiff_t e = 0; e < b->rows * b->panels; e++) {
        const ptrdiff_t row = b->row + (b->panels == 1 ? e : 0), panel = b->panel + (b->panels == 1 ? 0 : e);
        for (ptrdiff_t g = 0; g < m->gates; g++)
            for (ptrdiff_t v = 0; v < m->vectors; v++) {
                const ptrdiff_t unit = (panel * m->vectors + v) * LANES;
                NAME(store)(acc + e * acc_step + (g * m->vectors + v) * LANES,
                            unit < m->units ? NAME(load_part)(from + row * step + g * m->units + unit, m->units - unit)
                                            : SPLAT(0));
            }
    }
}
INLINE void NAME(store_block)(const recur_layout *m, const NAME(block) *b, REAL *to, ptrdiff_t step, const REAL *acc,
                              ptrdiff_t acc_step) {
    for (ptrdiff_t e = 0; e < b->rows * b->panels; e++) {
        const ptrdiff_t row = b->row + (b->panels == 1 ? e : 0), panel = b->panel + (b->panels == 1 ? 0 : e);
        for (ptrdiff_t g = 0; g < m->gates; g++)
            for (ptrdiff_t v = 0; v < m->vectors; v++) {
                const ptrdiff_t unit = (panel * m->vectors + v) * LANES;
                if (unit < m->units)
                    NAME(store_part)(to + row * step + g * m->units + unit,
                                     NAME(load)(acc + e * acc_step + (g * m->vectors + v) * LANES), m->units - unit);
            }
    }
}
/* every entry starts from its part of one row laid out as the panels are; NULL: from zeros */
INLINE void NAME(start_block)(const NAME(block) *b, const REAL *row, ptrdiff_t width, REAL *acc, ptrdiff_t acc_step) {
    for (ptrdiff_t e = 0; e < b->rows * b->panels; e++) {
        const ptrdiff_t panel = b->panel + (b->panels == 1 ? 0 : e);
        for (ptrdiff_t j = 0; j < width; j += LANES)
            NAME(store)(acc + e * acc_step + j, row ? NAME(load)(row + panel * width + j) : SPLAT(0));
    }
}

typedef struct NAME(product_job) {
    const recur_layout *layout;
    const void *packed;
    const REAL *bias, *init, *a;
    ptrdiff_t a_step;
    REAL *out;
} NAME(product_job);

static void NAME(product_block)(const void *context, const NAME(block) *b) {
    const NAME(product_job) *job = context;
    const recur_layout *m = job->layout;
    const int vectors = m->gates * m->vectors;
    const ptrdiff_t width = vectors * LANES, columns = m->gates * m->units;
    ALIGNED REAL acc[ROW_BLOCK * MAX_VECTORS * LANES];
    if (job->init)
        NAME(load_block)(m, b, job->init, columns, acc, width);
    else
        NAME(start_block)(b, job->bias, width, acc, width);
    NAME(multiply)(vectors, b, job->a, job->a_step, m->depth, job->packed, acc, width,
                   NAME(panel_span)(vectors, m->depth, job->packed, b->next));
    NAME(store_block)(m, b, job->out, columns, acc, width);
}

/* the panels that thread `id` of `count` works on */
INLINE void NAME(share)(ptrdiff_t panels, int id, int count, ptrdiff_t *first, ptrdiff_t *last) {
    *first = panels * id / count;
    *last = panels * (id + 1) / count;
}

static void NAME(product)(const recur_layout *m, const void *packed, const void *bias, const void *init,
                          const void *a, ptrdiff_t a_step, ptrdiff_t rows, void *out, int id, int count) {
    const NAME(product_job) job = {m, packed, bias, init, a, a_step, out};
    ptrdiff_t first, last;
    NAME(share)(NAME(panels)(m), id, count, &first, &last);
    NAME(cover)(NAME(product_block), &job, m->gates * m->vectors, rows, first, last, 0);
}
