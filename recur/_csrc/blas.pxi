# Matrix products by SciPy's BLAS.

# SciPy's BLAS has 32-bit or 64-bit integers, as it was built.  They are passed by address, so on
# little-endian machines one call serves both: a 32-bit reader sees the low half of a 64-bit number.
ctypedef void (*gemm_function)(char *, char *, int64_t *, int64_t *, int64_t *, void *, void *,
                               int64_t *, void *, int64_t *, void *, void *,
                               int64_t *) noexcept nogil

cdef gemm_function SGEMM
cdef gemm_function DGEMM


cdef gemm_function blas_function(str name) except NULL:
    from scipy.linalg import cython_blas
    capsule = cython_blas.__pyx_capi__[name]
    return <gemm_function>PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule))


cdef void gemm(bint is_double, bint a_transposed, bint b_transposed, Py_ssize_t rows,
               Py_ssize_t columns, Py_ssize_t depth, const void *a, Py_ssize_t a_step,
               const void *b, Py_ssize_t b_step, bint accumulate, void *c,
               Py_ssize_t c_step) noexcept nogil:
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
