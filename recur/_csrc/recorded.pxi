# One step of a cell as one node of the graph, and its way back.

cdef inline bint has_type(cnp.ndarray array, CellKernel kernel) noexcept:
    return cnp.PyArray_TYPE(array) == kernel.typenum and cnp.PyArray_ISNOTSWAPPED(array)


cdef cnp.ndarray columns(object a, CellKernel kernel, Py_ssize_t features, Py_ssize_t batch):
    """The value of `a`, (features, batch) or for batch -1 (features,), features next to each
    other; copied if it lies otherwise."""
    cdef object value = (<Recorded>a)._value if isinstance(a, Recorded) else a
    cdef cnp.ndarray array
    if not (cnp.PyArray_Check(value) and has_type(value, kernel)):
        raise misfit("a step's array", value, kernel.typenum, (features, max(batch, 1)))
    array = value
    if cnp.PyArray_DIM(array, 0) != features or (
            cnp.PyArray_NDIM(array) != 1 if batch < 0 else
            cnp.PyArray_NDIM(array) != 2 or cnp.PyArray_DIM(array, 1) != batch):
        raise misfit("a step's array", value, kernel.typenum, (features, max(batch, 1)))
    if not (cnp.PyArray_ISBEHAVED_RO(array) and cnp.PyArray_IS_F_CONTIGUOUS(array)):
        array = cnp.PyArray_NewCopy(array, cnp.NPY_FORTRANORDER)
    return array


cdef inline cnp.ndarray empty_columns(int typenum, Py_ssize_t features, Py_ssize_t batch):
    cdef cnp.npy_intp dims[2]
    dims[0] = features
    dims[1] = batch
    return cnp.PyArray_EMPTY(2, dims, typenum, 1)


cdef inline cnp.ndarray as_rows(cnp.ndarray a):
    """(batch, features), the same memory, of columns (features, batch) or (features,)."""
    cdef cnp.npy_intp dims[2]
    cdef cnp.ndarray view
    if cnp.PyArray_NDIM(a) == 2:
        return cnp.PyArray_Transpose(a, NULL)
    dims[0] = 1
    dims[1] = cnp.PyArray_DIM(a, 0)
    view = cnp.PyArray_SimpleNewFromData(2, dims, cnp.PyArray_TYPE(a), data(a))
    cnp.set_array_base(view, a)
    return view


cdef inline cnp.ndarray as_vector(cnp.ndarray a):
    """(size,), the same memory."""
    cdef cnp.npy_intp size = cnp.PyArray_SIZE(a)
    cdef cnp.ndarray view = cnp.PyArray_SimpleNewFromData(1, &size, cnp.PyArray_TYPE(a), data(a))
    cnp.set_array_base(view, a)
    return view


cdef inline object live(object x):
    """`x` if gradient may flow into it, else None."""
    if not isinstance(x, Recorded):
        return None
    cdef Node node = (<Recorded>x).node
    return x if node is None or node.tape.alive else None


def record_step(StepOp op, packed, x, state, tape, type kind):
    """One step as one node of `tape`: (parts of the next state, y), Tensors of type `kind`.

    packed  has the `kernel`, and in `weights` what takes their gradient
    x       (I,) or (I, B), and each part of state (H, B): Tensors, or arrays that nobody writes
            ValueError, TypeError if they do not fit the kernel
    """
    cdef CellKernel kernel = packed.kernel
    cdef int t = kernel.typenum
    cdef cnp.ndarray plain = (<Recorded>x)._value if isinstance(x, Recorded) else x
    cdef bint vector = cnp.PyArray_NDIM(plain) == 1
    cdef Py_ssize_t B = 1 if vector else cnp.PyArray_DIM(plain, 1), H = kernel.n_out
    cdef cnp.ndarray X = columns(x, kernel, kernel.n_in, -1 if vector else B)
    cdef cnp.ndarray h_now = columns(state[0], kernel, H, B), c_now = None
    cdef cnp.ndarray h = empty_columns(t, H, B), c = None, gates = None, hn = None
    cdef tuple inputs
    cdef Node node
    if kernel.n_states == 2:
        c_now = columns(state[1], kernel, H, B)
        c = empty_columns(t, H, B)
        inputs = (live(x), live(state[0]), live(state[1]))
    else:
        inputs = (live(x), live(state[0]))
    if kernel.cell.kind != RECUR_RNN:
        gates = empty_2d(t, B, kernel.gates * H)
    if kernel.cell.kind == RECUR_GRU:
        hn = empty_2d(t, B, H)
    kernel.run_step(data(X), data(h_now), data(c_now), data(h), data(c), data(gates), data(hn), B)
    node = Node(op, inputs + <tuple>packed.weights,
                (packed, X, h_now, c_now, h if gates is None else gates, hn), tape)
    cdef Recorded of_h = recorded(kind, h, node, 0), y = of_h
    if vector:
        y = recorded(kind, as_vector(h), node, kernel.n_states)
    if c is None:
        return (of_h,), y
    return (of_h, recorded(kind, c, node, 1)), y


cdef inline bint made_on(object tape, Recorded x) noexcept:
    return x.node is not None and x.node.tape is tape


def quick_step(StepOp op, packed, x, state, tape, type kind):
    """`record_step` if x and the state's h are Tensors of this tape or arrays, and fit; or None.

    A plain x of any real numbers is copied: the caller may write into his own.
    """
    cdef CellKernel kernel = packed.kernel
    cdef object h = state[0]
    cdef cnp.ndarray array
    if type(h) is kind:
        if not made_on(tape, h):
            return None
        h = (<Recorded>h)._value
    if type(x) is kind:
        if not made_on(tape, x):
            return None
        array = (<Recorded>x)._value
        if not has_type(array, kernel):
            return None
    elif cnp.PyArray_CheckExact(x):
        array = x
        if has_type(array, kernel):
            array = x = cnp.PyArray_NewCopy(array, cnp.NPY_FORTRANORDER)
        elif array.dtype.kind in "fiub":
            array = x = np.array(array, kernel.dtype, order="F")
        else:
            return None
    else:
        return None
    cdef int ndim = cnp.PyArray_NDIM(array)
    if ndim == 0 or ndim > 2 or cnp.PyArray_DIM(array, 0) != kernel.n_in:
        return None
    cdef Py_ssize_t B = 1 if ndim == 1 else cnp.PyArray_DIM(array, 1)
    array = h
    if cnp.PyArray_NDIM(array) != 2 or cnp.PyArray_DIM(array, 1) != B:
        return None
    return record_step(op, packed, x, state, tape, kind)


@cython.final
cdef class StepOp(Operation):
    """One step of a cell.  Outputs: the parts of the state, then for a vector x the output y.

    saved   (what `packed` was, x, h, c or None, gates, hn or None): the gates are h' in an RNN
    """

    cdef int back(self, Walk walk, Node node, dict slots) except -1:
        cdef object packed, x_to, h_to, c_to = None, name, to
        cdef tuple inputs = node.inputs, saved = node.saved, d_state, operand
        cdef CellKernel kernel = saved[0].kernel
        cdef cnp.ndarray X = saved[1], h_now = saved[2], c_now = saved[3], gates = saved[4], dx
        cdef int n = kernel.n_states, i
        cdef Py_ssize_t B = cnp.PyArray_DIM(h_now, 1)
        packed = saved[0]
        x_to, h_to = inputs[0], inputs[1]
        if n == 2:
            c_to = inputs[2]
        packed.check(x_to is not None, h_to is not None or c_to is not None)
        cdef cnp.ndarray dh = own_gradient(kernel, slots.get(0), slots.get(n), B), dc = None
        if n == 2:
            dc = own_gradient(kernel, slots.get(1), None, B)
        cdef tuple before = (h_now,) if c_now is None else (h_now, c_now)
        cdef dict operands
        dx, _, operands = kernel.run_backward_of(
            1, B, as_rows(X), before, data(gates) if kernel.cell.kind == RECUR_RNN else NULL,
            data(c_now), as_rows(h_now), gates, saved[5], None, (dh,) if dc is None else (dh, dc),
            None, x_to is not None, walk.keep_graph)
        if x_to is not None:
            dx = as_vector(dx) if cnp.PyArray_NDIM(X) == 1 else cnp.PyArray_Transpose(dx, NULL)
            walk.slot_of(x_to).give(dx, True)
        if h_to is not None:
            walk.slot_of(h_to).give(dh, True)
        if c_to is not None:
            walk.slot_of(c_to).give(dc, True)
        i = n + 1
        for name in <tuple>packed.names:
            to = inputs[i]
            i += 1
            if to is None:
                continue
            operand = operands[name]
            if len(operand) == 2 and type(operand[0]) is str:
                walk.slot_of(to).give(operand[1], True)
            else:
                walk.leave(to, operand)
        return 0


cdef cnp.ndarray own_gradient(CellKernel kernel, Slot of_state, Slot of_y, Py_ssize_t B):
    """The gradient of a part of the state, (H, B), in memory that the walk may write."""
    cdef cnp.ndarray d, dy
    if of_state is None:
        d = empty_columns(kernel.typenum, kernel.n_out, B)
        memset(data(d), 0, cnp.PyArray_NBYTES(d))
    else:
        d = of_state.grad
        if (not has_type(d, kernel) or cnp.PyArray_NDIM(d) != 2
                or cnp.PyArray_DIM(d, 0) != kernel.n_out or cnp.PyArray_DIM(d, 1) != B):
            raise misfit("a state's gradient", d, kernel.typenum, (kernel.n_out, B))
        if not (of_state.owned and cnp.PyArray_ISBEHAVED(d) and cnp.PyArray_IS_F_CONTIGUOUS(d)):
            d = cnp.PyArray_NewCopy(d, cnp.NPY_FORTRANORDER)
    if of_y is not None:
        dy = of_y.grad
        if not fits(dy, kernel.typenum):
            dy = cnp.PyArray_NewCopy(dy, cnp.NPY_CORDER)
        check_1d("an output's gradient", dy, kernel.typenum, kernel.n_out)
        if kernel.is_double:
            add_numbers(<double *>data(d), <const double *>data(dy), kernel.n_out)
        else:
            add_numbers(<float *>data(d), <const float *>data(dy), kernel.n_out)
    return d
