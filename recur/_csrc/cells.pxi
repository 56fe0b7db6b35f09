# The cell kernels.

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


# Sequences of fewer rows than this multiply Wi by many steps' x at once: then the weights, not the
# arithmetic, cost the time, and Wi is read once for all of them.
cdef Py_ssize_t SMALL_BATCH = 8
# Bytes of Wi x that are kept ahead: they should stay in the second cache
cdef Py_ssize_t AHEAD = 1 << 17


cdef class CellKernel:
    """What the four cells share: an immutable snapshot of the weights, packed, and its steps.

    Arrays are C-contiguous with features last, in the kernel's dtype: x (B, I), h (B, H), a
    sequence X (T, B, I).  Inputs are read while the call runs; results are new and the caller's.
    Operands stand for weight gradients not yet multiplied out: a name gives (dg (N, rows),
    x (N, cols)) for dg.T @ x, (dg,) for dg.sum(0), or ("dense", array); N is B for a step, T * B
    for a sequence.  They may be column slices and may share memory with `saved`, x and states.

    storage  "bfloat16", "float16" or "int8" with a scale for each row: how the matrices of a
             float32 kernel are held, which then runs forward only.  None: as they are given
    """

    cdef recur_cell cell
    cdef const recur_table *table
    cdef readonly Py_ssize_t n_in
    cdef readonly Py_ssize_t n_out
    cdef readonly int n_states
    cdef readonly object dtype
    cdef readonly object storage
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

    cdef void setup(self, str cell_name, int kind, int act, Wi, Wh, b, storage) except *:
        self.typenum = float_type("Wi", Wi)
        self.is_double = self.typenum == cnp.NPY_FLOAT64
        self.table = table_for(self.typenum, storage)
        self.storage = storage
        self.dtype = Wi.dtype
        self.buffers = []
        self.lock = threading.Lock()
        check_2d("Wi", Wi, self.typenum, -1, -1)
        cdef recur_layout m = recur_input_layout(kind, 0, 0)
        self.gates = m.gates
        cdef Py_ssize_t rows = cnp.PyArray_DIM(Wi, 0), H = rows // self.gates
        if rows == 0 or rows % self.gates:
            raise ValueError(
                f"{cell_name}: Wi has {rows} rows, expected a positive multiple of {self.gates}")
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
        self.cell.wi = self.hold(&m, "Wi", Wi)
        self.cell.wh = self.hold(&wh, "Wh", Wh)
        m.depth = 1
        self.cell.bias = self.pack(&m, b, 1, 1)
        self.gradient_names = ("Wi", "Wh") + (() if b is None else ("b",))

    cdef const void *hold(self, const recur_layout *m, str name, cnp.ndarray w) except NULL:
        """Packed copy of a weight matrix, as `storage` has it."""
        cdef Buffer buffer = packed_weights(self.table, m, name, w, self.storage)
        self.buffers.append(buffer)
        return buffer.data

    cdef const void *pack(self, const recur_layout *m, cnp.ndarray w, Py_ssize_t row_step,
                          Py_ssize_t depth_step) except NULL:
        """Packed copy of a matrix, or packed zeros for None."""
        cdef Py_ssize_t size = packed_size(self.table, m)
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

    def matrices(self):
        """Copies of the matrices that the packed weights stand for, by name: Wi, Wh, Whh."""
        cdef recur_layout m = recur_input_layout(self.cell.kind, self.n_in, self.n_out)
        found = {"Wi": self.unpack(&m, self.cell.wi)}
        m = recur_hidden_layout(self.cell.kind, self.n_out)
        found["Wh"] = self.unpack(&m, self.cell.wh)
        if self.cell.whh != NULL:
            m = recur_plain_layout(self.n_out, self.n_out)
            found["Whh"] = self.unpack(&m, self.cell.whh)
        return found

    cdef void pack_backward(self) except *:
        """Pack the transposes that the backward multiplies with; once, by one thread."""
        if self.storage is not None:
            raise ValueError(f"weights held as {self.storage} have no backward")
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
        return thread_count if self.is_threaded(T, B) else 1

    cdef bint is_threaded(self, Py_ssize_t T, Py_ssize_t B) noexcept:
        """Whether a step pays for its barrier, and for what its threads hand over to each other."""
        # small batches wait for the weights: reading one costs as long as five multiply-adds
        cdef Py_ssize_t step = max(self.work(B), 5 * self.work(1))
        # a sequence's threads hand over h; one step's also x and the new h, which are the caller's
        cdef Py_ssize_t handed = B * (self.n_out if T > 1 else self.n_in + 2 * self.n_out)
        return step >= THREADED_STEP + HANDED_OVER * handed

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
        dstate = self.check_dstate(dstate, B)
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
            raise ValueError(
                f"lengths go from {lengths.min()} to {lengths.max()}, expected 0 to T = {T}")
        return 0

    cdef tuple run_sequence(self, X, tuple state, lengths, bint save):
        check_3d("X", X, self.typenum, -1, -1, self.n_in)
        cdef Py_ssize_t T = cnp.PyArray_DIM(X, 0), B = cnp.PyArray_DIM(X, 1), H = self.n_out
        cdef Py_ssize_t item = self.table.item, step_bytes = B * H * item
        cdef int kind = self.cell.kind, t = self.typenum
        self.check_state("h", state, B)
        self.check_lengths(lengths, T, B)
        # slot 0 of a slab is the first state
        cdef cnp.ndarray h = empty_slab(t, T + 1, B, H), c = None, gates = None, hn = None, Y
        memcpy(data(h), data(state[0]), step_bytes)
        Y = h[1:]
        if kind == RECUR_LSTM:
            c = empty_slab(t, T + 1 if save else 1, B, H)
            memcpy(data(c), data(state[1]), step_bytes)
        if save and kind != RECUR_RNN:
            gates = empty_slab(t, T, B, self.gates * H)
        if save and kind == RECUR_GRU:
            hn = empty_slab(t, T, B, H)
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
            Y = empty_slab(t, T, B, H)
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

    def sequence_backward(self, tuple saved, X, dY, tuple dstate, *, bint need_dx, bint keep,
                          lengths=None):
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
        dstate = self.check_dstate(dstate, B)
        return self.run_backward_of(
            T, B, X, state, <char *>data(h) + step_bytes,
            <char *>data(c) + step_bytes if c is not None else NULL,
            h[:T].reshape(T * B, H), saved[0], saved[1] if self.cell.kind == RECUR_GRU else None,
            dY, dstate, lengths, need_dx, keep)

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
        on, h_before (T * B, H) before each; dstate is overwritten."""
        cdef Py_ssize_t H = self.n_out, N = T * B, item = self.table.item, G = self.gates
        cdef int kind = self.cell.kind, t = self.typenum
        cdef cnp.ndarray dg, dgh = None, rh = None, dpeephole = None, dX = None
        cdef cnp.ndarray db = None, dbh = None
        if not self.has_backward:
            self.pack_backward()
        # an RNN's gates are its outputs, which the weights' gradient still needs
        dg = flat(empty_slab(t, T, B, G * H) if keep or kind == RECUR_RNN else gates, N, G * H)
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
            dgh = flat(empty_slab(t, T, B, G * H), N, G * H)
        if kind == RECUR_GRUV3:
            rh = flat(empty_slab(t, T, B, H), N, H)
        cdef Py_ssize_t padded = (H + self.table.lanes - 1) // self.table.lanes * self.table.lanes
        if self.cell.peephole != NULL:
            dpeephole = np.zeros((3, padded), self.dtype)
        # a single step's operands wait for those of other steps, to be summed with them
        if T > 1 and "b" in self.gradient_names:
            db = np.zeros((G, padded), self.dtype)
        if T > 1 and "bh" in self.gradient_names:
            dbh = np.zeros((1, padded), self.dtype)
        f.gates = data(gates) if kind != RECUR_RNN else NULL
        f.hn = data(hn)
        f.dy = data(dY)
        f.dh = data(dstate[0])
        f.carry = workspace(B * H * item + 1)
        f.dg = data(dg)
        f.dgh = data(dgh)
        f.rh = data(rh)
        f.dpeephole = data(dpeephole)
        f.db = data(db)
        f.dbh = data(dbh)
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
        found = self.operands(dg, dgh, rh, x, h_before)
        for name, total in (("peephole", dpeephole), ("b", db), ("bh", dbh)):
            if total is not None:
                total = np.ascontiguousarray(total[:, :H])
                found[name] = ("dense", total if name == "peephole" else total.reshape(-1))
        return dX, dstate, found

    cdef cnp.ndarray input_gradient(self, cnp.ndarray dg, cnp.ndarray X):
        """dg (N, G H) -> dg Wi, of X's shape."""
        cdef Py_ssize_t N = cnp.PyArray_DIM(dg, 0)
        cdef cnp.ndarray dX
        if cnp.PyArray_NDIM(X) == 2:
            dX = empty_2d(self.typenum, N, self.n_in)
        else:
            dX = empty_slab(self.typenum, cnp.PyArray_DIM(X, 0), cnp.PyArray_DIM(X, 1), self.n_in)
        cdef recur_layout m = recur_plain_layout(self.n_in, self.gates * self.n_out)
        cdef ProductTask task = ProductTask(
            self.table, &m, self.wi_back, NULL, data(dg), m.depth, N, data(dX))
        cdef Py_ssize_t work = N * m.units * m.depth
        parallel(run_product, &task, thread_count if work >= THREADED_CALL else 1, work)
        return dX

    cdef dict operands(self, cnp.ndarray dg, cnp.ndarray dgh, cnp.ndarray rh, cnp.ndarray x,
                       cnp.ndarray h):
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
    The state is (h,); gradients are "Wi", "Wh", "b".
    ValueError, TypeError on arrays that do not fit.
    """

    def __cinit__(self, Wi, Wh, b=None, *, act="tanh", storage=None):
        if act == "hard_sigmoid":
            raise ValueError(f"act is {act!r}, expected 'tanh', 'relu', 'sigmoid' or 'identity'")
        self.setup("RNNKernel", RECUR_RNN, activation(act), Wi, Wh, b, storage)


@cython.final
cdef class LSTMKernel(CellKernel):
    """g = Wi x + Wh h + b in blocks i, f, n, u;  c' = s(f) c + s(i) tanh(n);  h' = s(u) tanh(c').

    With peephole rows p_i, p_f, p_o: i += p_i c, f += p_f c, u += p_o c' before the gates.
    Wi (4H, I), Wh (4H, H), b (4H,) or None, peephole (3, H) or None are copied; gate: "sigmoid" or
    "hard_sigmoid".  The state is (h, c); gradients are "Wi", "Wh", "b", "peephole".
    ValueError, TypeError on arrays that do not fit.
    """

    def __cinit__(self, Wi, Wh, b=None, *, peephole=None, gate="sigmoid", storage=None):
        self.setup("LSTMKernel", RECUR_LSTM, gate_function(gate), Wi, Wh, b, storage)
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

    def __cinit__(self, Wi, Wh, b=None, *, bh=None, gate="sigmoid", storage=None):
        self.setup("GRUKernel", RECUR_GRU, gate_function(gate), Wi, Wh, b, storage)
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

    def __cinit__(self, Wi, Wh, b=None, *, Whh, gate="sigmoid", storage=None):
        self.setup("GRUv3Kernel", RECUR_GRUV3, gate_function(gate), Wi, Wh, b, storage)
        check_2d("Whh", Whh, self.typenum, self.n_out, self.n_out)
        cdef recur_layout m = recur_plain_layout(self.n_out, self.n_out)
        self.cell.whh = self.hold(&m, "Whh", Whh)
        self.gradient_names += ("Whh",)
