/* Backward of the four cells, last step first.

   A step's gate gradients need the whole gradient of its h: that of its output plus what the step
   after it sends back, dg Wh.  So a block multiplies the next step's dg into accumulators that start
   at the carry (what passes h' -> h without Wh: z dh of a GRU, everything of a sample past its
   length), and computes its own dg from them while they are in cache.  One barrier a step.
   Weight gradients are not touched here: they are one product over all dg afterwards. */

typedef struct NAME(back) {
    const recur_cell *cell;
    ptrdiff_t t, hidden, columns;  /* columns: G * H */
    const int64_t *lengths;
    const REAL *h, *c;             /* state before this step */
    const REAL *y;                 /* RNN: h after it */
    const REAL *gates, *hn, *dy;
    const REAL *dg_next;           /* what Wh multiplies, of the step after; NULL at the last */
    REAL *carry, *dc, *dg, *dgh, *rh;
    ptrdiff_t padded;              /* hidden, rounded up to whole registers */
    REAL *dpeephole, *db, *dbh;
} NAME(back);

INLINE REAL *NAME(gate_at)(REAL *base, ptrdiff_t gates, ptrdiff_t gate, ptrdiff_t row, ptrdiff_t hidden, ptrdiff_t u) {
    return base + (row * gates + gate) * hidden + u;
}
#define SAVED(gates_, gate) NAME(load_part)(s->gates + (row * (gates_) + (gate)) * s->hidden + u, n)
#define POST(gate, value) NAME(post)(s, gate, row, u, value)
#define POST_H(gate, value) NAME(store_part)(NAME(gate_at)(s->dgh, 3, gate, row, s->hidden, u), value, n)

INLINE void NAME(add_to)(REAL *sum, VREAL v) { NAME(store)(sum, NAME(load)(sum) + v); }
/* dg of a gate, also into the bias's gradient */
INLINE void NAME(post)(const NAME(back) *s, ptrdiff_t gate, ptrdiff_t row, ptrdiff_t u, VREAL v) {
    NAME(store_part)(s->dg + row * s->columns + gate * s->hidden + u, v, s->hidden - u);
    if (s->db) NAME(add_to)(s->db + gate * s->padded + u, v);
}

static void NAME(rnn_gradient)(const NAME(back) *s, ptrdiff_t row, ptrdiff_t u, VREAL dh) {
    const ptrdiff_t at = row * s->hidden + u, n = s->hidden - u;
    POST(0, dh * NAME(slope)(s->cell->act, NAME(load_part)(s->y + at, n)));
    NAME(store_part)(s->carry + at, SPLAT(0), n);
}

INLINE VREAL NAME(gate_slope)(int act, VREAL y) {
    return act == RECUR_HARD_SIGMOID ? NAME(slope)(RECUR_HARD_SIGMOID, y) : NAME(slope)(RECUR_SIGMOID, y);
}

static void NAME(lstm_gradient)(const NAME(back) *s, ptrdiff_t row, ptrdiff_t u, VREAL dh) {
    const int act = s->cell->act;
    const ptrdiff_t at = row * s->hidden + u, n = s->hidden - u;
    const VREAL i = SAVED(4, 0), f = SAVED(4, 1), candidate = SAVED(4, 2), o = SAVED(4, 3);
    const VREAL c_prev = NAME(load_part)(s->c + at, n);
    const VREAL c = NAME(madd)(f, c_prev, i * candidate); /* the forward's bits again */
    const VREAL tanh_c = NAME(hyperbolic_tangent)(c);
    const VREAL d_o = dh * tanh_c * NAME(gate_slope)(act, o);
    VREAL dc = NAME(madd)(dh * o, NAME(slope)(RECUR_TANH, tanh_c), NAME(load_part)(s->dc + at, n));
    const REAL *peep = s->cell->peephole;
    const ptrdiff_t peep_step = s->padded;
    if (peep) dc = NAME(madd)(NAME(load)(peep + 2 * peep_step + u), d_o, dc);
    const VREAL d_i = dc * candidate * NAME(gate_slope)(act, i);
    const VREAL d_f = dc * c_prev * NAME(gate_slope)(act, f);
    const VREAL d_candidate = dc * i * NAME(slope)(RECUR_TANH, candidate);
    VREAL dc_prev = dc * f;
    if (peep) {
        REAL *dp = s->dpeephole + u;
        dc_prev = NAME(madd)(NAME(load)(peep + u), d_i, dc_prev);
        dc_prev = NAME(madd)(NAME(load)(peep + peep_step + u), d_f, dc_prev);
        NAME(store)(dp, NAME(madd)(d_i, c_prev, NAME(load)(dp)));
        NAME(store)(dp + peep_step, NAME(madd)(d_f, c_prev, NAME(load)(dp + peep_step)));
        NAME(store)(dp + 2 * peep_step, NAME(madd)(d_o, c, NAME(load)(dp + 2 * peep_step)));
    }
    POST(0, d_i);
    POST(1, d_f);
    POST(2, d_candidate);
    POST(3, d_o);
    NAME(store_part)(s->dc + at, dc_prev, n);
    NAME(store_part)(s->carry + at, SPLAT(0), n);
}

static void NAME(gru_gradient)(const NAME(back) *s, ptrdiff_t row, ptrdiff_t u, VREAL dh) {
    const int act = s->cell->act;
    const ptrdiff_t at = row * s->hidden + u, n = s->hidden - u;
    const VREAL r = SAVED(3, 0), z = SAVED(3, 1), candidate = SAVED(3, 2);
    const VREAL hn = NAME(load_part)(s->hn + at, n), h = NAME(load_part)(s->h + at, n);
    const VREAL d_candidate = dh * (SPLAT(1) - z) * NAME(slope)(RECUR_TANH, candidate);
    const VREAL d_z = dh * (h - candidate) * NAME(gate_slope)(act, z);
    const VREAL d_r = d_candidate * hn * NAME(gate_slope)(act, r);
    POST(0, d_r);
    POST(1, d_z);
    POST(2, d_candidate);
    POST_H(0, d_r);
    POST_H(1, d_z);
    POST_H(2, d_candidate * r);
    if (s->dbh) NAME(add_to)(s->dbh + u, d_candidate * r);
    NAME(store_part)(s->carry + at, dh * z, n);
}

/* first half of GRUv3: the candidate and the update gate.  r stays in rh until the second half,
   since dg may overwrite the saved gates */
static void NAME(gruv3_gradient)(const NAME(back) *s, ptrdiff_t row, ptrdiff_t u, VREAL dh) {
    const ptrdiff_t at = row * s->hidden + u, n = s->hidden - u;
    const VREAL r = SAVED(3, 0), z = SAVED(3, 1), candidate = SAVED(3, 2);
    const VREAL h = NAME(load_part)(s->h + at, n);
    POST(1, dh * (h - candidate) * NAME(gate_slope)(s->cell->act, z));
    POST(2, dh * (SPLAT(1) - z) * NAME(slope)(RECUR_TANH, candidate));
    NAME(store_part)(s->rh + at, r, n);
    NAME(store_part)(s->carry + at, dh * z, n);
}

/* second half, with d(r h) */
static void NAME(gruv3_reset_gradient)(const NAME(back) *s, ptrdiff_t row, ptrdiff_t u, VREAL drh) {
    const ptrdiff_t at = row * s->hidden + u, n = s->hidden - u;
    const VREAL r = NAME(load_part)(s->rh + at, n), h = NAME(load_part)(s->h + at, n);
    POST(0, drh * h * NAME(gate_slope)(s->cell->act, r));
    NAME(store_part)(s->rh + at, r * h, n);
    NAME(store_part)(s->carry + at, NAME(madd)(drh, r, NAME(load_part)(s->carry + at, n)), n);
}

/* a sample past its length: all gradient passes to the state before, none to x or the weights */
static void NAME(pass_gradient)(const NAME(back) *s, ptrdiff_t row, ptrdiff_t u, VREAL dh) {
    const ptrdiff_t at = row * s->hidden + u, n = s->hidden - u;
    const ptrdiff_t gates = s->columns / s->hidden;
    for (ptrdiff_t g = 0; g < gates; g++) {
        NAME(store_part)(s->dg + row * s->columns + g * s->hidden + u, SPLAT(0), n);
        if (s->dgh) POST_H(g, SPLAT(0));
    }
    if (s->rh) NAME(store_part)(s->rh + at, SPLAT(0), n);
    NAME(store_part)(s->carry + at, dh, n);
}

/* Ask for what the gradients of a block's row will read: saved long ago, it lies in the last cache or
   beyond, in pieces too short for the hardware to follow. */
#define FETCH_AHEAD 4
INLINE void NAME(fetch_saved)(const NAME(back) *s, const NAME(block) *b, ptrdiff_t row) {
    const ptrdiff_t first = b->panel * 2 * LANES, line = 64 / sizeof(REAL), width = 2 * LANES * b->panels;
    const ptrdiff_t last = first + width < s->hidden ? first + width : s->hidden;
    const REAL *state = s->c ? s->c : s->gates ? s->h : s->y;
    if (row >= b->row + b->rows) return;
    for (ptrdiff_t u = first; u < last; u += line) {
        if (s->gates)
            for (ptrdiff_t at = u; at < s->columns; at += s->hidden) PREFETCH_FAR(s->gates + row * s->columns + at);
        if (s->dy) PREFETCH_FAR(s->dy + row * s->hidden + u);
        if (s->hn) PREFETCH_FAR(s->hn + row * s->hidden + u);
        PREFETCH_FAR(state + row * s->hidden + u);
    }
}

/* One block of a step, compiled for each KIND. */
INLINE void NAME(back_block)(const int KIND, const NAME(back) *s, const NAME(block) *b) {
    const ptrdiff_t width = 2 * LANES, depth = (KIND == RECUR_GRUV3 ? 2 : s->columns / s->hidden) * s->hidden;
    const recur_layout m = {1, 2, s->hidden, depth};
    ALIGNED REAL acc[ROW_BLOCK * 2 * LANES];
    NAME(load_block)(&m, b, s->carry, m.units, acc, width);
    for (ptrdiff_t i = 0; i < FETCH_AHEAD; i++) NAME(fetch_saved)(s, b, b->row + i);
    if (s->dg_next)
        NAME(feed)(2, b->rows, b->panels, s->dg_next + b->row * s->columns, s->columns, depth,
                   (const REAL *)s->cell->wh_back + b->panel * depth * width, depth * width, acc, width,
                   NAME(panel_span)(2, depth, s->cell->wh_back, b->next));
    for (ptrdiff_t e = 0; e < b->rows * b->panels; e++) {
        const ptrdiff_t row = b->row + (b->panels == 1 ? e : 0);
        ptrdiff_t u = (b->panel + (b->panels == 1 ? 0 : e)) * width;
        const int live = !s->lengths || s->t < s->lengths[row];
        if (b->rows > 1) NAME(fetch_saved)(s, b, row + FETCH_AHEAD);
        for (int v = 0; v < 2 && u < s->hidden; v++, u += LANES) {
            VREAL dh = NAME(load)(acc + e * width + v * LANES);
            if (!live) {
                NAME(pass_gradient)(s, row, u, dh);
                continue;
            }
            if (s->dy) dh += NAME(load_part)(s->dy + row * s->hidden + u, s->hidden - u);
            switch (KIND) {
            case RECUR_LSTM: NAME(lstm_gradient)(s, row, u, dh); break;
            case RECUR_GRU: NAME(gru_gradient)(s, row, u, dh); break;
            case RECUR_GRUV3: NAME(gruv3_gradient)(s, row, u, dh); break;
            default: NAME(rnn_gradient)(s, row, u, dh);
            }
        }
    }
}
static void NAME(rnn_back_block)(const void *s, const NAME(block) *b) { NAME(back_block)(RECUR_RNN, s, b); }
static void NAME(lstm_back_block)(const void *s, const NAME(block) *b) { NAME(back_block)(RECUR_LSTM, s, b); }
static void NAME(gru_back_block)(const void *s, const NAME(block) *b) { NAME(back_block)(RECUR_GRU, s, b); }
static void NAME(gruv3_back_block)(const void *s, const NAME(block) *b) { NAME(back_block)(RECUR_GRUV3, s, b); }
static NAME(block_function) *const NAME(back_blocks)[] = {
    [RECUR_RNN] = NAME(rnn_back_block), [RECUR_LSTM] = NAME(lstm_back_block),
    [RECUR_GRU] = NAME(gru_back_block), [RECUR_GRUV3] = NAME(gruv3_back_block)};

/* d(r h) = Whh^T d_candidate, where d_candidate is the last third of dg's rows */
static void NAME(reset_block)(const void *job, const NAME(block) *b) {
    const NAME(back) *s = job;
    const ptrdiff_t H = s->hidden, width = 2 * LANES;
    ALIGNED REAL acc[ROW_BLOCK * 2 * LANES];
    NAME(start_block)(b, NULL, width, acc, width);
    NAME(feed)(2, b->rows, b->panels, s->dg + 2 * H + b->row * s->columns, s->columns, H,
               (const REAL *)s->cell->whh_back + b->panel * H * width, H * width, acc, width,
               NAME(panel_span)(2, H, s->cell->whh_back, b->next));
    for (ptrdiff_t e = 0; e < b->rows * b->panels; e++) {
        const ptrdiff_t row = b->row + (b->panels == 1 ? e : 0);
        ptrdiff_t u = (b->panel + (b->panels == 1 ? 0 : e)) * width;
        if (s->lengths && s->t >= s->lengths[row]) continue;
        for (int v = 0; v < 2 && u < H; v++, u += LANES)
            NAME(gruv3_reset_gradient)(s, row, u, NAME(load)(acc + e * width + v * LANES));
    }
}

static void NAME(backward)(const recur_cell *cell, const recur_backward *f, int id, int count, void *barrier) {
    const ptrdiff_t B = f->batch, H = cell->n_hidden;
    const recur_layout m = recur_hidden_back_layout(cell->kind, H);
    NAME(back) s = {.cell = cell, .hidden = H, .lengths = f->lengths, .dc = f->dc, .dpeephole = f->dpeephole, .db = f->db, .dbh = f->dbh};
    s.padded = (H + LANES - 1) / LANES * LANES;
    s.columns = recur_input_layout(cell->kind, cell->n_in, H).gates * H;
    s.carry = f->carry;
    ptrdiff_t first, last;
    NAME(share)(NAME(panels)(&m), id, count, &first, &last);
    const ptrdiff_t u0 = first * 2 * LANES, u1 = last * 2 * LANES < H ? last * 2 * LANES : H;
    for (ptrdiff_t row = 0; row < B && u0 < u1; row++)
        memcpy(s.carry + row * H + u0, (const REAL *)f->dh + row * H + u0, (u1 - u0) * sizeof(REAL));
    for (ptrdiff_t t = f->steps - 1; t >= 0; t--) {
        s.t = t;
        s.h = t ? NAME(at)(f->h, (t - 1) * f->h_step) : f->h_first;
        s.c = t ? NAME(at)(f->c, (t - 1) * f->c_step) : f->c_first;
        s.y = NAME(at)(f->h, t * f->h_step);
        s.gates = NAME(at)(f->gates, t * B * s.columns);
        s.hn = NAME(at)(f->hn, t * B * H);
        s.dy = NAME(at)(f->dy, t * B * H);
        s.dg = NAME(at)(f->dg, t * B * s.columns);
        s.dgh = NAME(at)(f->dgh, t * B * s.columns);
        s.rh = NAME(at)(f->rh, t * B * H);
        NAME(cover)(NAME(back_blocks)[cell->kind], &s, 2, B, first, last, t);
        recur_barrier(barrier);
        if (cell->kind == RECUR_GRUV3) {
            NAME(cover)(NAME(reset_block), &s, 2, B, first, last, t);
            recur_barrier(barrier);
        }
        s.dg_next = s.dgh ? s.dgh : s.dg;
    }
    if (f->steps) {
        const NAME(product_job) job = {&m, cell->wh_back, NULL, s.carry, s.dg_next, s.columns, f->dh};
        NAME(cover)(NAME(product_block), &job, 2, B, first, last, 1);
    }
}
#undef SAVED
#undef POST
#undef POST_H
#undef FETCH_AHEAD
