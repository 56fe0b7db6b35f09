# cython: freethreading_compatible=True
"""The compiled kernels: cells, packed products, gate maths.  The stub file states the contract of
each; the arithmetic is in _csrc/, where recur.h is the place to begin.

This module checks arguments, owns memory and calls C.  It keeps no state but the choice of the CPU
path, the number of threads, and buffers kept for reuse.
"""

import os
import threading

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetName, PyCapsule_GetPointer
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

cnp.import_array()


cdef extern from "recur.h" nogil:
    enum:
        RECUR_RNN, RECUR_LSTM, RECUR_GRU, RECUR_GRUV3
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

    ctypedef struct recur_table:
        const char *name
        int lanes
        Py_ssize_t item
        Py_ssize_t (*panels)(const recur_layout *) noexcept nogil
        Py_ssize_t (*panel_width)(const recur_layout *) noexcept nogil
        void (*pack)(const recur_layout *, const void *, Py_ssize_t, Py_ssize_t, void *) noexcept nogil
        void (*unpack)(const recur_layout *, const void *, void *) noexcept nogil
        void (*product)(const recur_layout *, const void *, const void *, const void *, const void *,
                        Py_ssize_t, Py_ssize_t, void *, int, int) noexcept nogil
        void (*forward)(const recur_cell *, const recur_forward *, int, int, void *) noexcept nogil
        void (*backward)(const recur_cell *, const recur_backward *, int, int, void *) noexcept nogil
        void (*map)(int, const void *, void *, Py_ssize_t) noexcept nogil
        void (*exp)(const void *, void *, Py_ssize_t) noexcept nogil
        void (*softmax_cross_entropy)(const void *, const int64_t *, const void *, const void *, void *,
                                      void *, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*outer)(const void *, Py_ssize_t, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t, Py_ssize_t,
                      int, void *, void *, int, int) noexcept nogil
        Py_ssize_t (*outer_scratch)(Py_ssize_t) noexcept nogil
        void (*sum_rows)(const void *, Py_ssize_t, Py_ssize_t, Py_ssize_t, int, void *) noexcept nogil

    int recur_path_count() noexcept
    const char *recur_path_name(int) noexcept
    const recur_table *recur_path_table(int, int) noexcept
    recur_layout recur_input_layout(int, Py_ssize_t, Py_ssize_t) noexcept
    recur_layout recur_hidden_layout(int, Py_ssize_t) noexcept
    recur_layout recur_hidden_back_layout(int, Py_ssize_t) noexcept
    recur_layout recur_plain_layout(Py_ssize_t, Py_ssize_t) noexcept

    ctypedef void (*recur_task)(void *, int, int, void *) noexcept nogil
    void recur_parallel(recur_task, void *, int) noexcept
    void recur_barrier(void *) noexcept


# ---- the CPU path, threads -----------------------------------------------------------------------

cdef const recur_table *TABLE_F32
cdef const recur_table *TABLE_F64
cdef int thread_count = 1

# Below this many multiply-adds a call keeps the GIL: giving it up and taking it back costs more.
cdef Py_ssize_t SHORT_WORK = 50_000


def cpu_paths():
    """The code paths that this machine can run, the best last."""
    return tuple(recur_path_name(i).decode() for i in range(recur_path_count()))


def cpu_path():
    """The path in use: the best, or the one that RECUR_ARCH named at import."""
    return TABLE_F32.name.decode()


def set_num_threads(n):
    """How many threads a large call may use, from now on."""
    global thread_count
    if not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"set_num_threads: n is {n!r}, expected a whole number of at least 1")
    thread_count = min(int(n), 64)


def get_num_threads():
    """The number that `set_num_threads` set; at import RECUR_NUM_THREADS, else the cores."""
    return thread_count


cdef void choose_path() except *:
    global TABLE_F32, TABLE_F64
    paths = cpu_paths()
    name = os.environ.get("RECUR_ARCH") or paths[-1]
    if name not in paths:
        raise ImportError(
            f"RECUR_ARCH is {name!r}, expected one that this machine can run: {', '.join(paths)}")
    TABLE_F32 = recur_path_table(paths.index(name), 0)
    TABLE_F64 = recur_path_table(paths.index(name), 1)


cdef void choose_threads() except *:
    asked = os.environ.get("RECUR_NUM_THREADS")
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise ImportError(
                f"RECUR_NUM_THREADS is {asked!r}, expected a whole number of at least 1")
        set_num_threads(int(asked))
    elif hasattr(os, "sched_getaffinity"):
        set_num_threads(len(os.sched_getaffinity(0)))
    else:
        set_num_threads(os.cpu_count() or 1)


choose_path()
choose_threads()


# ---- BLAS ----------------------------------------------------------------------------------------

# SciPy's BLAS has 32-bit or 64-bit integers, as it was built.  They are passed by address, so on
# little-endian machines one call serves both: a 32-bit reader sees the low half of a 64-bit number.
ctypedef void (*gemm_function)(char *, char *, int64_t *, int64_t *, int64_t *, void *, void *,
                               int64_t *, void *, int64_t *, void *, void *, int64_t *) noexcept nogil

cdef gemm_function SGEMM
cdef gemm_function DGEMM


cdef gemm_function blas_function(str name) except NULL:
    from scipy.linalg import cython_blas
    capsule = cython_blas.__pyx_capi__[name]
    return <gemm_function>PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule))


cdef void gemm(bint is_double, bint a_transposed, bint b_transposed, Py_ssize_t rows,
               Py_ssize_t columns, Py_ssize_t depth, const void *a, Py_ssize_t a_step,
               const void *b, Py_ssize_t b_step, bint accumulate, void *c, Py_ssize_t c_step) noexcept nogil:
    """Row-major c (rows, columns) = or += op(a) op(b); steps are from row to row."""
    # BLAS is column-major: there the same memory is the transposed product, with a and b swapped
    cdef int64_t m = columns, n = rows, k = depth, lda = b_step, ldb = a_step, ldc = c_step
    cdef char transpose_a = b'T' if a_transposed else b'N'
    cdef char transpose_b = b'T' if b_transposed else b'N'
    cdef float one_f = 1, beta_f = accumulate
    cdef double one_d = 1, beta_d = accumulate
    if rows == 0 or columns == 0:
        return
    if is_double:
        DGEMM(&transpose_b, &transpose_a, &m, &n, &k, &one_d, <void *>b, &lda, <void *>a, &ldb,
              &beta_d, c, &ldc)
    else:
        SGEMM(&transpose_b, &transpose_a, &m, &n, &k, &one_f, <void *>b, &lda, <void *>a, &ldb,
              &beta_f, c, &ldc)


cdef void load_blas() except *:
    global SGEMM, DGEMM
    cdef float a = 2, b = 3, c = 1
    SGEMM = blas_function("sgemm")
    DGEMM = blas_function("dgemm")
    gemm(False, False, False, 1, 1, 1, &a, 1, &b, 1, True, &c, 1)
    if c != 7:
        raise ImportError("recur cannot call this SciPy's BLAS: 2 * 3 + 1 gave %r" % c)


load_blas()


# ---- memory and checks ---------------------------------------------------------------------------

@cython.final
cdef class Buffer:
    """Bytes aligned to a cache line, freed with the object."""

    cdef void *block
    cdef void *data
    cdef Py_ssize_t size

    def __cinit__(self, Py_ssize_t size):
        self.block = malloc(size + 64)
        if self.block == NULL:
            raise MemoryError
        self.data = <void *>((<uintptr_t>self.block + 63) & ~<uintptr_t>63)
        self.size = size

    def __dealloc__(self):
        free(self.block)


workspaces = threading.local()


cdef void *workspace(Py_ssize_t size) except NULL:
    """This thread's scratch memory: valid until the thread's next call into this module."""
    cdef Buffer buffer = getattr(workspaces, "buffer", None)
    if buffer is None or buffer.size < size:
        buffer = Buffer(max(size, 1 << 16))
        workspaces.buffer = buffer
    return buffer.data


cdef inline void *data(cnp.ndarray a) noexcept:
    return NULL if a is None else cnp.PyArray_DATA(a)


cdef inline bint fits(object a, int typenum) noexcept:
    """Whether a is an ndarray of this type, aligned, in native byte order and C-contiguous."""
    return (cnp.PyArray_Check(a) and cnp.PyArray_TYPE(<cnp.ndarray>a) == typenum
            and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>a))


cdef object misfit(str name, object a, int typenum, tuple shape):
    """The error that says why `a` is not a C-contiguous array of this type and shape."""
    dtype = cnp.PyArray_DescrFromType(typenum)
    if not cnp.PyArray_Check(a) or a.dtype != dtype:
        found = a.dtype if cnp.PyArray_Check(a) else type(a).__name__
        return TypeError(f"{name} is {found}, expected an array of {dtype}")
    wanted = str(shape).replace("-1", "any")
    if a.ndim != len(shape) or any(w not in (-1, n) for w, n in zip(shape, a.shape)):
        return ValueError(f"{name} has shape {a.shape}, expected {wanted}")
    return ValueError(f"{name} of shape {a.shape} must be aligned and C-contiguous")


cdef int check_1d(str name, object a, int typenum, Py_ssize_t n) except -1:
    if not (fits(a, typenum) and a.ndim == 1 and (n < 0 or cnp.PyArray_DIM(a, 0) == n)):
        raise misfit(name, a, typenum, (n,))
    return 0


cdef int check_2d(str name, object a, int typenum, Py_ssize_t n, Py_ssize_t m) except -1:
    if not (fits(a, typenum) and cnp.PyArray_NDIM(a) == 2
            and (n < 0 or cnp.PyArray_DIM(a, 0) == n) and (m < 0 or cnp.PyArray_DIM(a, 1) == m)):
        raise misfit(name, a, typenum, (n, m))
    return 0


cdef int check_3d(str name, object a, int typenum, Py_ssize_t n, Py_ssize_t m, Py_ssize_t k) except -1:
    if not (fits(a, typenum) and cnp.PyArray_NDIM(a) == 3
            and (n < 0 or cnp.PyArray_DIM(a, 0) == n) and (m < 0 or cnp.PyArray_DIM(a, 1) == m)
            and (k < 0 or cnp.PyArray_DIM(a, 2) == k)):
        raise misfit(name, a, typenum, (n, m, k))
    return 0


cdef int check_writable(str name, cnp.ndarray a) except -1:
    if not cnp.PyArray_ISWRITEABLE(a):
        raise ValueError(f"{name} is read-only")
    return 0


cdef inline cnp.ndarray empty_2d(int typenum, Py_ssize_t n, Py_ssize_t m):
    cdef cnp.npy_intp dims[2]
    dims[0] = n
    dims[1] = m
    return cnp.PyArray_EMPTY(2, dims, typenum, 0)


cdef inline cnp.ndarray empty_3d(int typenum, Py_ssize_t n, Py_ssize_t m, Py_ssize_t k):
    cdef cnp.npy_intp dims[3]
    dims[0] = n
    dims[1] = m
    dims[2] = k
    return cnp.PyArray_EMPTY(3, dims, typenum, 0)


cdef inline cnp.ndarray flat(cnp.ndarray a, Py_ssize_t n, Py_ssize_t m):
    """A view as (n, m), where n counts steps and samples."""
    return a if cnp.PyArray_NDIM(a) == 2 else a.reshape(n, m)


cdef int float_type(str name, object a) except -1:
    """The type number of a float32 or float64 array."""
    if not cnp.PyArray_Check(a) or a.dtype not in (np.float32, np.float64):
        found = a.dtype if cnp.PyArray_Check(a) else type(a).__name__
        raise TypeError(f"{name} is {found}, expected an array of float32 or float64")
    return cnp.PyArray_TYPE(a)


cdef inline const recur_table *table_of(int typenum) noexcept nogil:
    return TABLE_F64 if typenum == cnp.NPY_FLOAT64 else TABLE_F32


cdef int row_step(str name, object a, int typenum, Py_ssize_t *step) except -1:
    """Check a (N, columns) array whose rows are contiguous; `step`: numbers from row to row."""
    if not (cnp.PyArray_Check(a) and cnp.PyArray_TYPE(a) == typenum and cnp.PyArray_ISNOTSWAPPED(a)):
        raise misfit(name, a, typenum, (-1, -1))
    cdef cnp.ndarray array = a
    cdef Py_ssize_t item = cnp.PyArray_ITEMSIZE(array)
    if cnp.PyArray_NDIM(array) != 2:
        raise misfit(name, a, typenum, (-1, -1))
    cdef Py_ssize_t columns = cnp.PyArray_DIM(array, 1)
    step[0] = max(columns, 1)
    if cnp.PyArray_SIZE(array) == 0: # the strides of an empty array mean nothing
        return 0
    if cnp.PyArray_DIM(array, 0) > 1:
        step[0] = cnp.PyArray_STRIDE(array, 0) // item
        if step[0] < columns or cnp.PyArray_STRIDE(array, 0) % item:
            raise misfit(name, a, typenum, (-1, -1))
    if (columns > 1 and cnp.PyArray_STRIDE(array, 1) != item) or not cnp.PyArray_ISALIGNED(array):
        raise misfit(name, a, typenum, (-1, -1))
    return 0


# ---- cells ---------------------------------------------------------------------------------------

cdef struct CellTask:
    const recur_table *table
    const recur_cell *cell
    const recur_forward *forward
    const recur_backward *backward


cdef void run_forward(void *context, int id, int count, void *barrier) noexcept nogil:
    cdef CellTask *task = <CellTask *>context
    task.table.forward(task.cell, task.forward, id, count, barrier)


cdef void run_backward(void *context, int id, int count, void *barrier) noexcept nogil:
    cdef CellTask *task = <CellTask *>context
    task.table.backward(task.cell, task.backward, id, count, barrier)


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


cdef inline void parallel(recur_task task, void *context, int count, Py_ssize_t work):
    if work < SHORT_WORK:
        recur_parallel(task, context, 1)
    else:
        with nogil:
            recur_parallel(task, context, count)


# Sequences of fewer rows than this multiply Wi by many steps' x at once: then the weights, not the
# arithmetic, cost the time, and Wi is read once for all of them.
cdef Py_ssize_t SMALL_BATCH = 8
# Bytes of Wi x that are kept ahead: they should stay in the second cache
cdef Py_ssize_t AHEAD = 1 << 17


cdef class CellKernel:
    """What the four cells share: an immutable snapshot of the weights, packed, and its steps.

    Arrays are C-contiguous with features last, in the kernel's dtype: x (B, I), h (B, H), a sequence
    X (T, B, I).  Inputs are read while the call runs; results are new and the caller's.  Operands
    stand for weight gradients not yet multiplied out: a name gives (dg (N, rows), x (N, cols)) for
    dg.T @ x, (dg,) for dg.sum(0), or ("dense", array); N is B for a step, T * B for a sequence.
    They may be column slices and may share memory with `saved`, x and states.
    """

    cdef recur_cell cell
    cdef const recur_table *table
    cdef readonly Py_ssize_t n_in
    cdef readonly Py_ssize_t n_out
    cdef readonly int n_states
    cdef readonly object dtype
    cdef readonly tuple gradient_names
    cdef int typenum
    cdef bint is_double
    cdef int gates                # G: rows of the stacked weights by H
    cdef list buffers             # own the packed weights
    cdef object lock              # held while the backward's weights are packed
    cdef bint has_backward
    cdef const void *wi_back

    def __init__(self, *args, **options):
        if type(self) is CellKernel:
            raise TypeError("CellKernel is a base class: build one of the four cells")

    cdef void setup(self, str cell_name, int kind, int act, Wi, Wh, b) except *:
        self.typenum = float_type("Wi", Wi)
        self.is_double = self.typenum == cnp.NPY_FLOAT64
        self.table = table_of(self.typenum)
        self.dtype = Wi.dtype
        self.buffers = []
        self.lock = threading.Lock()
        check_2d("Wi", Wi, self.typenum, -1, -1)
        cdef recur_layout m = recur_input_layout(kind, 0, 0)
        self.gates = m.gates
        cdef Py_ssize_t rows = cnp.PyArray_DIM(Wi, 0), H = rows // self.gates
        if rows == 0 or rows % self.gates:
            raise ValueError(f"{cell_name}: Wi has {rows} rows, expected a positive multiple of {self.gates}")
        self.n_in = cnp.PyArray_DIM(Wi, 1)
        self.n_out = H
        self.n_states = 2 if kind == RECUR_LSTM else 1
        self.cell.kind = kind
        self.cell.act = act
        self.cell.n_in = self.n_in
        self.cell.n_hidden = H
        cdef recur_layout wh = recur_hidden_layout(kind, H)
        check_2d("Wh", Wh, self.typenum, wh.gates * H, H)
        if b is not None:
            check_1d("b", b, self.typenum, rows)
        m = recur_input_layout(kind, self.n_in, H)
        self.cell.wi = self.pack(&m, Wi, self.n_in, 1)
        self.cell.wh = self.pack(&wh, Wh, H, 1)
        m.depth = 1
        self.cell.bias = self.pack(&m, b, 1, 1)
        self.gradient_names = ("Wi", "Wh") + (() if b is None else ("b",))

    cdef const void *pack(self, const recur_layout *m, cnp.ndarray w, Py_ssize_t row_step,
                          Py_ssize_t depth_step) except NULL:
        """Packed copy of a matrix, or packed zeros for None."""
        cdef Py_ssize_t size = self.table.panels(m) * self.table.panel_width(m) * m.depth * self.table.item
        cdef Buffer buffer = Buffer(size)
        if w is None:
            memset(buffer.data, 0, size)
        else:
            self.table.pack(m, cnp.PyArray_DATA(w), row_step, depth_step, buffer.data)
        self.buffers.append(buffer)
        return buffer.data

    cdef cnp.ndarray unpack(self, const recur_layout *m, const void *packed):
        cdef cnp.ndarray w = empty_2d(self.typenum, m.gates * m.units, m.depth)
        self.table.unpack(m, packed, cnp.PyArray_DATA(w))
        return w

    cdef void pack_backward(self) except *:
        """Pack the transposes that the backward multiplies with; once, by one thread."""
        with self.lock:
            if self.has_backward:
                return
            self.pack_transposes()
            self.has_backward = True

    cdef void pack_transposes(self) except *:
        cdef Py_ssize_t H = self.n_out, I = self.n_in
        cdef recur_layout m = recur_input_layout(self.cell.kind, I, H)
        cdef recur_layout back = recur_plain_layout(I, self.gates * H)
        self.wi_back = self.pack(&back, self.unpack(&m, self.cell.wi), 1, I)
        m = recur_hidden_layout(self.cell.kind, H)
        back = recur_hidden_back_layout(self.cell.kind, H)
        self.cell.wh_back = self.pack(&back, self.unpack(&m, self.cell.wh), 1, H)
        if self.cell.whh != NULL:
            m = recur_plain_layout(H, H)
            self.cell.whh_back = self.pack(&m, self.unpack(&m, self.cell.whh), 1, H)

    # -- checks

    cdef int check_state(self, str name, tuple state, Py_ssize_t B) except -1:
        if len(state) != self.n_states:
            raise ValueError(f"{name} has {len(state)} arrays, expected {self.n_states}")
        check_2d(f"{name}[0]" if name != "h" else "h", state[0], self.typenum, B, self.n_out)
        if self.n_states == 2:
            check_2d(f"{name}[1]" if name != "h" else "c", state[1], self.typenum, B, self.n_out)
        return 0

    cdef tuple check_dstate(self, tuple dstate, Py_ssize_t B):
        """Own copies of the state's gradients: the C side updates them in place."""
        if len(dstate) != self.n_states:
            raise ValueError(f"dstate has {len(dstate)} arrays, expected {self.n_states}")
        cdef object h = self.own_gradient(dstate[0], "dstate[0]", B)
        if self.n_states == 1:
            return (h,)
        return h, self.own_gradient(dstate[1], "dstate[1]", B)

    cdef object own_gradient(self, d, str name, Py_ssize_t B):
        cdef cnp.npy_intp dims[2]
        if d is None:
            dims[0] = B
            dims[1] = self.n_out
            return cnp.PyArray_ZEROS(2, dims, self.typenum, 0)
        check_2d(name, d, self.typenum, B, self.n_out)
        return cnp.PyArray_NewCopy(d, cnp.NPY_CORDER)

    cdef Py_ssize_t work(self, Py_ssize_t rows) noexcept:
        return rows * self.gates * self.n_out * (self.n_in + self.n_out)

    cdef int threads(self, Py_ssize_t T, Py_ssize_t B) noexcept:
        """One thread, unless a step pays for its barrier and the call for waking the others."""
        # small batches wait for the weights: reading one costs as long as five multiply-adds
        cdef Py_ssize_t step = max(self.work(B), 5 * self.work(1))
        if step < THREADED_STEP or T * step < THREADED_CALL:
            return 1
        return thread_count

    # -- one step

    cdef void run_step(self, const void *x, const void *h, const void *c, void *h_out, void *c_out,
                       void *gates, void *hn, Py_ssize_t B) except *:
        cdef recur_forward f
        memset(&f, 0, sizeof(f))
        f.steps = 1
        f.batch = B
        f.x = x
        f.h_first = h
        f.c_first = c
        f.h = h_out
        f.c = c_out
        f.gates = gates
        f.hn = hn
        if self.cell.kind == RECUR_GRUV3:
            f.scratch = workspace(3 * B * self.n_out * self.table.item)
        cdef CellTask task = CellTask(self.table, &self.cell, &f, NULL)
        parallel(run_forward, &task, self.threads(1, B), self.work(B))

    def step(self, x, *state, out=None):
        """One step: x (B, I), then the state's arrays (B, H), give the next state, a tuple.

        out    tuple of arrays to write instead of new ones; each may be the state's own array
        Raises TypeError (dtype) or ValueError (shape, layout); nothing was changed then.
        """
        cdef Py_ssize_t H = self.n_out
        check_2d("x", x, self.typenum, -1, self.n_in)
        cdef Py_ssize_t B = cnp.PyArray_DIM(x, 0)
        self.check_state("h", state, B)
        if out is not None:
            return self.step_into(x, state, out)
        cdef cnp.ndarray h = empty_2d(self.typenum, B, H), c
        if self.n_states == 1:
            self.run_step(data(x), data(state[0]), NULL, data(h), NULL, NULL, NULL, B)
            return (h,)
        c = empty_2d(self.typenum, B, H)
        self.run_step(data(x), data(state[0]), data(state[1]), data(h), data(c), NULL, NULL, B)
        return (h, c)

    cdef tuple step_into(self, x, tuple state, out):
        """Through new arrays: a step reads all of h, and x may be given as `out`, too."""
        cdef Py_ssize_t B = cnp.PyArray_DIM(x, 0)
        if not isinstance(out, tuple):
            raise TypeError("out must be a tuple of arrays, one for each of the state's")
        self.check_state("out", out, B)
        for i, array in enumerate(out):
            check_writable(f"out[{i}]", array)
        for array, new in zip(out, self.step(x, *state)):
            memcpy(data(array), data(new), B * self.n_out * self.table.item)
        return out

    def step_save(self, x, *state):
        """One step, bit for bit as `step`, and what its backward needs: (state', saved).

        saved shares no memory with x, state or state', and belongs to the caller.
        """
        cdef Py_ssize_t H = self.n_out
        check_2d("x", x, self.typenum, -1, self.n_in)
        cdef Py_ssize_t B = cnp.PyArray_DIM(x, 0)
        self.check_state("h", state, B)
        cdef cnp.ndarray h = empty_2d(self.typenum, B, H), c = None, gates = None, hn = None
        if self.cell.kind == RECUR_LSTM:
            c = empty_2d(self.typenum, B, H)
        if self.cell.kind != RECUR_RNN:
            gates = empty_2d(self.typenum, B, self.gates * H)
        if self.cell.kind == RECUR_GRU:
            hn = empty_2d(self.typenum, B, H)
        self.run_step(data(x), data(state[0]), data(state[1]) if c is not None else NULL,
                      data(h), data(c), data(gates), data(hn), B)
        if c is not None:
            return (h, c), (gates,)
        if hn is not None:
            return (h,), (gates, hn)
        return (h,), (h.copy(),) if gates is None else (gates,)

    def step_backward(self, tuple saved, x, tuple state, tuple dstate, *, bint need_dx, bint keep):
        """Gradients of one step: (dx or None, gradient of the state before, operands).

        saved   what `step_save` returned; keep=False lets the call overwrite it
        x, state   as they were given to `step_save`
        dstate  gradient of the state after the step: (B, H) arrays, None for zeros
        """
        check_2d("x", x, self.typenum, -1, self.n_in)
        cdef Py_ssize_t B = cnp.PyArray_DIM(x, 0), H = self.n_out
        self.check_state("h", state, B)
        self.check_step_saved(saved, B)
        cdef cnp.ndarray h_after = saved[0] if self.cell.kind == RECUR_RNN else None
        return self.run_backward_of(
            1, B, x, state, data(h_after), data(state[1]) if self.n_states == 2 else NULL,
            state[0], saved[0], saved[1] if self.cell.kind == RECUR_GRU else None, None, dstate,
            None, need_dx, keep)

    # -- sequences

    cdef int check_lengths(self, lengths, Py_ssize_t T, Py_ssize_t B) except -1:
        if lengths is None:
            return 0
        check_1d("lengths", lengths, cnp.NPY_INT64, B)
        if B and (lengths.min() < 0 or lengths.max() > T):
            raise ValueError(f"lengths go from {lengths.min()} to {lengths.max()}, expected 0 to T = {T}")
        return 0

    cdef tuple run_sequence(self, X, tuple state, lengths, bint save):
        check_3d("X", X, self.typenum, -1, -1, self.n_in)
        cdef Py_ssize_t T = cnp.PyArray_DIM(X, 0), B = cnp.PyArray_DIM(X, 1), H = self.n_out
        cdef Py_ssize_t item = self.table.item, step_bytes = B * H * item
        cdef int kind = self.cell.kind, t = self.typenum
        self.check_state("h", state, B)
        self.check_lengths(lengths, T, B)
        # slot 0 of a slab is the first state
        cdef cnp.ndarray h = empty_3d(t, T + 1, B, H), c = None, gates = None, hn = None, Y
        memcpy(data(h), data(state[0]), step_bytes)
        Y = h[1:]
        if kind == RECUR_LSTM:
            c = empty_3d(t, T + 1 if save else 1, B, H)
            memcpy(data(c), data(state[1]), step_bytes)
        if save and kind != RECUR_RNN:
            gates = empty_3d(t, T, B, self.gates * H)
        if save and kind == RECUR_GRU:
            hn = empty_3d(t, T, B, H)
        cdef recur_forward f
        memset(&f, 0, sizeof(f))
        f.steps = T
        f.batch = B
        f.x = data(X)
        f.h_first = data(h)
        f.h = <char *>data(h) + step_bytes
        f.h_step = B * H
        f.c_first = f.c = data(c)
        if save and c is not None:
            f.c = <char *>data(c) + step_bytes
            f.c_step = B * H
        f.gates = data(gates)
        f.hn = data(hn)
        if lengths is not None:
            Y = empty_3d(t, T, B, H)
            f.lengths = <const int64_t *>data(lengths)
            f.y = data(Y)
        cdef Py_ssize_t ahead = 0, row_bytes = B * self.gates * H * item
        if 0 < B < SMALL_BATCH and T > 1:
            f.chunk = T if gates is not None else min(T, max(1, AHEAD // row_bytes))
            ahead = f.chunk * row_bytes
        cdef char *scratch = <char *>workspace(3 * step_bytes + ahead + 1)
        f.scratch = scratch
        if ahead:
            f.projected = data(gates) if gates is not None else scratch + 3 * step_bytes
        cdef CellTask task = CellTask(self.table, &self.cell, &f, NULL)
        parallel(run_forward, &task, self.threads(T, B), self.work(T * B))
        last = (h[T].copy(),) if c is None else (h[T].copy(), c[T if save else 0].copy())
        saved = None
        if save:
            saved = tuple(a for a in (gates, hn, c, h) if a is not None)
        return Y, last, saved

    def sequence(self, X, *state, lengths=None):
        """T steps, bit for bit: X (T, B, I) -> (Y (T, B, H), last state).

        lengths   (B,) int64 or None: sample b stops after lengths[b] steps; from there its state
                  stays and its Y is 0
        """
        Y, last, _ = self.run_sequence(X, state, lengths, False)
        return Y, last

    def sequence_save(self, X, *state, lengths=None):
        """`sequence` and what its backward needs: (Y, last state, saved).

        Without lengths Y is a view of `saved`: not to be written while that is to be used.
        """
        return self.run_sequence(X, state, lengths, True)

    def sequence_backward(self, tuple saved, X, dY, tuple dstate, *, bint need_dx, bint keep, lengths=None):
        """Gradients of T steps: (dX or None, gradient of the first state, operands).

        saved, X, lengths   of `sequence_save`; keep=False lets the call overwrite `saved`, never Y
        dY      (T, B, H) or None for zeros; past a sample's length it is not read
        dstate  gradient of the last state: (B, H) arrays, None for zeros
        """
        check_3d("X", X, self.typenum, -1, -1, self.n_in)
        cdef Py_ssize_t T = cnp.PyArray_DIM(X, 0), B = cnp.PyArray_DIM(X, 1), H = self.n_out
        cdef Py_ssize_t step_bytes = B * H * self.table.item
        self.check_saved(saved, T, B)
        cdef cnp.ndarray h = saved[len(saved) - 1], c = None
        self.check_lengths(lengths, T, B)
        if dY is not None:
            check_3d("dY", dY, self.typenum, T, B, H)
        state = (h[0],)
        if self.cell.kind == RECUR_LSTM:
            c = saved[1]
            state = (h[0], c[0])
        return self.run_backward_of(
            T, B, X, state, <char *>data(h) + step_bytes,
            <char *>data(c) + step_bytes if c is not None else NULL,
            h[:T].reshape(T * B, H), saved[0], saved[1] if self.cell.kind == RECUR_GRU else None, dY,
            dstate, lengths, need_dx, keep)

    # -- backward

    cdef int check_saved(self, tuple saved, Py_ssize_t T, Py_ssize_t B) except -1:
        """A sequence's `saved`: gates (but RNN's), hn of GRU, c of LSTM, and h, in this order."""
        cdef Py_ssize_t H = self.n_out
        cdef int kind = self.cell.kind, t = self.typenum
        cdef Py_ssize_t count = 1 if kind == RECUR_RNN else 2 if kind == RECUR_GRUV3 else 3
        if len(saved) != count:
            raise ValueError(f"saved has {len(saved)} arrays, expected {count}")
        check_3d("saved's h", saved[count - 1], t, T + 1, B, H)
        if kind != RECUR_RNN:
            check_3d("saved's gates", saved[0], t, T, B, self.gates * H)
        if kind == RECUR_GRU:
            check_3d("saved's Wh h", saved[1], t, T, B, H)
        if kind == RECUR_LSTM:
            check_3d("saved's c", saved[1], t, T + 1, B, H)
        return 0

    cdef int check_step_saved(self, tuple saved, Py_ssize_t B) except -1:
        """A step's `saved`: the gates and hn of GRU; RNN's is h' alone."""
        cdef Py_ssize_t count = 2 if self.cell.kind == RECUR_GRU else 1
        if len(saved) != count:
            raise ValueError(f"saved has {len(saved)} arrays, expected {count}")
        check_2d("saved's gates", saved[0], self.typenum, B, self.gates * self.n_out)
        if count == 2:
            check_2d("saved's Wh h", saved[1], self.typenum, B, self.n_out)
        return 0

    cdef tuple run_backward_of(self, Py_ssize_t T, Py_ssize_t B, cnp.ndarray X, tuple state,
                               const void *h_after, const void *c_after, cnp.ndarray h_before,
                               cnp.ndarray gates,
                               cnp.ndarray hn, cnp.ndarray dY, tuple dstate, cnp.ndarray lengths,
                               bint need_dx, bint keep):
        """The backward of T steps.  state is before the first, h_after and c_after from the first
        on, h_before (T * B, H) before each."""
        cdef Py_ssize_t H = self.n_out, N = T * B, item = self.table.item, G = self.gates
        cdef int kind = self.cell.kind, t = self.typenum
        cdef cnp.ndarray dg, dgh = None, rh = None, dpeephole = None, dX = None
        if not self.has_backward:
            self.pack_backward()
        dstate = self.check_dstate(dstate, B)
        # an RNN's gates are its outputs, which the weights' gradient still needs
        dg = empty_2d(t, N, G * H) if keep or kind == RECUR_RNN else flat(gates, N, G * H)
        cdef recur_backward f
        memset(&f, 0, sizeof(f))
        f.steps = T
        f.batch = B
        f.lengths = <const int64_t *>data(lengths)
        f.h_first = data(state[0])
        f.h = h_after
        f.h_step = B * H
        if kind == RECUR_LSTM:
            f.c_first = data(state[1])
            f.c = c_after
            f.c_step = B * H
            f.dc = data(dstate[1])
        if kind == RECUR_GRU:
            dgh = empty_2d(t, N, G * H)
        if kind == RECUR_GRUV3:
            rh = empty_2d(t, N, H)
        cdef Py_ssize_t padded = (H + self.table.lanes - 1) // self.table.lanes * self.table.lanes
        if self.cell.peephole != NULL:
            dpeephole = np.zeros((3, padded), self.dtype)
        f.gates = data(gates) if kind != RECUR_RNN else NULL
        f.hn = data(hn)
        f.dy = data(dY)
        f.dh = data(dstate[0])
        f.carry = workspace(B * H * item + 1)
        f.dg = data(dg)
        f.dgh = data(dgh)
        f.rh = data(rh)
        f.dpeephole = data(dpeephole)
        cdef CellTask task = CellTask(self.table, &self.cell, NULL, &f)
        parallel(run_backward, &task, self.threads(T, B), self.work(N))
        if need_dx:
            dX = self.input_gradient(dg, X)
        x = flat(X, N, self.n_in)
        if lengths is not None and N and lengths.min() < T:
            # padding may hold anything; NaN times a gradient of 0 would be NaN
            x = X.copy()
            x[np.arange(T)[:, None] >= lengths] = 0
            x = flat(x, N, self.n_in)
            if need_dx:
                dX[np.arange(T)[:, None] >= lengths] = 0
        return dX, dstate, self.operands(dg, dgh, rh, dpeephole, x, h_before)

    cdef cnp.ndarray input_gradient(self, cnp.ndarray dg, cnp.ndarray X):
        """dg (N, G H) -> dg Wi, of X's shape."""
        cdef Py_ssize_t N = cnp.PyArray_DIM(dg, 0)
        cdef cnp.ndarray dX = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(X), cnp.PyArray_DIMS(X), self.typenum, 0)
        cdef recur_layout m = recur_plain_layout(self.n_in, self.gates * self.n_out)
        cdef ProductTask task = ProductTask(self.table, &m, self.wi_back, NULL, data(dg), m.depth, N, data(dX))
        cdef Py_ssize_t work = N * m.units * m.depth
        parallel(run_product, &task, thread_count if work >= THREADED_CALL else 1, work)
        return dX

    cdef dict operands(self, cnp.ndarray dg, cnp.ndarray dgh, cnp.ndarray rh, cnp.ndarray dpeephole,
                       cnp.ndarray x, cnp.ndarray h):
        cdef Py_ssize_t H = self.n_out
        cdef dict found = {"Wi": (dg, x), "Wh": (dg, h)}
        if "b" in self.gradient_names:
            found["b"] = (dg,)
        if self.cell.kind == RECUR_GRU:
            found["Wh"] = (dgh, h)
            if "bh" in self.gradient_names:
                found["bh"] = (dgh[:, 2 * H:],)
        elif self.cell.kind == RECUR_GRUV3:
            found["Wh"] = (dg[:, :2 * H], h)
            found["Whh"] = (dg[:, 2 * H:], rh)
        elif dpeephole is not None:
            found["peephole"] = ("dense", np.ascontiguousarray(dpeephole[:, :H]))
        return found


cdef int gate_function(object name) except -1:
    if name == "sigmoid":
        return RECUR_SIGMOID
    if name == "hard_sigmoid":
        return RECUR_HARD_SIGMOID
    raise ValueError(f"gate is {name!r}, expected 'sigmoid' or 'hard_sigmoid'")


cdef int activation(object name) except -1:
    functions = {"tanh": RECUR_TANH, "relu": RECUR_RELU, "sigmoid": RECUR_SIGMOID,
                 "identity": RECUR_IDENTITY, "hard_sigmoid": RECUR_HARD_SIGMOID}
    if name not in functions:
        raise ValueError(f"activation is {name!r}, expected one of {', '.join(functions)}")
    return functions[name]


@cython.final
cdef class RNNKernel(CellKernel):
    """h' = act(Wi x + Wh h + b).

    Wi (H, I), Wh (H, H), b (H,) or None are copied.  act: "tanh", "relu", "sigmoid", "identity".
    The state is (h,); gradients are "Wi", "Wh", "b".  ValueError, TypeError on arrays that do not fit.
    """

    def __cinit__(self, Wi, Wh, b=None, *, act="tanh"):
        if act == "hard_sigmoid":
            raise ValueError("act is 'hard_sigmoid', expected 'tanh', 'relu', 'sigmoid' or 'identity'")
        self.setup("RNNKernel", RECUR_RNN, activation(act), Wi, Wh, b)


@cython.final
cdef class LSTMKernel(CellKernel):
    """g = Wi x + Wh h + b in row blocks i, f, n, u;  c' = s(f) c + s(i) tanh(n);  h' = s(u) tanh(c').

    With peephole rows p_i, p_f, p_o: i += p_i c, f += p_f c, u += p_o c' before the gates.
    Wi (4H, I), Wh (4H, H), b (4H,) or None, peephole (3, H) or None are copied; gate: "sigmoid" or
    "hard_sigmoid".  The state is (h, c); gradients are "Wi", "Wh", "b", "peephole".
    ValueError, TypeError on arrays that do not fit.
    """

    def __cinit__(self, Wi, Wh, b=None, *, peephole=None, gate="sigmoid"):
        self.setup("LSTMKernel", RECUR_LSTM, gate_function(gate), Wi, Wh, b)
        if peephole is not None:
            check_2d("peephole", peephole, self.typenum, 3, self.n_out)
            self.cell.peephole = self.pack_peephole(peephole)
            self.gradient_names += ("peephole",)

    cdef const void *pack_peephole(self, cnp.ndarray peephole) except NULL:
        cdef recur_layout row = recur_layout(1, 1, self.n_out, 1)
        cdef Py_ssize_t i, padded = self.table.panels(&row) * self.table.lanes * self.table.item
        cdef Buffer buffer = Buffer(3 * padded)
        for i in range(3):
            self.table.pack(&row, <char *>data(peephole) + i * self.n_out * self.table.item, 1, 1,
                            <char *>buffer.data + i * padded)
        self.buffers.append(buffer)
        return buffer.data


@cython.final
cdef class GRUKernel(CellKernel):
    """r, z = s(Wi x + Wh h + b);  n = tanh(Wi_n x + b_n + r (Wh_n h + bh));  h' = (1 - z) n + z h.

    Wi (3H, I), Wh (3H, H), b (3H,) or None in row blocks r, z, n, and bh (H,) or None are copied;
    gate: "sigmoid" or "hard_sigmoid".  The state is (h,); gradients are "Wi", "Wh", "b", "bh".
    ValueError, TypeError on arrays that do not fit.
    """

    def __cinit__(self, Wi, Wh, b=None, *, bh=None, gate="sigmoid"):
        self.setup("GRUKernel", RECUR_GRU, gate_function(gate), Wi, Wh, b)
        cdef recur_layout row = recur_layout(1, 1, self.n_out, 1)
        if bh is not None:
            check_1d("bh", bh, self.typenum, self.n_out)
            self.gradient_names += ("bh",)
        self.cell.bias_h = self.pack(&row, bh, 1, 1)


@cython.final
cdef class GRUv3Kernel(CellKernel):
    """r, z = s(Wi x + Wh h + b);  n = tanh(Wi_n x + b_n + Whh (r h));  h' = (1 - z) n + z h.

    Wi (3H, I), Wh (2H, H), b (3H,) or None, Whh (H, H) are copied; gate: "sigmoid" or
    "hard_sigmoid".  The state is (h,); gradients are "Wi", "Wh", "b", "Whh".
    ValueError, TypeError on arrays that do not fit.
    """

    def __cinit__(self, Wi, Wh, b=None, *, Whh, gate="sigmoid"):
        self.setup("GRUv3Kernel", RECUR_GRUV3, gate_function(gate), Wi, Wh, b)
        check_2d("Whh", Whh, self.typenum, self.n_out, self.n_out)
        cdef recur_layout m = recur_plain_layout(self.n_out, self.n_out)
        self.cell.whh = self.pack(&m, Whh, self.n_out, 1)
        self.gradient_names += ("Whh",)


# Multiply-adds (50,000 take a microsecond) below which a call keeps to one thread: a step of a few
# microseconds does not pay for a barrier, nor a call of a tenth of a millisecond for waking threads.
cdef Py_ssize_t THREADED_STEP = 400_000
cdef Py_ssize_t THREADED_CALL = 5_000_000


# ---- products ------------------------------------------------------------------------------------

@cython.final
cdef class AffineKernel:
    """y = W x + b on packed weights: W (R, I), b (R,) or None are copied.

    ValueError, TypeError on arrays that do not fit.
    """

    cdef const recur_table *table
    cdef int typenum
    cdef recur_layout layout
    cdef Buffer weights, bias
    cdef readonly Py_ssize_t n_in
    cdef readonly Py_ssize_t n_out
    cdef readonly object dtype

    def __cinit__(self, W, b=None):
        self.typenum = float_type("W", W)
        self.table = table_of(self.typenum)
        self.dtype = W.dtype
        check_2d("W", W, self.typenum, -1, -1)
        self.n_out = cnp.PyArray_DIM(W, 0)
        self.n_in = cnp.PyArray_DIM(W, 1)
        self.layout = recur_plain_layout(self.n_out, self.n_in)
        cdef Py_ssize_t row = self.table.panels(&self.layout) * self.table.panel_width(&self.layout) * self.table.item
        self.weights = Buffer(row * self.n_in)
        self.table.pack(&self.layout, data(W), self.n_in, 1, self.weights.data)
        cdef recur_layout column = recur_plain_layout(self.n_out, 1)
        self.bias = Buffer(row)
        memset(self.bias.data, 0, row)
        if b is not None:
            check_1d("b", b, self.typenum, self.n_out)
            self.table.pack(&column, data(b), 1, 1, self.bias.data)

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


# ---- a chain in one call -------------------------------------------------------------------------

@cython.final
cdef class Version:
    """A counter that an owner of weights raises at each write, and that a Stepper reads."""

    cdef public long long count

    def __cinit__(self, count=0):
        self.count = count

    def bump(self):
        """Add one."""
        self.count += 1


# One stage of a chain.  A cell's step needs other memory for h' than for h, so two buffers take
# turns, and there are two forms of each call, for even and for odd steps.
cdef struct Stage:
    const recur_cell *cell      # NULL for the other kinds
    recur_forward forward[2]
    recur_layout layout         # AffineKernel
    const void *packed          # its weights; NULL for an activation
    const void *bias
    int function
    const void *x[2]
    void *y[2]
    Py_ssize_t size             # numbers in y
    int threads


cdef struct Chain:
    const recur_table *table
    Stage *stages
    Py_ssize_t count, batch
    int turn


cdef void run_stage(Chain *chain, Stage *stage, int id, int count, void *barrier) noexcept nogil:
    cdef int turn = chain.turn
    if stage.cell != NULL:
        chain.table.forward(stage.cell, &stage.forward[turn], id, count, barrier)
    elif stage.packed != NULL:
        chain.table.product(&stage.layout, stage.packed, stage.bias, NULL, stage.x[turn],
                            stage.layout.depth, chain.batch, stage.y[turn], id, count)
    elif id == 0:
        chain.table.map(stage.function, stage.x[turn], stage.y[turn], stage.size)


cdef void run_chain(void *context, int id, int count, void *barrier) noexcept nogil:
    cdef Chain *chain = <Chain *>context
    cdef Py_ssize_t i
    for i in range(chain.count):
        run_stage(chain, &chain.stages[i], id, count, barrier)
        if count > 1:
            recur_barrier(barrier)


cdef void copy_in(const char *x, Py_ssize_t step, bint is_double, void *to, bint to_double,
                  Py_ssize_t n) noexcept nogil:
    """n numbers `step` bytes apart into contiguous memory, converted."""
    cdef Py_ssize_t i
    for i in range(n):
        if to_double:
            (<double *>to)[i] = (<double *>(x + i * step))[0] if is_double else (<float *>(x + i * step))[0]
        else:
            (<float *>to)[i] = <float>(<double *>(x + i * step))[0] if is_double else (<float *>(x + i * step))[0]


@cython.final
cdef class Stepper:
    """A chain of kernels stepped by one call, with its recurrent state inside.

    stages   cell kernels, AffineKernels and activation names, all of one dtype, sizes chained
    batch    B, fixed; the state starts at zeros
    watch    Version counters of everything that the kernels are snapshots of
    It belongs to one thread at a time.  ValueError, TypeError on stages that do not fit.
    """

    cdef Chain chain
    cdef Buffer stages, memory
    cdef readonly tuple kernels
    cdef tuple watch
    cdef list counts
    cdef int typenum
    cdef void *x
    cdef list cell_stages          # indices
    cdef Py_ssize_t work
    cdef int threads
    cdef bint running
    cdef readonly Py_ssize_t batch
    cdef readonly Py_ssize_t n_in
    cdef readonly Py_ssize_t n_out
    cdef readonly object dtype

    def __cinit__(self, stages, batch, *, watch=()):
        self.kernels = tuple(stages)
        self.batch = batch
        if batch < 0:
            raise ValueError(f"batch is {batch}, expected at least 0")
        if not self.kernels or isinstance(self.kernels[0], str):
            raise ValueError("a Stepper needs stages, the first of them a kernel")
        self.dtype = self.kernels[0].dtype
        self.typenum = cnp.NPY_FLOAT64 if self.dtype == np.float64 else cnp.NPY_FLOAT32
        self.chain.table = table_of(self.typenum)
        self.n_in = self.n_out = self.kernels[0].n_in
        self.check_stages()
        self.watch = tuple(watch)
        for version in self.watch:
            if not isinstance(version, Version):
                raise TypeError(f"watch holds {type(version).__name__}, expected Version")
        self.counts = [(<Version>version).count for version in self.watch]
        self.lay_out()

    cdef int check_stages(self) except -1:
        for i, stage in enumerate(self.kernels):
            if isinstance(stage, str):
                activation(stage)
                continue
            if not isinstance(stage, (CellKernel, AffineKernel)):
                raise TypeError(f"stage {i} is {type(stage).__name__}, expected a kernel or an activation")
            if stage.dtype != self.dtype:
                raise TypeError(f"stage {i} is {stage.dtype}, the first is {self.dtype}")
            if stage.n_in != self.n_out:
                raise ValueError(f"stage {i} takes {stage.n_in} features, the one before gives {self.n_out}")
            self.n_out = stage.n_out
        return 0

    cdef void lay_out(self) except *:
        """Give each stage its memory: x, then for each h twice and c, or y; GRUv3's scratch."""
        cdef Py_ssize_t item = self.chain.table.item, B = self.batch, width = self.n_in, i, n, needed
        widths = [self.n_in]
        for stage in self.kernels:
            widths.append(widths[len(widths) - 1] if isinstance(stage, str) else stage.n_out)
        # each block starts on a cache line, so that a stage's stores meet no other stage's loads
        blocks = [(B * n * item + 63) // 64 * 64 for n in widths]
        needed = blocks[0] + sum(6 * block for block in blocks[1:])
        self.memory = Buffer(max(needed, 1))
        memset(self.memory.data, 0, needed)
        self.stages = Buffer(len(self.kernels) * sizeof(Stage))
        memset(self.stages.data, 0, self.stages.size)
        self.chain.stages = <Stage *>self.stages.data
        self.chain.count = len(self.kernels)
        self.chain.batch = B
        self.cell_stages = []
        self.threads = 1
        self.x = self.memory.data
        cdef char *at = <char *>self.memory.data + <Py_ssize_t>blocks[0]
        cdef void *x0 = self.x
        cdef void *x1 = self.x
        cdef Stage *s
        cdef Py_ssize_t block
        for i in range(self.chain.count):
            s = &self.chain.stages[i]
            block = blocks[i + 1]
            s.size = B * <Py_ssize_t>widths[i + 1]
            s.x[0], s.x[1] = x0, x1
            s.y[0], s.y[1] = at, at
            stage = self.kernels[i]
            if isinstance(stage, CellKernel):
                self.lay_out_cell(s, stage, at, block)
                self.cell_stages.append(i)
            elif isinstance(stage, AffineKernel):
                self.lay_out_affine(s, stage)
            else:
                s.function = activation(stage)
            x0, x1 = s.y[0], s.y[1]
            at += 6 * block

    cdef void lay_out_cell(self, Stage *s, CellKernel kernel, char *at, Py_ssize_t block) except *:
        cdef recur_forward *f
        cdef int turn
        s.cell = &kernel.cell
        s.y[0], s.y[1] = at + block, at
        for turn in range(2):
            f = &s.forward[turn]
            f.steps = 1
            f.batch = self.batch
            f.x = s.x[turn]
            f.h_first = at + turn * block
            f.h = s.y[turn]
            f.c_first = f.c = at + 2 * block
            f.scratch = at + 3 * block if kernel.cell.kind == RECUR_GRUV3 else NULL
        self.work += kernel.work(self.batch)
        self.threads = max(self.threads, kernel.threads(1, self.batch))

    cdef void lay_out_affine(self, Stage *s, AffineKernel kernel) except *:
        s.layout = kernel.layout
        s.packed = kernel.weights.data
        s.bias = kernel.bias.data
        self.work += self.batch * kernel.n_in * kernel.n_out

    @property
    def fresh(self):
        """False once a watched counter moved."""
        return self.is_fresh()

    cdef bint is_fresh(self) noexcept:
        cdef Py_ssize_t i
        for i in range(len(self.watch)):
            if (<Version>self.watch[i]).count != <long long>self.counts[i]:
                return False
        return True

    def __call__(self, x):
        """One step, features first: x (I,) -> (R,) when batch is 1, or x (I, B) -> (R, B), new.

        x is a float32 or float64 array of any strides.  Returns None, and changes nothing, on any
        other x, or once the stepper is not `fresh`.
        """
        if not cnp.PyArray_CheckExact(x):
            return None
        cdef cnp.ndarray array = x
        cdef int ndim = cnp.PyArray_NDIM(array), given = cnp.PyArray_TYPE(array)
        cdef Py_ssize_t I = self.n_in, B = self.batch
        if (given != cnp.NPY_FLOAT32 and given != cnp.NPY_FLOAT64) or not cnp.PyArray_ISBEHAVED_RO(array):
            return None
        if ndim == 0 or ndim > 2 or cnp.PyArray_DIM(array, 0) != I:
            return None
        if B != (1 if ndim == 1 else cnp.PyArray_DIM(array, 1)) or not self.is_fresh():
            return None
        if self.running:
            raise RuntimeError("a Stepper was called while it runs: each thread needs its own")
        self.take(array, ndim)
        self.run()
        return self.give(ndim)

    cdef void take(self, cnp.ndarray x, int ndim) noexcept:
        cdef Py_ssize_t I = self.n_in, item = self.chain.table.item, b
        cdef Py_ssize_t step = cnp.PyArray_STRIDE(x, 0)
        cdef char *source = <char *>cnp.PyArray_DATA(x)
        cdef bint given = cnp.PyArray_TYPE(x) == cnp.NPY_FLOAT64, wanted = self.typenum == cnp.NPY_FLOAT64
        for b in range(self.batch):
            if given == wanted and step == item:
                memcpy(<char *>self.x + b * I * item, source, I * item)
            else:
                copy_in(source, step, given, <char *>self.x + b * I * item, wanted, I)
            if ndim == 2:
                source += cnp.PyArray_STRIDE(x, 1)

    cdef void run(self) noexcept:
        if self.work < SHORT_WORK:
            recur_parallel(run_chain, &self.chain, 1)
        else:
            self.running = True
            with nogil:
                recur_parallel(run_chain, &self.chain, self.threads)
            self.running = False
        self.chain.turn ^= 1

    cdef object give(self, int ndim):
        cdef cnp.npy_intp dims[2]
        dims[0] = self.n_out
        dims[1] = self.batch
        cdef cnp.ndarray y = cnp.PyArray_EMPTY(ndim, dims, self.typenum, 1)
        cdef Stage *last = &self.chain.stages[self.chain.count - 1]
        memcpy(cnp.PyArray_DATA(y), last.y[self.chain.turn ^ 1], last.size * self.chain.table.item)
        return y

    cdef tuple state_of(self, Py_ssize_t index):
        """Views of a cell stage's present state: its h is the next step's h_first."""
        cdef Stage *s = &self.chain.stages[index]
        cdef recur_forward *f = &s.forward[self.chain.turn]
        cdef cnp.npy_intp dims[2]
        dims[0] = self.batch
        dims[1] = s.cell.n_hidden
        cdef object h = cnp.PyArray_SimpleNewFromData(2, dims, self.typenum, <void *>f.h_first)
        if s.cell.kind != RECUR_LSTM:
            return (h,)
        return h, cnp.PyArray_SimpleNewFromData(2, dims, self.typenum, <void *>f.c_first)

    def states(self):
        """Copies of each cell stage's state, in stage order: tuples of (B, H) arrays."""
        return tuple(tuple(a.copy() for a in self.state_of(i)) for i in self.cell_stages)

    def set_states(self, states):
        """Copy these in: one tuple of (B, H) arrays for each cell stage.  All or none."""
        states = tuple(tuple(state) for state in states)
        if len(states) != len(self.cell_stages):
            raise ValueError(f"states has {len(states)} tuples, expected {len(self.cell_stages)}")
        for i, state in zip(self.cell_stages, states):
            (<CellKernel>self.kernels[i]).check_state("state", state, self.batch)
        for i, state in zip(self.cell_stages, states):
            for mine, new in zip(self.state_of(i), state):
                mine[...] = new


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
    task.table.outer(task.a, task.a_step, task.a_columns, task.b, task.b_step, task.b_columns, task.n,
                     task.accumulate, task.out, task.scratch, id, count)


def weight_gradient(dg, x, out, *, bint accumulate):
    """out (rows, cols) = dg.T @ x, or += if accumulate: dg (N, rows), x (N, cols).

    accumulate=False never reads out, so NaN there is harmless; N = 0 gives zeros.  dg and x may be
    column slices.  Raises TypeError (dtype) or ValueError (shape, layout, read-only out).
    """
    cdef int typenum = float_type("out", out)
    cdef Py_ssize_t dg_step = 0, x_step = 0
    row_step("dg", dg, typenum, &dg_step)
    row_step("x", x, typenum, &x_step)
    cdef Py_ssize_t N = cnp.PyArray_DIM(dg, 0), rows = cnp.PyArray_DIM(dg, 1), columns = cnp.PyArray_DIM(x, 1)
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


# ---- losses, embeddings, elementwise -------------------------------------------------------------

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
    cdef cnp.ndarray loss = cnp.PyArray_EMPTY(1, &size, typenum, 0), dlogits = empty_2d(typenum, N, C)
    cdef const recur_table *table = table_of(typenum)
    cdef void *logits_data = data(logits)
    cdef void *loss_data = data(loss)
    cdef void *dlogits_data = data(dlogits)
    with nogil:
        table.softmax_cross_entropy(logits_data, label, dense, weight, loss_data, dlogits_data, N, C)
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


cdef void add_rows(cython.floating *out, const cython.floating *d, const int64_t *index, Py_ssize_t N,
                   Py_ssize_t F) noexcept nogil:
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
