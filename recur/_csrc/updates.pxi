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


ctypedef void (*update_rule)(const recur_update *, Py_ssize_t) noexcept nogil

cdef struct UpdateTask:
    update_rule rule
    const recur_update *update
    Py_ssize_t n, item


cdef void run_update(void *context, int id, int count, void *barrier) noexcept nogil:
    """The numbers are shared out, in whole cache lines: each is updated by itself."""
    cdef UpdateTask *task = <UpdateTask *>context
    cdef recur_update part = task.update[0]
    cdef Py_ssize_t line = 64 // task.item
    cdef Py_ssize_t first = task.n * id // count // line * line
    cdef Py_ssize_t last = task.n if id == count - 1 else task.n * (id + 1) // count // line * line
    part.x = <char *>part.x + first * task.item
    part.g = <const char *>part.g + first * task.item
    if part.mean != NULL:
        part.mean = <char *>part.mean + first * task.item
    if part.square != NULL:
        part.square = <char *>part.square + first * task.item
    cdef unsigned word = recur_keep_subnormals()  # of which a rare gradient's square is one
    task.rule(&part, last - first)
    recur_restore_control(word)


# Numbers from which an update is long enough to wake a second thread for
cdef Py_ssize_t THREADED_UPDATE = 1 << 18


cdef void update_all(update_rule rule, const recur_update *update, cnp.ndarray x):
    cdef Py_ssize_t n = cnp.PyArray_SIZE(x)
    cdef UpdateTask task = UpdateTask(rule, update, n, cnp.PyArray_ITEMSIZE(x))
    parallel(run_update, &task, thread_count if n >= THREADED_UPDATE else 1, n)


def descent_update(x, g, *, double rate, double scale=1):
    """x -= rate scale g, in place: x, g (n,)."""
    check_update(x, g, ())
    cdef recur_update update
    memset(&update, 0, sizeof(update))
    update.x, update.g = data(x), data(g)
    update.rate, update.scale = rate, scale
    update_all(table_of(cnp.PyArray_TYPE(x)).descent, &update, x)


def momentum_update(x, g, velocity, *, double rate, double rho, double scale=1):
    """velocity = rho velocity + rate scale g;  x -= velocity, in place: all (n,)."""
    check_update(x, g, (("velocity", velocity),))
    cdef recur_update update
    memset(&update, 0, sizeof(update))
    update.x, update.g, update.mean = data(x), data(g), data(velocity)
    update.rate, update.keep_mean, update.scale = rate, rho, scale
    update_all(table_of(cnp.PyArray_TYPE(x)).momentum, &update, x)


def adam_update(x, g, mean, square, *, double rate, tuple beta, double correction, double epsilon,
                double decay=0, double scale=1):
    """Adam's step in place, with d = scale g: all arrays (n,).

    mean = beta1 mean + (1 - beta1) d;  square = beta2 square + (1 - beta2) d^2;
    x -= rate mean / (sqrt(correction square) + epsilon) + decay x.
    """
    check_update(x, g, (("mean", mean), ("square", square)))
    cdef recur_update update
    memset(&update, 0, sizeof(update))
    update.x, update.g, update.mean, update.square = data(x), data(g), data(mean), data(square)
    update.rate, update.scale, update.decay = rate, scale, decay
    update.keep_mean, update.keep_square = beta
    update.correction, update.epsilon = correction, epsilon
    update_all(table_of(cnp.PyArray_TYPE(x)).adam, &update, x)
