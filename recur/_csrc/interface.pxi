# recur.h, as Cython sees it.

cdef extern from "recur.h" nogil:
    enum:
        RECUR_RNN, RECUR_LSTM, RECUR_GRU, RECUR_GRUV3
        RECUR_F32, RECUR_F64, RECUR_BF16, RECUR_F16, RECUR_INT8, RECUR_FORMATS
        RECUR_IDENTITY, RECUR_TANH, RECUR_RELU, RECUR_SIGMOID, RECUR_HARD_SIGMOID

    ctypedef struct recur_layout:
        int gates, vectors
        Py_ssize_t units, depth

    ctypedef struct recur_cell:
        int kind, act
        Py_ssize_t n_in, n_hidden
        const void *wi
        const void *wh
        const void *whh
        const void *wh_back
        const void *whh_back
        const void *bias
        const void *bias_h
        const void *peephole

    ctypedef struct recur_forward:
        Py_ssize_t steps, batch
        const void *x
        const int64_t *lengths
        const void *h_first
        const void *c_first
        void *h
        void *c
        Py_ssize_t h_step, c_step
        void *y
        void *gates
        void *hn
        void *projected
        Py_ssize_t chunk
        void *scratch

    ctypedef struct recur_backward:
        Py_ssize_t steps, batch
        const int64_t *lengths
        const void *h_first
        const void *c_first
        const void *h
        const void *c
        Py_ssize_t h_step, c_step
        const void *gates
        const void *hn
        const void *dy
        void *dh
        void *dc
        void *carry
        void *dg
        void *dgh
        void *rh
        void *dpeephole
        void *db
        void *dbh

    ctypedef struct recur_update:
        void *x
        const void *g
        void *mean
        void *square
        double scale, rate, decay
        double keep_mean, keep_square
        double correction, epsilon

    ctypedef struct recur_table:
        const char *name
        int lanes
        Py_ssize_t item
        Py_ssize_t (*panels)(const recur_layout *) noexcept nogil
        Py_ssize_t (*panel_width)(const recur_layout *) noexcept nogil
        void (*pack)(const recur_layout *, const void *, Py_ssize_t, Py_ssize_t,
                     void *) noexcept nogil
        Py_ssize_t (*weights_size)(const recur_layout *) noexcept nogil
        void (*pack_weights)(const recur_layout *, const void *, Py_ssize_t, Py_ssize_t,
                             void *) noexcept nogil
        void (*unpack)(const recur_layout *, const void *, void *) noexcept nogil
        void (*product)(const recur_layout *, const void *, const void *, const void *,
                        const void *, Py_ssize_t, Py_ssize_t, void *, int, int) noexcept nogil
        void (*forward)(const recur_cell *, const recur_forward *, int, int, void *) noexcept nogil
        void (*backward)(const recur_cell *, const recur_backward *, int, int,
                         void *) noexcept nogil
        void (*map)(int, const void *, void *, Py_ssize_t) noexcept nogil
        void (*exp)(const void *, void *, Py_ssize_t) noexcept nogil
        void (*softmax_cross_entropy)(const void *, const int64_t *, const void *, const void *,
                                      void *, void *, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*outer)(const void *, Py_ssize_t, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t,
                      Py_ssize_t, int, void *, void *, int, int) noexcept nogil
        Py_ssize_t (*outer_scratch)(Py_ssize_t) noexcept nogil
        void (*dense)(const void *, Py_ssize_t, Py_ssize_t, Py_ssize_t, Py_ssize_t, const void *,
                      const void *, Py_ssize_t, void *, void *, int, int) noexcept nogil
        Py_ssize_t (*dense_scratch)(Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*sum_rows)(const void *, Py_ssize_t, Py_ssize_t, Py_ssize_t, int,
                         void *) noexcept nogil
        double (*sum_squares)(const void *, Py_ssize_t) noexcept nogil
        void (*descent)(const recur_update *, Py_ssize_t) noexcept nogil
        void (*momentum)(const recur_update *, Py_ssize_t) noexcept nogil
        void (*adam)(const recur_update *, Py_ssize_t) noexcept nogil

    int recur_path_count() noexcept
    const char *recur_path_name(int) noexcept
    const recur_table *recur_path_table(int, int) noexcept
    recur_layout recur_input_layout(int, Py_ssize_t, Py_ssize_t) noexcept
    recur_layout recur_hidden_layout(int, Py_ssize_t) noexcept
    recur_layout recur_hidden_back_layout(int, Py_ssize_t) noexcept
    recur_layout recur_plain_layout(Py_ssize_t, Py_ssize_t) noexcept

    void *recur_allocate(size_t) noexcept
    void recur_release(void *) noexcept
    void *recur_array_malloc(void *, size_t) noexcept
    void *recur_array_calloc(void *, size_t, size_t) noexcept
    void *recur_array_realloc(void *, void *, size_t) noexcept
    void recur_array_free(void *, void *, size_t) noexcept

    ctypedef void (*recur_task)(void *, int, int, void *) noexcept nogil
    void recur_parallel(recur_task, void *, int, int) noexcept
    void recur_barrier(void *) noexcept
