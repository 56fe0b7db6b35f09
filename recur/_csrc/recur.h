/* The C side of recur._kernels: what the Cython module may call.

   One source, target.c, is compiled once for each CPU target; each object exports one table for
   each format of weights.  dispatch.c picks the tables at import.  Everything here is re-entrant
   and holds no state, except the thread pool of pool.c and what memory.c keeps.

   All arrays are row-major with the features last.  B is the batch, I and H the input and hidden
   sizes, G the number of gates (rows of the stacked weights: G * H). */
#ifndef RECUR_H
#define RECUR_H

#include <stddef.h>
#include <stdint.h>

enum recur_kind { RECUR_RNN, RECUR_LSTM, RECUR_GRU, RECUR_GRUV3 };
/* How the numbers of a packed matrix are stored; x, states and sums are double for RECUR_F64, else float. */
enum recur_format { RECUR_F32, RECUR_F64, RECUR_BF16, RECUR_F16, RECUR_INT8, RECUR_FORMATS };
enum recur_function { RECUR_IDENTITY, RECUR_TANH, RECUR_RELU, RECUR_SIGMOID, RECUR_HARD_SIGMOID };

/* How the rows of a weight matrix are laid into panels (product.h): `gates` blocks of `units` rows,
   `vectors` registers of each block a panel. */
typedef struct recur_layout {
    int gates, vectors;
    ptrdiff_t units, depth;
} recur_layout;

/* One cell's weights, packed by the same target that runs them.  Read only. */
typedef struct recur_cell {
    int kind;
    int act;             /* of an RNN: its activation; of the others: that of the gates */
    ptrdiff_t n_in, n_hidden;
    const void *wi;      /* panels of Wi */
    const void *wh;      /* panels of Wh (GRUv3: of the two gates r, z) */
    const void *whh;     /* panels of Whh (GRUv3) */
    const void *wh_back, *whh_back; /* panels of their transposes; NULL until a backward */
    const void *bias;    /* laid out as one row of Wi's panels, zeros where there is none */
    const void *bias_h;  /* GRU's inner bias, padded to whole panels */
    const void *peephole; /* (3, units padded to whole panels) or NULL */
} recur_cell;

/* T steps of a cell.  The state before step t is at h_first for t = 0, else h + (t-1) * h_step
   elements; likewise c.  h_step = 0 is not allowed for h (a step reads all of h while it writes the
   next one); c may be updated in place: c_first = c, c_step = 0. */
typedef struct recur_forward {
    ptrdiff_t steps, batch;
    const void *x;         /* (T, B, I) */
    const int64_t *lengths; /* (B,) or NULL: past its length a sample keeps its state and y is 0 */
    const void *h_first, *c_first;
    void *h, *c;
    ptrdiff_t h_step, c_step;
    void *y;               /* (T, B, H) or NULL; needed with lengths only */
    void *gates;           /* (T, B, G*H): activations saved for the backward, or NULL */
    void *hn;              /* (T, B, H): GRU's Wh_n h + bh saved for the backward, or NULL */
    void *projected;       /* (chunk, B, G*H) room for bias + Wi x of `chunk` steps ahead, or NULL: */
    ptrdiff_t chunk;       /*   then each step multiplies its own x.  May be `gates` if chunk = T */
    void *scratch;         /* GRUv3: 3 * B * H */
} recur_forward;

/* Backward of recur_forward, from the last step to the first. */
typedef struct recur_backward {
    ptrdiff_t steps, batch;
    const int64_t *lengths;
    const void *h_first, *c_first;  /* states before each step, as in recur_forward */
    const void *h, *c;
    ptrdiff_t h_step, c_step;
    const void *gates, *hn;         /* as saved */
    const void *dy;        /* (T, B, H) or NULL */
    void *dh;              /* (B, H): gradient of the last h; on return that of the first */
    void *dc;              /* (B, H): likewise */
    void *carry;           /* (B, H): scratch */
    void *dg;              /* (T, B, G*H): gradient of the gates' sums; may be `gates` */
    void *dgh;             /* GRU: (T, B, 3H), the same with the candidate's times r */
    void *rh;              /* GRUv3: (T, B, H), r * h */
    /* the sums over all steps and samples, units padded to whole registers, zeroed by the caller; or
       NULL */
    void *dpeephole;       /* (3, units) */
    void *db;              /* (G, units): of dg */
    void *dbh;             /* GRU: (units,): of the candidate's dgh */
} recur_backward;

/* One update of an optimiser; each rule uses what its formula names. */
typedef struct recur_update {
    void *x;                  /* (n,) the parameters */
    const void *g;            /* (n,) their gradient is scale * g */
    void *mean, *square;      /* (n,) states; Momentum's velocity is `mean` */
    double scale, rate, decay;
    double keep_mean, keep_square; /* how much of a state stays */
    double correction, epsilon;
} recur_update;

typedef struct recur_table {
    const char *name;
    int lanes;             /* numbers a register */
    ptrdiff_t item;        /* bytes a number */
    /* panels needed for a layout, and numbers in one of depth 1 */
    ptrdiff_t (*panels)(const recur_layout *);
    ptrdiff_t (*panel_width)(const recur_layout *);
    /* matrix(row, k) at w[row * row_step + k * depth_step], where one of the steps is 1 -> panels of such
       numbers: biases, peepholes */
    void (*pack)(const recur_layout *, const void *w, ptrdiff_t row_step, ptrdiff_t depth_step, void *packed);
    /* the same for weights, in the format that forward and product read, of weights_size bytes */
    ptrdiff_t (*weights_size)(const recur_layout *);
    void (*pack_weights)(const recur_layout *, const void *w, ptrdiff_t row_step, ptrdiff_t depth_step, void *packed);
    /* packed weights -> the row-major matrix (gates * units, depth) that they stand for */
    void (*unpack)(const recur_layout *, const void *packed, void *w);
    /* out (rows, gates*units) = start + a (rows, depth) times the matrix transposed.
       start: `bias` (one row of the panels' layout), or `init` (as out), or zeros if both are NULL */
    void (*product)(const recur_layout *, const void *packed, const void *bias, const void *init,
                    const void *a, ptrdiff_t a_step, ptrdiff_t rows, void *out, int id, int count);
    void (*forward)(const recur_cell *, const recur_forward *, int id, int count, void *barrier);
    void (*map)(int function, const void *x, void *y, ptrdiff_t n);
    void (*exp)(const void *x, void *y, ptrdiff_t n);
    /* from here on NULL in the reduced formats */
    void (*backward)(const recur_cell *, const recur_backward *, int id, int count, void *barrier);
    /* loss (rows,), dlogits (rows, classes); label or target is NULL; weights may be NULL */
    void (*softmax_cross_entropy)(const void *logits, const int64_t *label, const void *target,
                                  const void *weights, void *loss, void *dlogits,
                                  ptrdiff_t rows, ptrdiff_t classes);
    /* out (a_columns, b_columns) = or += a^T b, where a and b have n rows; scratch: outer_scratch
       numbers for each of the `count` threads */
    void (*outer)(const void *a, ptrdiff_t a_step, ptrdiff_t a_columns, const void *b, ptrdiff_t b_step,
                  ptrdiff_t b_columns, ptrdiff_t n, int accumulate, void *out, void *scratch, int id, int count);
    ptrdiff_t (*outer_scratch)(ptrdiff_t b_columns);
    /* out (rows, units) = bias (units,) or NULL + a (rows, depth) times a matrix transposed, given as
       for pack, but not packed; scratch: dense_scratch numbers for each of the `count` threads */
    void (*dense)(const void *w, ptrdiff_t row_step, ptrdiff_t depth_step, ptrdiff_t units, ptrdiff_t depth,
                  const void *bias, const void *a, ptrdiff_t rows, void *out, void *scratch, int id, int count);
    ptrdiff_t (*dense_scratch)(ptrdiff_t units, ptrdiff_t depth);
    void (*sum_rows)(const void *a, ptrdiff_t a_step, ptrdiff_t rows, ptrdiff_t columns,
                     int accumulate, void *out);
    double (*sum_squares)(const void *a, ptrdiff_t n);
    void (*descent)(const recur_update *, ptrdiff_t n);
    void (*momentum)(const recur_update *, ptrdiff_t n);
    void (*adam)(const recur_update *, ptrdiff_t n);
} recur_table;

/* dispatch.c: the layouts of a cell's matrices */
recur_layout recur_input_layout(int kind, ptrdiff_t n_in, ptrdiff_t n_hidden);       /* Wi */
recur_layout recur_hidden_layout(int kind, ptrdiff_t n_hidden);                      /* Wh */
recur_layout recur_hidden_back_layout(int kind, ptrdiff_t n_hidden);                 /* Wh transposed */
recur_layout recur_plain_layout(ptrdiff_t rows, ptrdiff_t depth);                    /* any one matrix */

/* dispatch.c: the CPU */
int recur_path_count(void);                 /* paths this machine can run, best last */
const char *recur_path_name(int path);
const recur_table *recur_path_table(int path, int format);
unsigned recur_flush_subnormals(void);      /* returns the control word to restore */
void recur_restore_control(unsigned word);

/* memory.c: memory on a boundary of 64 bytes, or NULL.  Large blocks that were released are kept and
   given again, with what they held. */
void *recur_allocate(size_t size);
void recur_release(void *memory);           /* NULL: nothing */
/* The same for NumPy's arrays, small ones from malloc; `context` and the size freed are not read. */
void *recur_array_malloc(void *context, size_t size);
void *recur_array_calloc(void *context, size_t count, size_t item);
void *recur_array_realloc(void *context, void *memory, size_t size);
void recur_array_free(void *context, void *memory, size_t size);

/* pool.c */
typedef void (*recur_task)(void *context, int id, int count, void *barrier);
/* Run the task as threads 0 .. count-1, the caller being thread 0, with subnormals flushed; return
   when all are done.  The task may be given a smaller count than asked for, down to 1: with a
   `wait` of 0 it has only threads that are awake from an earlier job, else those that come within so many
   microseconds. */
void recur_parallel(recur_task task, void *context, int count, int wait);
void recur_barrier(void *barrier);          /* wait for the task's other threads; NULL: there are none */

#endif
