# Products: with packed matrices, with matrices as they lie, and the gradients of weights.

cdef struct ProductTask:
    const recur_table *table
    const recur_layout *layout
    const void *packed
    const void *bias
    const void *a
    Py_ssize_t a_step, rows
    void *out


cdef void run_product(void *context, int id, int count, void *barrier) noexcept nogil:
    """The threads share the rows, or the panels if there are too few rows for whole blocks."""
    cdef ProductTask *task = <ProductTask *>context
    if task.rows < 64 * count:
        task.table.product(task.layout, task.packed, task.bias, NULL, task.a, task.a_step,
                           task.rows, task.out, id, count)
        return
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
    cdef Buffer weights, bias, weights_back
    cdef object lock
    cdef readonly Py_ssize_t n_in
    cdef readonly Py_ssize_t n_out
    cdef readonly object dtype
    cdef readonly object storage

    def __cinit__(self, W, b=None, *, storage=None):
        self.typenum = float_type("W", W)
        self.table = table_for(self.typenum, storage)
        self.storage = storage
        self.lock = threading.Lock()
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
        self.run(&task)
        return out

    def backward_x(self, dy):
        """dy (N, R) -> dy @ W, new (N, I), the same bits for any N."""
        check_2d("dy", dy, self.typenum, -1, self.n_out)
        cdef recur_layout back = recur_plain_layout(self.n_in, self.n_out)
        if self.storage is not None:
            raise ValueError(f"weights held as {self.storage} have no backward")
        with self.lock:
            if self.weights_back is None:
                self.weights_back = self.transposed(&back)
        cdef Py_ssize_t N = cnp.PyArray_DIM(dy, 0)
        cdef cnp.ndarray dx = empty_2d(self.typenum, N, self.n_in)
        cdef ProductTask task = ProductTask(
            self.table, &back, self.weights_back.data, NULL, data(dy), self.n_out, N, data(dx))
        self.run(&task)
        return dx

    cdef Buffer transposed(self, const recur_layout *back):
        cdef cnp.ndarray w = empty_2d(self.typenum, self.n_out, self.n_in)
        cdef Buffer buffer = Buffer(packed_size(self.table, back))
        self.table.unpack(&self.layout, self.weights.data, data(w))
        self.table.pack(back, data(w), 1, self.n_in, buffer.data)
        return buffer

    cdef void run(self, ProductTask *task) except *:
        cdef Py_ssize_t weights = self.n_in * self.n_out
        # few rows wait for the weights: reading one costs as long as five multiply-adds
        cdef int count = thread_count if max(task.rows, 5) * weights >= THREADED_CALL else 1
        parallel(run_product, task, count, task.rows * weights)


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


cdef struct DenseTask:
    const recur_table *table
    const void *w
    Py_ssize_t row_step, depth_step, units, depth
    const void *bias
    const void *a
    Py_ssize_t rows
    void *out
    void *scratch


cdef void run_dense(void *context, int id, int count, void *barrier) noexcept nogil:
    cdef DenseTask *task = <DenseTask *>context
    task.table.dense(task.w, task.row_step, task.depth_step, task.units, task.depth, task.bias,
                     task.a, task.rows, task.out, task.scratch, id, count)


cdef cnp.ndarray dense(int typenum, cnp.ndarray w, Py_ssize_t row_step, Py_ssize_t depth_step,
                       Py_ssize_t units, cnp.ndarray bias, cnp.ndarray a):
    """bias + a (N, depth) times the matrix (units, depth) in w, new (N, units)."""
    cdef Py_ssize_t N = cnp.PyArray_DIM(a, 0), depth = cnp.PyArray_DIM(a, 1)
    cdef cnp.ndarray out = empty_2d(typenum, N, units)
    cdef Py_ssize_t work = N * units * depth
    cdef int count = thread_count if work >= THREADED_CALL else 1
    cdef const recur_table *table = table_of(typenum)
    cdef void *scratch = workspace(count * table.dense_scratch(units, depth) * table.item)
    cdef DenseTask task = DenseTask(table, data(w), row_step, depth_step, units, depth, data(bias),
                                    data(a), N, data(out), scratch)
    parallel(run_dense, &task, count, work)
    return out


def affine_forward(W, x, b=None):
    """x (N, I) -> x @ W.T + b, new (N, R): W (R, I), b (R,) or None; the same bits for any N."""
    cdef int typenum = float_type("W", W)
    check_2d("W", W, typenum, -1, -1)
    cdef Py_ssize_t R = cnp.PyArray_DIM(W, 0), I = cnp.PyArray_DIM(W, 1)
    check_2d("x", x, typenum, -1, I)
    if b is not None:
        check_1d("b", b, typenum, R)
    return dense(typenum, W, I, 1, R, b, x)


def affine_backward_x(W, dy):
    """dy (N, R) -> dy @ W, new (N, I): W (R, I); the same bits for any N."""
    cdef int typenum = float_type("W", W)
    check_2d("W", W, typenum, -1, -1)
    cdef Py_ssize_t R = cnp.PyArray_DIM(W, 0), I = cnp.PyArray_DIM(W, 1)
    check_2d("dy", dy, typenum, -1, R)
    return dense(typenum, W, 1, I, I, None, dy)
