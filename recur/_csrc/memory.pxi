# Memory, and the checks of arguments.

@cython.final
cdef class Buffer:
    """Bytes aligned to a cache line, given back with the object."""

    cdef void *data
    cdef Py_ssize_t size

    def __cinit__(self, Py_ssize_t size):
        self.data = recur_allocate(size)
        if self.data == NULL:
            raise MemoryError
        self.size = size

    def __dealloc__(self):
        recur_release(self.data)


# Bytes from which an array is worth being kept for the next that fits
cdef double SLAB = 1 << 17


# NumPy asks for every array's memory here where `arrays_from_here` says so (NEP 49).  An array
# keeps its handler for as long as it lives.

cdef extern from "numpy/arrayobject.h":
    ctypedef struct PyDataMemAllocator:
        void *ctx
        void *(*malloc)(void *, size_t) noexcept
        void *(*calloc)(void *, size_t, size_t) noexcept
        void *(*realloc)(void *, void *, size_t) noexcept
        void (*free)(void *, void *, size_t) noexcept
    ctypedef struct PyDataMem_Handler:
        char name[127]
        unsigned char version
        PyDataMemAllocator allocator
    object PyDataMem_SetHandler(object)
    object PyDataMem_GetHandler()
    PyObject *PyDataMem_DefaultHandler

cdef PyDataMem_Handler array_handler
memset(&array_handler, 0, sizeof(array_handler))
memcpy(array_handler.name, b"recur", 5)
array_handler.version = 1
array_handler.allocator.malloc = recur_array_malloc
array_handler.allocator.calloc = recur_array_calloc
array_handler.allocator.realloc = recur_array_realloc
array_handler.allocator.free = recur_array_free
cdef object array_capsule = PyCapsule_New(&array_handler, "mem_handler", NULL)


def arrays_from_here():
    """Lets the large arrays that this context makes lie on memory that earlier ones gave back.

    What comes back is for `arrays_from`: the handler that was there, or None if that is not NumPy's
    own, which then stays.
    """
    cdef object before = PyDataMem_GetHandler()
    return PyDataMem_SetHandler(array_capsule) if <PyObject *>before == PyDataMem_DefaultHandler \
        else None


def arrays_from(before):
    """Undoes `arrays_from_here`, which returned `before`."""
    if before is not None:
        PyDataMem_SetHandler(before)


def new_vector(Py_ssize_t n, dtype):
    """A new array (n,); large ones on huge pages, at changing places within a page.

    For what an optimiser reads side by side: parameters, gradients, its states.
    """
    cdef object before = arrays_from_here()
    try:
        return np.empty(n, dtype)
    finally:
        arrays_from(before)


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


cdef int check_3d(str name, object a, int typenum, Py_ssize_t n, Py_ssize_t m,
                  Py_ssize_t k) except -1:
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


cdef cnp.ndarray empty_slab(int typenum, Py_ssize_t n, Py_ssize_t m, Py_ssize_t k):
    """A new array for a sequence; if it is large, on memory that an earlier one gave back."""
    cdef cnp.npy_intp dims[3]
    cdef Py_ssize_t item = 8 if typenum == cnp.NPY_FLOAT64 else 4
    cdef double size = <double>n * m * k * item  # the product may overflow: NumPy tells
    if not SLAB <= size < 1e15:
        return empty_3d(typenum, n, m, k)
    cdef Buffer buffer = Buffer(n * m * k * item)
    dims[0] = n
    dims[1] = m
    dims[2] = k
    cdef cnp.ndarray a = cnp.PyArray_SimpleNewFromData(3, dims, typenum, buffer.data)
    cnp.set_array_base(a, buffer)
    return a


cdef inline Py_ssize_t packed_size(const recur_table *table, const recur_layout *m) noexcept:
    """Bytes of a matrix packed in the numbers of x."""
    return table.panels(m) * table.panel_width(m) * m.depth * table.item


cdef inline cnp.ndarray flat(cnp.ndarray a, Py_ssize_t n, Py_ssize_t m):
    """A view as (n, m), where n counts steps and samples."""
    return a if cnp.PyArray_NDIM(a) == 2 else a.reshape(n, m)


cdef int float_type(str name, object a) except -1:
    """The type number of a float32 or float64 array."""
    if not cnp.PyArray_Check(a) or a.dtype not in (np.float32, np.float64):
        found = a.dtype if cnp.PyArray_Check(a) else type(a).__name__
        raise TypeError(f"{name} is {found}, expected an array of float32 or float64")
    return cnp.PyArray_TYPE(a)


# Formats that hold weights in fewer bytes than x: the format, and the largest weight that it has.
FORMATS = {
    "bfloat16": (RECUR_BF16, 3.3895e38),
    "float16": (RECUR_F16, 65504.0),
    "int8": (RECUR_INT8, float(np.finfo(np.float32).max)),
}


cdef const recur_table *table_for(int typenum, storage) except NULL:
    """The table of kernels whose weights are held as `storage` names; None: in the dtype of x."""
    if storage is None:
        return table_of(typenum)
    if storage not in FORMATS:
        raise ValueError(f"storage is {storage!r}, expected None, {', '.join(map(repr, FORMATS))}")
    if typenum != cnp.NPY_FLOAT32:
        raise TypeError(f"weights held as {storage} are given as float32, not float64")
    return TABLES[<int>FORMATS[storage][0]]


cdef Buffer packed_weights(const recur_table *table, const recur_layout *m, str name,
                           cnp.ndarray w, storage):
    """Packed copy of a row-major matrix.  ValueError if a reduced format cannot hold a weight."""
    if storage is not None:
        limit = FORMATS[storage][1]
        if not np.abs(w).max(initial=0) <= limit:
            raise ValueError(
                f"{name} holds numbers that are not finite or beyond {limit:.5g}, the largest of "
                f"{storage}")
    cdef Buffer buffer = Buffer(table.weights_size(m))
    table.pack_weights(m, cnp.PyArray_DATA(w), m.depth, 1, buffer.data)
    return buffer


cdef inline const recur_table *table_of(int typenum) noexcept nogil:
    return TABLE_F64 if typenum == cnp.NPY_FLOAT64 else TABLE_F32


cdef int row_step(str name, object a, int typenum, Py_ssize_t *step) except -1:
    """Check a (N, columns) array whose rows are contiguous; `step`: numbers from row to row."""
    if not (cnp.PyArray_Check(a) and cnp.PyArray_TYPE(a) == typenum
            and cnp.PyArray_ISNOTSWAPPED(a)):
        raise misfit(name, a, typenum, (-1, -1))
    cdef cnp.ndarray array = a
    cdef Py_ssize_t item = cnp.PyArray_ITEMSIZE(array)
    if cnp.PyArray_NDIM(array) != 2:
        raise misfit(name, a, typenum, (-1, -1))
    cdef Py_ssize_t columns = cnp.PyArray_DIM(array, 1)
    step[0] = max(columns, 1)
    if cnp.PyArray_SIZE(array) == 0:  # the strides of an empty array mean nothing
        return 0
    if cnp.PyArray_DIM(array, 0) > 1:
        step[0] = cnp.PyArray_STRIDE(array, 0) // item
        if step[0] < columns or cnp.PyArray_STRIDE(array, 0) % item:
            raise misfit(name, a, typenum, (-1, -1))
    if (columns > 1 and cnp.PyArray_STRIDE(array, 1) != item) or not cnp.PyArray_ISALIGNED(array):
        raise misfit(name, a, typenum, (-1, -1))
    return 0
