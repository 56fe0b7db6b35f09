# The graph of what was recorded, and the walk back over it: recur/tape says what they are for.

next_seq = itertools.count().__next__
cdef object count_up = next_seq


@cython.final
@cython.freelist(256)
@cython.trashcan(True)  # a chain of a million nodes is freed without recursion
cdef class Node:
    """One recorded operation.

    seq     rises with every node: the order of creation is a topological order
    op      what its backward is; None once a sweep has used the node up
    inputs  a tuple: a Tensor or Param where gradient may flow, None elsewhere
    saved   what the operation's backward needs
    tape    the scope that it was recorded in
    """

    cdef readonly long long seq
    cdef public object op
    cdef public object inputs
    cdef public object saved
    cdef readonly object tape

    def __init__(self, op, tuple inputs, saved, tape):
        self.seq = count_up()
        self.op = op
        self.inputs = inputs
        self.saved = saved
        self.tape = tape


cdef class Operation:
    """An operation as a walk sees it: a name, and how gradients go through it.

    lasting   a node of such an operation is never used up
    """

    cdef readonly str name
    lasting = False

    def __init__(self, str name):
        self.name = name

    def __repr__(self):
        return f"<op {self.name}>"

    def backward(self, walk, node, grads):
        """Gets the gradients of the node's outputs, by index, and hands on those of its inputs."""
        raise TypeError(f"{self.name} has no gradient")

    cdef int back(self, Walk walk, Node node, dict slots) except -1:
        """`backward`, for operations that are compiled: these may write to a gradient they own."""
        self.backward(walk, node, {index: (<Slot>slot).grad for index, slot in slots.items()})
        return 0


cdef class Recorded:
    """A value and the node that made it; `index` says which of the node's outputs it is."""

    cdef public object _value
    cdef public Node node
    cdef public Py_ssize_t index

    def __init__(self, array, node, Py_ssize_t index=0):
        self._value = array
        self.node = node
        self.index = index


cdef Recorded recorded(type kind, cnp.ndarray array, Node node, Py_ssize_t index):
    """`kind(array, node, index)`, without a call of Python."""
    cdef Recorded made = kind.__new__(kind)
    made._value = array
    made.node = node
    made.index = index
    return made


cdef bint same_memory_order(cnp.ndarray a, cnp.ndarray b) noexcept:
    """Whether both are of one float type and shape, and without gaps in the same order."""
    cdef int i, t = cnp.PyArray_TYPE(a)
    if cnp.PyArray_TYPE(b) != t or (t != cnp.NPY_FLOAT32 and t != cnp.NPY_FLOAT64):
        return False
    if cnp.PyArray_NDIM(a) != cnp.PyArray_NDIM(b):
        return False
    for i in range(cnp.PyArray_NDIM(a)):
        if cnp.PyArray_DIM(a, i) != cnp.PyArray_DIM(b, i):
            return False
    if not (cnp.PyArray_ISBEHAVED(a) and cnp.PyArray_ISBEHAVED_RO(b)):
        return False
    return ((cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_IS_C_CONTIGUOUS(b))
            or (cnp.PyArray_IS_F_CONTIGUOUS(a) and cnp.PyArray_IS_F_CONTIGUOUS(b)))


cdef void add_numbers(cython.floating *a, const cython.floating *b, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        a[i] += b[i]


cdef int add_into(cnp.ndarray a, b) except -1:
    """a += b."""
    cdef Py_ssize_t n = cnp.PyArray_SIZE(a)
    if not (n < ADDED_HERE and cnp.PyArray_CheckExact(b) and same_memory_order(a, b)):
        np.add(a, b, out=a, casting="same_kind")
    elif cnp.PyArray_TYPE(a) == cnp.NPY_FLOAT32:
        add_numbers(<float *>data(a), <const float *>data(b), n)
    else:
        add_numbers(<double *>data(a), <const double *>data(b), n)
    return 0


# Numbers below which an addition costs less than a call of NumPy's.
cdef Py_ssize_t ADDED_HERE = 1 << 16


@cython.final
@cython.freelist(256)
cdef class Slot:
    """What a walk knows of one output or leaf: its gradient so far, and posts not multiplied out.

    like    the value whose gradient this is: its shape and dtype
    owned   whether nobody else holds `grad`.  A first gradient is borrowed: the next one that comes
            is added into a new array
    posts   (dg, x), which stands for dg.T @ x, or (dg,), which stands for dg.sum(0)
    rows    how many rows the posts have together
    """

    cdef readonly object like
    cdef public object grad
    cdef public bint owned
    cdef public list posts
    cdef public Py_ssize_t rows

    cdef int give(self, grad, bint own) except -1:
        cdef object held = self.grad
        if held is not None:
            if self.owned:
                add_into(held, grad)
            elif own and cnp.PyArray_CheckExact(grad) and same_memory_order(grad, held):
                add_into(grad, held)
                self.grad, self.owned = grad, True
            else:
                # in the value's memory order: what is held may be one number shown many times
                self.grad = np.add(held, grad, out=np.empty_like(self.like, held.dtype))
                self.owned = True
            return 0
        if not (cnp.PyArray_CheckExact(grad) and self.has_dtype(grad)):
            grad, own = np.array(grad, self.like.dtype), True
        self.grad, self.owned = grad, own
        return 0

    cdef bint has_dtype(self, cnp.ndarray grad):
        cdef object like = self.like
        if cnp.PyArray_Check(like) and cnp.PyArray_DESCR(grad) is cnp.PyArray_DESCR(like):
            return True
        return grad.dtype == like.dtype

    def add(self, grad, *, bint own):
        """Adds to the gradient."""
        self.give(grad, own)


cdef class Walk:
    """The way back from a loss: which node comes next, and what gradient has reached it.

    A subclass gives `multiply_out(slot, posts)`, and `refuse(node)` and `check_thread(node)`, which
    raise: the one always, the other if the node's scope is open in another thread.
    """

    cdef readonly bint keep_graph
    cdef readonly dict leaves          # Param or leaf Node: Slot
    cdef readonly dict found           # (node, index): a copy of its gradient, where wanted
    cdef object tape, leaf_op
    cdef set wanted
    cdef list heap                     # nodes to be visited, the last made on top
    cdef dict pending                  # each of them: {output: Slot}
    cdef Py_ssize_t rows_per_flush

    def __init__(self, tape, leaf_op, bint keep_graph, set wanted, Py_ssize_t rows_per_flush):
        self.tape = tape
        self.leaf_op = leaf_op
        self.keep_graph = keep_graph
        self.wanted = wanted
        self.rows_per_flush = rows_per_flush
        self.leaves, self.found, self.pending = {}, {}, {}
        self.heap = []

    def walk(self):
        """Visits the nodes that gradient has reached, the last made first, and flushes the leaves.
        """
        while self.heap:
            self.visit(self.pop())
        for slot in self.leaves.values():
            self.multiply_posts(slot)

    cdef int visit(self, Node node) except -1:
        cdef Operation op = node.op
        cdef object index, slot
        cdef dict slots = self.pending.pop(node)
        cdef bint used_up
        if node.tape is not self.tape:
            self.check_thread(node)
        if op is None:
            self.refuse(node)
        used_up = not (self.keep_graph or op.lasting)
        if used_up:
            node.op = None
        for index, slot in slots.items():
            self.multiply_posts(slot)
            if self.wanted and (node, index) in self.wanted:
                self.found[node, index] = (<Slot>slot).grad.copy(order="K")
        (<Operation>op).back(self, node, slots)
        if used_up:
            node.inputs = node.saved = None
        return 0

    cdef Slot slot_of(self, Recorded x):
        cdef object node = x.node, slot, slots
        if node is None or (<Node>node).op is self.leaf_op:
            if node is None:
                node = x
            slot = self.leaves.get(node)
            if slot is None:
                slot = self.leaves[node] = new_slot(x._value)
            return slot
        slots = self.pending.get(node)
        if slots is None:
            slot = new_slot(x._value)
            self.pending[node] = {x.index: slot}
            self.push(node)
            return slot
        slot = (<dict>slots).get(x.index)
        if slot is None:
            slot = slots[x.index] = new_slot(x._value)
        return slot

    # -- a binary heap with the largest seq on top

    cdef int push(self, Node node) except -1:
        cdef list heap = self.heap
        cdef Py_ssize_t i = len(heap), above
        heap.append(node)
        while i > 0:
            above = (i - 1) >> 1
            if (<Node>heap[above]).seq > node.seq:
                break
            heap[i] = heap[above]
            i = above
        heap[i] = node
        return 0

    cdef Node pop(self):
        cdef list heap = self.heap
        cdef Node last = heap.pop(), top
        cdef Py_ssize_t n = len(heap), i = 0, below = 1
        if n == 0:
            return last
        top = heap[0]
        while below < n:
            if below + 1 < n and (<Node>heap[below + 1]).seq > (<Node>heap[below]).seq:
                below += 1
            if (<Node>heap[below]).seq < last.seq:
                break
            heap[i] = heap[below]
            i, below = below, 2 * below + 1
        heap[i] = last
        return top

    # -- what operations call

    def add(self, x, grad, *, bint own=False):
        """Adds `grad` to what `x` gets.  `own` says that nobody else holds the array.

        A None (an input that takes no gradient) is passed over.
        """
        if x is not None:
            self.slot_of(x).give(grad, own)

    def buffer(self, Recorded x not None):
        """The gradient of `x` so far, as an array of zeros at first, to be added to in place."""
        cdef Slot slot = self.slot_of(x)
        cdef object written
        if slot.grad is None:
            slot.grad = np.zeros_like(x._value)
        elif not slot.owned:
            written = np.empty_like(x._value, slot.grad.dtype)
            np.copyto(written, slot.grad)
            slot.grad = written
        slot.owned = True
        return slot.grad

    def post(self, x, dg, by=None):
        """Leaves `dg.T @ by` (without `by`: `dg.sum(0)`) to be added to what `x` gets.

        `dg` is (N, rows), `by` (N, columns), both C-contiguous, both unchanged until the sweep
        ends.  All posts to one weight become one product, when its producer is visited or, for a
        leaf, at the end.
        """
        if x is not None:
            self.leave(x, (dg,) if by is None else (dg, by))

    cdef int leave(self, Recorded x, tuple operand) except -1:
        cdef Slot slot = self.slot_of(x)
        if slot.posts is None:
            slot.posts = []
        slot.posts.append(operand)
        slot.rows += len(operand[0])
        if slot.rows >= self.rows_per_flush:
            self.multiply_posts(slot)
        return 0

    def flush(self, Slot slot not None):
        """Multiplies the posts out, one product for all, and returns the gradient."""
        self.multiply_posts(slot)
        return slot.grad

    cdef int multiply_posts(self, Slot slot) except -1:
        cdef list posts = slot.posts
        if posts is not None:
            slot.posts, slot.rows = None, 0
            self.multiply_out(slot, posts)
        return 0


cdef Slot new_slot(like):
    cdef Slot slot = Slot.__new__(Slot)
    slot.like = like
    return slot


# -- two operations that are recorded at every step of a loop

cdef bint takes_gradient(object x, type kind):
    """Whether `x` is a Tensor that gradient may flow into."""
    if type(x) is not kind:
        return False
    cdef Node node = (<Recorded>x).node
    return node is not None and node.tape.alive


@cython.final
cdef class GetItem(Operation):
    """x[key].  The gradient is added in place into one buffer of the source: T slices cost no T
    arrays.  `saved` is the key."""

    def record_view(self, x, key, tape, type kind):
        """x[key] as a Tensor, if x is one and the key is made of whole numbers, slices, None and
        `...` with an axis left over; else None."""
        if not (takes_gradient(x, kind) and tape.events is None and is_basic(key)):
            return None
        cdef object part = (<Recorded>x)._value[key]
        if not cnp.PyArray_CheckExact(part):
            return None
        return recorded(kind, part, Node(self, (x,), key, tape), 0)

    cdef int back(self, Walk walk, Node node, dict slots) except -1:
        cdef object source = (<tuple>node.inputs)[0], key = node.saved, part
        cdef object grad = (<Slot>slots[0]).grad, buffer = walk.buffer(source)
        if is_basic(key):
            part = buffer[key]
            if cnp.PyArray_Check(part):
                add_into(part, grad)
            else:
                buffer[key] += grad
        elif may_repeat(key):
            np.add.at(buffer, key, grad)
        else:
            buffer[key] += grad
        return 0


cdef bint is_basic(key):
    """Whether indexing with `key` gives a view: integers, slices, None and `...` only."""
    cdef object k
    if type(key) is not tuple:
        return is_basic_part(key)
    for k in <tuple>key:
        if not is_basic_part(k):
            return False
    return True


cdef inline bint is_basic_part(object k):
    return (type(k) is slice or type(k) is int or k is None or k is Ellipsis
            or isinstance(k, np.integer))


cdef bint may_repeat(key):
    """Whether an index may name one entry twice: only arrays of integers can."""
    cdef object k
    for k in key if type(key) is tuple else (key,):
        if cnp.PyArray_Check(k) and k.dtype.kind != "b":
            return True
    return False


@cython.final
cdef class Stack(Operation):
    """Arrays joined along a new axis.  `saved` is the axis."""

    def record_steps(self, list xs, tape, type kind):
        """The joined Tensor, new axis last, if all are Tensors of one float type and one shape that
        lie features first; else None."""
        cdef cnp.ndarray first = None, array, joined
        cdef cnp.npy_intp dims[3]
        cdef Py_ssize_t size, t = 0
        cdef char *to
        cdef int ndim, i
        cdef object x
        if tape.events is not None or not xs:
            return None
        for x in xs:
            if not takes_gradient(x, kind) or not cnp.PyArray_CheckExact((<Recorded>x)._value):
                return None
            array = (<Recorded>x)._value
            if first is None:
                first = array
            if not same_memory_order(array, first):
                return None
        ndim = cnp.PyArray_NDIM(first)
        if ndim > 2 or not cnp.PyArray_IS_F_CONTIGUOUS(first):
            return None
        for i in range(ndim):
            dims[i] = cnp.PyArray_DIM(first, i)
        dims[ndim] = len(xs)
        joined = cnp.PyArray_EMPTY(ndim + 1, dims, cnp.PyArray_TYPE(first), 1)
        to = <char *>data(joined)
        size = cnp.PyArray_NBYTES(first)
        for x in xs:
            array = (<Recorded>x)._value
            memcpy(to, data(array), size)
            to += size
        return recorded(kind, joined, Node(self, tuple(xs), -1, tape), 0)

    cdef int back(self, Walk walk, Node node, dict slots) except -1:
        cdef object x, part, grad = (<Slot>slots[0]).grad
        for x, part in zip(<tuple>node.inputs, np.moveaxis(grad, node.saved, 0)):
            if x is not None:
                walk.slot_of(x).give(part, False)
        return 0
