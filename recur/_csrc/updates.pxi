# Updates of optimisers.

cdef int check_update(cnp.ndarray x, cnp.ndarray g, tuple states) except -1:
    """One dtype and length, written arrays writable, and no two in the same memory."""
    cdef int typenum = float_type("x", x)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(x)
    arrays = [("x", x), *states, ("g", g)]
    for i, (name, array) in enumerate(arrays):
        check_1d(name, array, typenum, n)
        if name != "g":
            check_writable(name, array)
        for other, earlier in arrays[:i]:
            if overlap(array, earlier):
                raise ValueError(f"{name} overlaps {other}")
    return 0


cdef inline bint overlap(cnp.ndarray a, cnp.ndarray b) noexcept:
    """Whether two contiguous arrays share memory."""
    cdef char *p = <char *>data(a)
    cdef char *q = <char *>data(b)
    return p < q + cnp.PyArray_NBYTES(b) and q < p + cnp.PyArray_NBYTES(a)


def sum_of_squares(a):
    """The sum of a_i^2, a float: a (n,)."""
    cdef int typenum = float_type("a", a)
    check_1d("a", a, typenum, -1)
    cdef const recur_table *table = table_of(typenum)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(a)
    cdef void *numbers = data(a)
    cdef double total
    with nogil:
        total = table.sum_squares(numbers, n)
    return total


def descent_update(x, g, *, double rate, double scale=1):
    """x -= rate scale g, in place: x, g (n,)."""
    check_update(x, g, ())
    cdef recur_update update
    update.x, update.g = data(x), data(g)
    update.rate, update.scale = rate, scale
    cdef const recur_table *table = table_of(cnp.PyArray_TYPE(x))
    cdef Py_ssize_t n = cnp.PyArray_SIZE(x)
    with nogil:
        table.descent(&update, n)


def momentum_update(x, g, velocity, *, double rate, double rho, double scale=1):
    """velocity = rho velocity + rate scale g;  x -= velocity, in place: all (n,)."""
    check_update(x, g, (("velocity", velocity),))
    cdef recur_update update
    update.x, update.g, update.mean = data(x), data(g), data(velocity)
    update.rate, update.keep_mean, update.scale = rate, rho, scale
    cdef const recur_table *table = table_of(cnp.PyArray_TYPE(x))
    cdef Py_ssize_t n = cnp.PyArray_SIZE(x)
    with nogil:
        table.momentum(&update, n)


def adam_update(x, g, mean, square, *, double rate, tuple beta, double correction, double epsilon,
                double decay=0, double scale=1):
    """Adam's step in place, with d = scale g: all arrays (n,).

    mean = beta1 mean + (1 - beta1) d;  square = beta2 square + (1 - beta2) d^2;
    x -= rate mean / (sqrt(correction square) + epsilon) + decay x.
    """
    check_update(x, g, (("mean", mean), ("square", square)))
    cdef recur_update update
    update.x, update.g, update.mean, update.square = data(x), data(g), data(mean), data(square)
    update.rate, update.scale, update.decay = rate, scale, decay
    update.keep_mean, update.keep_square = beta
    update.correction, update.epsilon = correction, epsilon
    cdef const recur_table *table = table_of(cnp.PyArray_TYPE(x))
    cdef Py_ssize_t n = cnp.PyArray_SIZE(x)
    with nogil:
        table.adam(&update, n)
