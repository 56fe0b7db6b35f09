# Losses, embeddings, elementwise functions.

cdef int check_index(str name, cnp.ndarray index, Py_ssize_t limit) except -1:
    cdef const int64_t *values = <const int64_t *>data(index)
    cdef Py_ssize_t i
    for i in range(cnp.PyArray_DIM(index, 0)):
        if values[i] < 0 or values[i] >= limit:
            raise ValueError(f"{name}[{i}] is {values[i]}, expected 0 to {limit - 1}")
    return 0


def softmax_cross_entropy(logits, target, *, weights=None):
    """loss_n = -w_n sum_c target_nc log softmax(logits)_nc, and its gradient for logits (N, C).

    logits (N, C); target int64 (N,), each in [0, C), or (N, C) in the dtype of logits; weights (N,)
    or None for ones.  A row of weight 0 gives exact zeros, and its target is not looked at.
    Returns (loss (N,), dlogits (N, C)), both new.  ValueError, TypeError on what does not fit.
    """
    cdef int typenum = float_type("logits", logits)
    check_2d("logits", logits, typenum, -1, -1)
    cdef Py_ssize_t N = cnp.PyArray_DIM(logits, 0), C = cnp.PyArray_DIM(logits, 1)
    if C == 0:
        raise ValueError("logits have no classes")
    cdef const int64_t *label = NULL
    cdef void *dense = NULL
    cdef void *weight = NULL
    if weights is not None:
        check_1d("weights", weights, typenum, N)
        weight = data(weights)
    if cnp.PyArray_Check(target) and cnp.PyArray_TYPE(target) == typenum:
        check_2d("target", target, typenum, N, C)
        dense = data(target)
    else:
        check_1d("target", target, cnp.NPY_INT64, N)
        check_index("target", target if weights is None else np.where(weights == 0, 0, target), C)
        label = <const int64_t *>data(target)
    cdef cnp.npy_intp size = N
    cdef cnp.ndarray loss = cnp.PyArray_EMPTY(1, &size, typenum, 0)
    cdef cnp.ndarray dlogits = empty_2d(typenum, N, C)
    cdef const recur_table *table = table_of(typenum)
    cdef void *logits_data = data(logits)
    cdef void *loss_data = data(loss)
    cdef void *dlogits_data = data(dlogits)
    with nogil:
        table.softmax_cross_entropy(
            logits_data, label, dense, weight, loss_data, dlogits_data, N, C)
    return loss, dlogits


def embedding_gather(table, index, out=None):
    """table (V, F), index int64 (N,), each in [0, V) -> rows (N, F), new or `out`."""
    cdef int typenum = float_type("table", table)
    check_2d("table", table, typenum, -1, -1)
    check_1d("index", index, cnp.NPY_INT64, -1)
    cdef Py_ssize_t N = cnp.PyArray_DIM(index, 0), F = cnp.PyArray_DIM(table, 1), i
    check_index("index", index, cnp.PyArray_DIM(table, 0))
    if out is None:
        out = empty_2d(typenum, N, F)
    else:
        check_2d("out", out, typenum, N, F)
        check_writable("out", out)
        if np.may_share_memory(table, out):
            raise ValueError("out overlaps table")
    cdef Py_ssize_t row = F * cnp.PyArray_ITEMSIZE(out)
    cdef const int64_t *rows = <const int64_t *>data(index)
    cdef char *source = <char *>data(table)
    cdef char *target = <char *>data(out)
    with nogil:
        for i in range(N):
            memcpy(target + i * row, source + rows[i] * row, row)
    return out


cdef void add_rows(cython.floating *out, const cython.floating *d, const int64_t *index,
                   Py_ssize_t N, Py_ssize_t F) noexcept nogil:
    cdef Py_ssize_t i, j
    cdef cython.floating *row
    for i in range(N):
        row = out + index[i] * F
        for j in range(F):
            row[j] += d[i * F + j]


def embedding_scatter_add(dY, index, out, *, bint accumulate):
    """out (V, F) at row index[n] += dY[n], in order of n: dY (N, F), index int64 (N,).

    accumulate=False zeroes out first and never reads it.
    """
    cdef int typenum = float_type("out", out)
    check_2d("out", out, typenum, -1, -1)
    check_writable("out", out)
    check_1d("index", index, cnp.NPY_INT64, -1)
    cdef Py_ssize_t N = cnp.PyArray_DIM(index, 0), F = cnp.PyArray_DIM(out, 1)
    check_2d("dY", dY, typenum, N, F)
    check_index("index", index, cnp.PyArray_DIM(out, 0))
    cdef const int64_t *rows = <const int64_t *>data(index)
    cdef void *d = data(dY)
    cdef void *to = data(out)
    if not accumulate:
        out.fill(0)
    with nogil:
        if typenum == cnp.NPY_FLOAT64:
            add_rows(<double *>to, <const double *>d, rows, N, F)
        else:
            add_rows(<float *>to, <const float *>d, rows, N, F)


cdef object mapped(int function, object x, object out):
    """function < 0 stands for exp."""
    cdef int typenum = float_type("x", x)
    if not fits(x, typenum):
        raise misfit("x", x, typenum, x.shape)
    if out is None:
        out = np.empty_like(x)
    elif not fits(out, typenum) or out.shape != x.shape:
        raise misfit("out", out, typenum, x.shape)
    else:
        check_writable("out", out)
        if out is not x and np.may_share_memory(x, out) and data(out) != data(x):
            raise ValueError("out overlaps x: give x itself or other memory")
    cdef const recur_table *table = table_of(typenum)
    cdef void *from_ = data(x)
    cdef void *to = data(out)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(x)
    with nogil:
        if function < 0:
            table.exp(from_, to, n)
        else:
            table.map(function, from_, to, n)
    return out


def exp(x, out=None):
    """e**x elementwise, within 4 ulp: x of any shape -> new or `out`, which may be x."""
    return mapped(-1, x, out)


def tanh(x, out=None):
    """tanh x elementwise, within 4 ulp: x of any shape -> new or `out`, which may be x."""
    return mapped(RECUR_TANH, x, out)


def sigmoid(x, out=None):
    """1 / (1 + e**-x) elementwise, within 4 ulp: x of any shape -> new or `out`, which may be x."""
    return mapped(RECUR_SIGMOID, x, out)
