/* Forward of the four cells: a step is a product fed to accumulators and a gate epilogue on them.

   A block (product.h) starts its accumulators at the bias (or at bias + Wi x, multiplied ahead for
   several steps), feeds them with x and then with h, and applies the gates to them: no array of
   sums is ever written.  A unit's results need all of h but only its own c, so h has to be written
   to other memory, c may be updated in place. */

typedef struct NAME(step) {
    const recur_cell *cell;
    recur_layout wi;
    ptrdiff_t t, hidden;
    const int64_t *lengths;
    const REAL *x;         /* (B, I), or NULL when `projected` holds bias + Wi x */
    const REAL *projected; /* (B, G*H) */
    const REAL *h, *c;
    REAL *h_out, *c_out;
    REAL *y, *gates, *hn;  /* each may be NULL */
    REAL *z, *nx, *rh;     /* GRUv3's scratch (B, H): update gate, Wi_n x + b_n, r * h */
} NAME(step);

INLINE int NAME(is_live)(const NAME(step) *s, ptrdiff_t row) { return !s->lengths || s->t < s->lengths[row]; }

/* h' and y at units u.. of a row; a sample past its length keeps its h and puts out 0 */
INLINE void NAME(put)(const NAME(step) *s, ptrdiff_t row, ptrdiff_t u, VREAL h) {
    const ptrdiff_t at = row * s->hidden + u, n = s->hidden - u;
    const int live = NAME(is_live)(s, row);
    if (s->y) NAME(store_part)(s->y + at, live ? h : SPLAT(0), n);
    NAME(store_part)(s->h_out + at, live ? h : NAME(load_part)(s->h + at, n), n);
}

INLINE void NAME(put_gate)(const NAME(step) *s, int gates, int gate, ptrdiff_t row, ptrdiff_t u, VREAL v) {
    if (s->gates) NAME(store_part)(s->gates + (row * gates + gate) * s->hidden + u, v, s->hidden - u);
}

/* the gates' sigmoid: two choices only, so that the compiler keeps both inline */
INLINE VREAL NAME(gate)(int act, VREAL x) {
    return act == RECUR_HARD_SIGMOID ? NAME(hard_sigmoid)(x) : NAME(sigmoid)(x);
}

static void NAME(rnn_units)(const NAME(step) *s, ptrdiff_t row, ptrdiff_t u, const REAL *acc) {
    for (int v = 0; v < 2; v++, u += LANES, acc += LANES)
        if (u < s->hidden) NAME(put)(s, row, u, NAME(activate)(s->cell->act, NAME(load)(acc)));
}

static void NAME(lstm_units)(const NAME(step) *s, ptrdiff_t row, ptrdiff_t u, const REAL *acc) {
    const int act = s->cell->act;
    const ptrdiff_t at = row * s->hidden + u, n = s->hidden - u;
    const REAL *peep = s->cell->peephole;
    const ptrdiff_t peep_step = (s->hidden + LANES - 1) / LANES * LANES;
    VREAL i = NAME(load)(acc), f = NAME(load)(acc + LANES);
    const VREAL candidate = NAME(hyperbolic_tangent)(NAME(load)(acc + 2 * LANES));
    VREAL o = NAME(load)(acc + 3 * LANES);
    const VREAL c_prev = NAME(load_part)(s->c + at, n);
    if (peep) {
        i = NAME(madd)(NAME(load)(peep + u), c_prev, i);
        f = NAME(madd)(NAME(load)(peep + peep_step + u), c_prev, f);
    }
    i = NAME(gate)(act, i);
    f = NAME(gate)(act, f);
    const VREAL c = NAME(madd)(f, c_prev, i * candidate);
    if (peep) o = NAME(madd)(NAME(load)(peep + 2 * peep_step + u), c, o);
    o = NAME(gate)(act, o);
    NAME(store_part)(s->c_out + at, NAME(is_live)(s, row) ? c : c_prev, n);
    NAME(put)(s, row, u, o * NAME(hyperbolic_tangent)(c));
    NAME(put_gate)(s, 4, 0, row, u, i);
    NAME(put_gate)(s, 4, 1, row, u, f);
    NAME(put_gate)(s, 4, 2, row, u, candidate);
    NAME(put_gate)(s, 4, 3, row, u, o);
}

/* (1 - z) n + z h */
INLINE VREAL NAME(blend)(VREAL z, VREAL candidate, VREAL h) {
    return NAME(madd)(z, h - candidate, candidate);
}

/* nx: Wi_n x + b_n of these units; acc: the sums of r, z, and Wh_n h + bh */
static void NAME(gru_units)(const NAME(step) *s, ptrdiff_t row, ptrdiff_t u, const REAL *acc, const REAL *nx) {
    const int act = s->cell->act;
    const ptrdiff_t at = row * s->hidden + u, n = s->hidden - u;
    const VREAL r = NAME(gate)(act, NAME(load)(acc)), z = NAME(gate)(act, NAME(load)(acc + LANES));
    const VREAL hn = NAME(load)(acc + 2 * LANES);
    const VREAL candidate = NAME(hyperbolic_tangent)(NAME(madd)(r, hn, NAME(load)(nx)));
    NAME(put)(s, row, u, NAME(blend)(z, candidate, NAME(load_part)(s->h + at, n)));
    NAME(put_gate)(s, 3, 0, row, u, r);
    NAME(put_gate)(s, 3, 1, row, u, z);
    NAME(put_gate)(s, 3, 2, row, u, candidate);
    if (s->hn) NAME(store_part)(s->hn + at, hn, n);
}

/* first half of a GRUv3 step; acc: the sums of r, z, and Wi_n x + b_n */
static void NAME(gruv3_gates)(const NAME(step) *s, ptrdiff_t row, ptrdiff_t u, const REAL *acc) {
    const int act = s->cell->act;
    const ptrdiff_t at = row * s->hidden + u, n = s->hidden - u;
    const VREAL r = NAME(gate)(act, NAME(load)(acc)), z = NAME(gate)(act, NAME(load)(acc + LANES));
    NAME(put_gate)(s, 3, 0, row, u, r);
    NAME(put_gate)(s, 3, 1, row, u, z);
    NAME(store_part)(s->z + at, z, n);
    NAME(store_part)(s->nx + at, NAME(load)(acc + 2 * LANES), n);
    NAME(store_part)(s->rh + at, r * NAME(load_part)(s->h + at, n), n);
}

/* second half; acc: Wi_n x + b_n + Whh (r h) */
static void NAME(gruv3_units)(const NAME(step) *s, ptrdiff_t row, ptrdiff_t u, const REAL *acc) {
    for (int v = 0; v < 2; v++, u += LANES, acc += LANES) {
        if (u >= s->hidden) return;
        const ptrdiff_t at = row * s->hidden + u, n = s->hidden - u;
        const VREAL candidate = NAME(hyperbolic_tangent)(NAME(load)(acc));
        NAME(put)(s, row, u, NAME(blend)(NAME(load_part)(s->z + at, n), candidate, NAME(load_part)(s->h + at, n)));
        NAME(put_gate)(s, 3, 2, row, u, candidate);
    }
}

/* One block of a step, compiled for each KIND.  GRU's candidate has two sums, one of x and one of h:
   after x the first is put aside, and the accumulator starts again for h. */
INLINE void NAME(step_block)(const int KIND, const NAME(step) *s, const NAME(block) *b) {
    const recur_cell *cell = s->cell;
    const int gates = KIND == RECUR_LSTM ? 4 : KIND == RECUR_RNN ? 1 : 3, unit_vectors = KIND == RECUR_RNN ? 2 : 1;
    const int vectors = gates * unit_vectors, h_vectors = KIND == RECUR_GRUV3 ? 2 : vectors;
    const recur_layout wi = {gates, unit_vectors, s->hidden, cell->n_in};
    const ptrdiff_t width = vectors * LANES, entries = b->rows * b->panels;
    ALIGNED REAL acc[ROW_BLOCK * MAX_VECTORS * LANES];
    ALIGNED REAL nx[ROW_BLOCK * LANES]; /* GRU */
    if (s->x) {
        NAME(start_block)(b, cell->bias, width, acc, width);
        NAME(multiply)(vectors, b, s->x, cell->n_in, cell->n_in, cell->wi, acc, width,
                       NAME(panel_span)(h_vectors, s->hidden, cell->wh, b->panel));
    } else {
        NAME(load_block)(&wi, b, s->projected, wi.gates * wi.units, acc, width);
    }
    if (KIND == RECUR_GRU)
        for (ptrdiff_t e = 0; e < entries; e++) {
            const ptrdiff_t panel = b->panel + (b->panels == 1 ? 0 : e);
            REAL *n = acc + e * width + 2 * LANES;
            NAME(store)(nx + e * LANES, NAME(load)(n));
            NAME(store)(n, NAME(load)((const REAL *)cell->bias_h + panel * LANES));
        }
    NAME(multiply)(h_vectors, b, s->h, s->hidden, s->hidden, cell->wh, acc, width,
                   s->x ? NAME(panel_span)(vectors, cell->n_in, cell->wi, b->next)
                        : NAME(panel_span)(h_vectors, s->hidden, cell->wh, b->next));
    for (ptrdiff_t e = 0; e < entries; e++) {
        const ptrdiff_t row = b->row + (b->panels == 1 ? e : 0), panel = b->panel + (b->panels == 1 ? 0 : e);
        const ptrdiff_t u = panel * unit_vectors * LANES;
        switch (KIND) {
        case RECUR_LSTM: NAME(lstm_units)(s, row, u, acc + e * width); break;
        case RECUR_GRU: NAME(gru_units)(s, row, u, acc + e * width, nx + e * LANES); break;
        case RECUR_GRUV3: NAME(gruv3_gates)(s, row, u, acc + e * width); break;
        default: NAME(rnn_units)(s, row, u, acc + e * width);
        }
    }
}
static void NAME(rnn_block)(const void *s, const NAME(block) *b) { NAME(step_block)(RECUR_RNN, s, b); }
static void NAME(lstm_block)(const void *s, const NAME(block) *b) { NAME(step_block)(RECUR_LSTM, s, b); }
static void NAME(gru_block)(const void *s, const NAME(block) *b) { NAME(step_block)(RECUR_GRU, s, b); }
static void NAME(gruv3_block)(const void *s, const NAME(block) *b) { NAME(step_block)(RECUR_GRUV3, s, b); }
static NAME(block_function) *const NAME(step_blocks)[] = {
    [RECUR_RNN] = NAME(rnn_block), [RECUR_LSTM] = NAME(lstm_block),
    [RECUR_GRU] = NAME(gru_block), [RECUR_GRUV3] = NAME(gruv3_block)};

static void NAME(candidate_block)(const void *job, const NAME(block) *b) {
    const NAME(step) *s = job;
    const recur_layout whh = {1, 2, s->hidden, s->hidden};
    const ptrdiff_t width = 2 * LANES;
    ALIGNED REAL acc[ROW_BLOCK * MAX_VECTORS * LANES];
    NAME(load_block)(&whh, b, s->nx, whh.units, acc, width);
    NAME(multiply)(2, b, s->rh, s->hidden, s->hidden, s->cell->whh, acc, width,
                   NAME(panel_span)(2, s->hidden, s->cell->whh, b->next));
    for (ptrdiff_t e = 0; e < b->rows * b->panels; e++)
        NAME(gruv3_units)(s, b->row + (b->panels == 1 ? e : 0), (b->panel + (b->panels == 1 ? 0 : e)) * width,
                          acc + e * width);
}

static void NAME(forward)(const recur_cell *cell, const recur_forward *f, int id, int count, void *barrier) {
    const ptrdiff_t B = f->batch, H = cell->n_hidden;
    NAME(step) s = {.cell = cell, .hidden = H, .lengths = f->lengths};
    s.wi = recur_input_layout(cell->kind, cell->n_in, H);
    const recur_layout whh = {1, 2, H, H};
    const ptrdiff_t columns = s.wi.gates * H;
    ptrdiff_t first, last, first_n, last_n;
    NAME(share)(NAME(panels)(&s.wi), id, count, &first, &last);
    NAME(share)(NAME(panels)(&whh), id, count, &first_n, &last_n);
    if (f->scratch) {
        s.z = f->scratch;
        s.nx = s.z + B * H;
        s.rh = s.nx + B * H;
    }
    for (ptrdiff_t t = 0; t < f->steps; t++) {
        const REAL *x = (const REAL *)f->x + t * B * cell->n_in;
        if (f->projected) {
            const ptrdiff_t ahead = t % f->chunk, left = f->steps - t;
            if (ahead == 0) /* a thread reads only the units that it wrote: no barrier */
                NAME(product)(&s.wi, cell->wi, cell->bias, NULL, x, cell->n_in,
                              B * (left < f->chunk ? left : f->chunk), f->projected, id, count);
            s.projected = (const REAL *)f->projected + ahead * B * columns;
        } else {
            s.x = x;
        }
        s.t = t;
        s.h = t ? NAME(at)(f->h, (t - 1) * f->h_step) : f->h_first;
        s.c = t ? NAME(at)(f->c, (t - 1) * f->c_step) : f->c_first;
        s.h_out = NAME(at)(f->h, t * f->h_step);
        s.c_out = NAME(at)(f->c, t * f->c_step);
        s.y = NAME(at)(f->y, t * B * H);
        s.gates = NAME(at)(f->gates, t * B * columns);
        s.hn = NAME(at)(f->hn, t * B * H);
        NAME(cover)(NAME(step_blocks)[cell->kind], &s, s.wi.gates * s.wi.vectors, B, first, last, t);
        if (cell->kind == RECUR_GRUV3) {
            recur_barrier(barrier);
            NAME(cover)(NAME(candidate_block), &s, 2, B, first_n, last_n, t);
        }
        recur_barrier(barrier);
    }
}
