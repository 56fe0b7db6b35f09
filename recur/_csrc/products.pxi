# Products: packed, through BLAS, and the gradients of weights.

cdef struct ProductTask:
    const recur_table *table
    const recur_layout *layout
    const void *packed
    const void *bias
    const void *a
    Py_ssize_t a_step, rows
    void *out


cdef void run_product(void *context, int id, int count, void *barrier) noexcept nogil:
    """The rows are shared out: a product for few rows stays on one thread."""
    cdef ProductTask *task = <ProductTask *>context
    cdef Py_ssize_t item = task.table.item, columns = task.layout.gates * task.layout.units
    cdef Py_ssize_t first = task.rows * id // count, last = task.rows * (id + 1) // count
    task.table.product(task.layout, task.packed, task.bias, NULL,
                       <const char *>task.a + first * task.a_step * item, task.a_step, last - first,
                       <char *>task.out + first * columns * item, 0, 1)


@cython.final
cdef class AffineKernel:
    """y = W x + b on packed weights: W (R, I), b (R,) or None are copied.

    storage  as for the cells
    ValueError, TypeError on arrays that do not fit.
    """

    cdef const recur_table *table
    cdef int typenum
    cdef recur_layout layout
    cdef Buffer weights, bias
    cdef readonly Py_ssize_t n_in
    cdef readonly Py_ssize_t n_out
    cdef readonly object dtype
    cdef readonly object storage

    def __cinit__(self, W, b=None, *, storage=None):
        self.typenum = float_type("W", W)
        self.table = table_for(self.typenum, storage)
        self.storage = storage
        self.dtype = W.dtype
        check_2d("W", W, self.typenum, -1, -1)
        self.n_out = cnp.PyArray_DIM(W, 0)
        self.n_in = cnp.PyArray_DIM(W, 1)
        self.layout = recur_plain_layout(self.n_out, self.n_in)
        cdef recur_layout column = recur_plain_layout(self.n_out, 1)
        self.weights = packed_weights(self.table, &self.layout, "W", W, storage)
        self.bias = Buffer(packed_size(self.table, &column))
        memset(self.bias.data, 0, self.bias.size)
        if b is not None:
            check_1d("b", b, self.typenum, self.n_out)
            self.table.pack(&column, data(b), 1, 1, self.bias.data)

    def matrices(self):
        """Copies of the matrices that the packed weights stand for, by name: W (R, I)."""
        cdef cnp.ndarray w = empty_2d(self.typenum, self.n_out, self.n_in)
        self.table.unpack(&self.layout, self.weights.data, data(w))
        return {"W": w}

    def apply(self, x, out=None):
        """x (N, I) -> (N, R), new or `out`, which must not overlap x; the same bits for any N."""
        check_2d("x", x, self.typenum, -1, self.n_in)
        cdef Py_ssize_t N = cnp.PyArray_DIM(x, 0)
        if out is None:
            out = empty_2d(self.typenum, N, self.n_out)
        else:
            check_2d("out", out, self.typenum, N, self.n_out)
            check_writable("out", out)
            if np.may_share_memory(x, out):
                raise ValueError("out overlaps x")
        cdef ProductTask task = ProductTask(
            self.table, &self.layout, self.weights.data, self.bias.data,
            data(x), self.n_in, N, data(out))
        cdef Py_ssize_t work = N * self.n_in * self.n_out
        parallel(run_product, &task, thread_count if work >= THREADED_CALL and N >= 64 else 1, work)
        return out


cdef struct OuterTask:
    const recur_table *table
    const void *a
    Py_ssize_t a_step, a_columns
    const void *b
    Py_ssize_t b_step, b_columns, n
    bint accumulate
    void *out
    void *scratch


cdef void run_outer(void *context, int id, int count, void *barrier) noexcept nogil:
    cdef OuterTask *task = <OuterTask *>context
    task.table.outer(task.a, task.a_step, task.a_columns, task.b, task.b_step, task.b_columns,
                     task.n, task.accumulate, task.out, task.scratch, id, count)


def weight_gradient(dg, x, out, *, bint accumulate):
    """out (rows, cols) = dg.T @ x, or += if accumulate: dg (N, rows), x (N, cols).

    accumulate=False never reads out, so NaN there is harmless; N = 0 gives zeros.  dg and x may be
    column slices.  Raises TypeError (dtype) or ValueError (shape, layout, read-only out).
    """
    cdef int typenum = float_type("out", out)
    cdef Py_ssize_t dg_step = 0, x_step = 0
    row_step("dg", dg, typenum, &dg_step)
    row_step("x", x, typenum, &x_step)
    cdef Py_ssize_t N = cnp.PyArray_DIM(dg, 0), rows = cnp.PyArray_DIM(dg, 1)
    cdef Py_ssize_t columns = cnp.PyArray_DIM(x, 1)
    if cnp.PyArray_DIM(x, 0) != N:
        raise ValueError(f"x has {x.shape[0]} rows, dg has {N}")
    check_2d("out", out, typenum, rows, columns)
    check_writable("out", out)
    if N == 0:
        if not accumulate:
            out.fill(0)
        return
    cdef Py_ssize_t work = N * rows * columns
    cdef int count = thread_count if work >= THREADED_CALL else 1
    cdef const recur_table *table = table_of(typenum)
    cdef void *scratch = workspace(count * table.outer_scratch(columns) * table.item)
    cdef OuterTask task = OuterTask(table, data(dg), dg_step, rows, data(x), x_step, columns, N,
                                    accumulate, data(out), scratch)
    parallel(run_outer, &task, count, work)


def bias_gradient(dg, out, *, bint accumulate):
    """out (rows,) = dg.sum(0), or += if accumulate: dg (N, rows), which may be a column slice.

    accumulate=False never reads out.  Raises TypeError (dtype) or ValueError (shape, layout).
    """
    cdef int typenum = float_type("out", out)
    cdef Py_ssize_t step = 0
    row_step("dg", dg, typenum, &step)
    check_1d("out", out, typenum, cnp.PyArray_DIM(dg, 1))
    check_writable("out", out)
    cdef const recur_table *table = table_of(typenum)
    cdef Py_ssize_t N = cnp.PyArray_DIM(dg, 0), rows = cnp.PyArray_DIM(dg, 1)
    cdef void *a = data(dg)
    cdef void *c = data(out)
    with nogil:
        table.sum_rows(a, step, N, rows, accumulate, c)


def affine_forward(W, x, b=None):
    """x (N, I) -> x @ W.T + b, new (N, R), through BLAS: W (R, I), b (R,) or None."""
    cdef int typenum = float_type("W", W)
    check_2d("W", W, typenum, -1, -1)
    cdef Py_ssize_t R = cnp.PyArray_DIM(W, 0), I = cnp.PyArray_DIM(W, 1)
    check_2d("x", x, typenum, -1, I)
    cdef Py_ssize_t N = cnp.PyArray_DIM(x, 0)
    cdef cnp.ndarray y = empty_2d(typenum, N, R)
    cdef bint has_bias = b is not None
    if has_bias:
        check_1d("b", b, typenum, R)
        y[...] = b
    elif I == 0:
        y.fill(0)
    if I == 0:
        return y
    cdef void *w_data = data(W)
    cdef void *x_data = data(x)
    cdef void *y_data = data(y)
    cdef bint is_double = typenum == cnp.NPY_FLOAT64
    with nogil:
        gemm(is_double, False, True, N, R, I, x_data, I, w_data, I, has_bias, y_data, R)
    return y


def affine_backward_x(W, dy):
    """dy (N, R) -> dy @ W, new (N, I), through BLAS: W (R, I)."""
    cdef int typenum = float_type("W", W)
    check_2d("W", W, typenum, -1, -1)
    cdef Py_ssize_t R = cnp.PyArray_DIM(W, 0), I = cnp.PyArray_DIM(W, 1)
    check_2d("dy", dy, typenum, -1, R)
    cdef Py_ssize_t N = cnp.PyArray_DIM(dy, 0)
    cdef cnp.ndarray dx = empty_2d(typenum, N, I)
    if R == 0:
        dx.fill(0)
        return dx
    cdef void *w_data = data(W)
    cdef void *y_data = data(dy)
    cdef void *x_data = data(dx)
    cdef bint is_double = typenum == cnp.NPY_FLOAT64
    with nogil:
        gemm(is_double, False, False, N, I, R, y_data, R, w_data, I, False, x_data, I)
    return dx
