# Rows that lie scattered over blocks of memory, as the states of a pool's streams do.

# More blocks than there can be: each doubles the total.
cdef enum:
    MOST_BLOCKS = 64

# Rows of one column.  Block b holds the slots from starts[b] on.
cdef struct Scattered:
    char *bases[MOST_BLOCKS]
    Py_ssize_t steps[MOST_BLOCKS]  # bytes from row to row
    const int64_t *starts
    Py_ssize_t blocks
    Py_ssize_t row                 # bytes of a row
    const int64_t *index
    Py_ssize_t count


# What a pool notes of every stream.
cdef struct Note:
    int64_t step
    uint64_t digest
    double time
    char answered


NOTE = np.dtype([("step", np.int64), ("digest", np.uint64), ("time", np.float64),
                 ("answered", np.bool_)], align=True)


cdef inline char *row_at(const Scattered *s, int64_t slot) noexcept nogil:
    cdef Py_ssize_t b = s.blocks - 1
    while b > 0 and s.starts[b] > slot:
        b -= 1
    return s.bases[b] + (slot - s.starts[b]) * s.steps[b]


cdef void gather(const Scattered *s, char *to) noexcept nogil:
    cdef Py_ssize_t i
    if s.row == 8:  # a number of each slot: the compiler makes it one load and one store
        for i in range(s.count):
            memcpy(to + i * 8, row_at(s, s.index[i]), 8)
    else:
        for i in range(s.count):
            memcpy(to + i * s.row, row_at(s, s.index[i]), s.row)


cdef void scatter(const Scattered *s, const char *rows) noexcept nogil:
    cdef Py_ssize_t i
    if s.row == 8:
        for i in range(s.count):
            memcpy(row_at(s, s.index[i]), rows + i * 8, 8)
    else:
        for i in range(s.count):
            memcpy(row_at(s, s.index[i]), rows + i * s.row, s.row)


cdef char *stretch_at(const Scattered *s) noexcept nogil:
    """Where the rows of successive slots lie, or NULL if they are not one stretch of memory."""
    cdef Py_ssize_t b = s.blocks - 1
    while b > 0 and s.starts[b] > s.index[0]:
        b -= 1
    if s.steps[b] != s.row or (b + 1 < s.blocks and s.index[s.count - 1] >= s.starts[b + 1]):
        return NULL
    return s.bases[b] + (s.index[0] - s.starts[b]) * s.row


cdef char *gather_stretch(const Scattered *s, bint stretch, char *to) noexcept nogil:
    """The rows where they lie, if they are one stretch; else gathered there."""
    cdef char *at = stretch_at(s) if stretch else NULL
    if at != NULL:
        return at
    gather(s, to)
    return to


cdef void scatter_stretch(const Scattered *s, const char *rows, bint stretch) noexcept nogil:
    cdef char *at = stretch_at(s) if stretch else NULL
    if at == NULL:
        scatter(s, rows)
    elif at != rows:
        memcpy(at, rows, s.count * s.row)


# Rows of numbers of any strides.
cdef struct Rows:
    char *data
    Py_ssize_t n, step, row  # numbers in a row; bytes from number to number, from row to row
    bint is_double
    bint plain               # C-contiguous, in the dtype of the kernels


cdef inline Py_ssize_t rows_size(Py_ssize_t rows, Py_ssize_t n, Py_ssize_t item) noexcept nogil:
    """Bytes that keep what comes next on a cache line of its own."""
    return (rows * n * item + 63) // 64 * 64


cdef void take_rows(const Rows *given, char *to, Py_ssize_t rows, Py_ssize_t item) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(rows):
        copy_in(given.data + i * given.row, given.step, given.is_double, to + i * given.n * item,
                item == 8, given.n)


cdef void mark(const Scattered *s, double now, const uint64_t *digests) noexcept nogil:
    cdef Py_ssize_t i
    cdef Note *note
    for i in range(s.count):
        note = <Note *>row_at(s, s.index[i])
        note.step += 1
        note.digest = digests[i] if digests != NULL else 0
        note.time = now
        note.answered = 1


cdef int locate(Scattered *s, tuple blocks, cnp.ndarray starts, cnp.ndarray index,
                cnp.ndarray rows, bint written) except -1:
    """Fill s in.  The blocks hold rows like `rows`, and are written or only read."""
    cdef Py_ssize_t b, i, end = 0
    s.blocks = len(blocks)
    if not 0 < s.blocks <= MOST_BLOCKS:
        raise ValueError(f"there are {s.blocks} blocks, expected 1 to {MOST_BLOCKS}")
    check_1d("starts", starts, cnp.NPY_INT64, s.blocks)
    check_1d("index", index, cnp.NPY_INT64, -1)
    s.starts = <const int64_t *>data(starts)
    s.index = <const int64_t *>data(index)
    s.count = cnp.PyArray_DIM(index, 0)
    s.row = cnp.PyArray_ITEMSIZE(rows)
    for i in range(1, cnp.PyArray_NDIM(rows)):
        s.row *= cnp.PyArray_DIM(rows, i)
    cdef cnp.ndarray block
    for b in range(s.blocks):
        block = blocks[b]
        if block is None:
            raise TypeError(f"blocks[{b}] is None, expected an array")
        check_block(block, rows)
        if written:
            check_writable(f"blocks[{b}]", block)
        if s.starts[b] != end:
            raise ValueError(f"block {b} starts at slot {s.starts[b]}, expected {end}")
        s.bases[b] = <char *>cnp.PyArray_DATA(block)
        s.steps[b] = cnp.PyArray_STRIDE(block, 0)
        end += cnp.PyArray_DIM(block, 0)
    for i in range(s.count):
        if s.index[i] < 0 or s.index[i] >= end:
            raise ValueError(f"index[{i}] is {s.index[i]}, expected 0 to {end - 1}")
    return 0


cdef int check_rows(str name, cnp.ndarray rows, Py_ssize_t n) except -1:
    if not cnp.PyArray_NDIM(rows) or not cnp.PyArray_ISCARRAY_RO(rows):
        raise ValueError(f"{name} must be aligned and C-contiguous")
    if n >= 0 and cnp.PyArray_DIM(rows, 0) != n:
        raise ValueError(f"{name} has {cnp.PyArray_DIM(rows, 0)} rows, expected {n}")
    return 0


cdef int check_block(cnp.ndarray block, cnp.ndarray rows) except -1:
    """A block holds rows like those, each of them contiguous."""
    cdef int i, ndim = cnp.PyArray_NDIM(rows)
    cdef Py_ssize_t step = cnp.PyArray_ITEMSIZE(rows)
    if rows.dtype.hasobject:
        raise TypeError("the rows hold Python objects")
    cdef bint same = cnp.PyArray_NDIM(block) == ndim and (
        cnp.PyArray_TYPE(block) == cnp.PyArray_TYPE(rows)
        and cnp.PyArray_ITEMSIZE(block) == step and cnp.PyArray_ISNOTSWAPPED(block))
    if same:
        for i in range(ndim - 1, 0, -1):
            same = same and cnp.PyArray_DIM(block, i) == cnp.PyArray_DIM(rows, i) and (
                cnp.PyArray_DIM(block, i) <= 1 or cnp.PyArray_STRIDE(block, i) == step)
            step *= cnp.PyArray_DIM(block, i)
    if not same:
        raise ValueError(
            f"a block is {block.dtype} of shape {np.shape(block)}, the rows are {rows.dtype} "
            f"of shape {np.shape(rows)}")
    return 0


def gather_rows(tuple blocks not None, cnp.ndarray starts not None, cnp.ndarray index not None,
                cnp.ndarray out not None):
    """out[i] = row index[i] of the blocks laid end to end; returns out.

    blocks  up to 64 arrays (m, ...) like `out`, each row contiguous, rows any distance apart
    starts  (len(blocks),) int64: the first row of each block, 0, m0, m0 + m1, ...
    index   (n,) int64; out (n, ...), contiguous, shares no memory with the blocks
    """
    cdef Scattered s
    check_rows("out", out, cnp.PyArray_SIZE(index))
    check_writable("out", out)
    locate(&s, blocks, starts, index, out, False)
    cdef char *to = <char *>cnp.PyArray_DATA(out)
    with nogil:
        gather(&s, to)
    return out


def scatter_rows(tuple blocks not None, cnp.ndarray starts not None, cnp.ndarray index not None,
                 cnp.ndarray rows not None):
    """Row index[i] of the blocks = rows[i], in order of i; arguments as for `gather_rows`."""
    cdef Scattered s
    check_rows("rows", rows, cnp.PyArray_SIZE(index))
    locate(&s, blocks, starts, index, rows, True)
    cdef const char *given = <const char *>cnp.PyArray_DATA(rows)
    with nogil:
        scatter(&s, given)


def mark_rows(tuple blocks not None, cnp.ndarray starts not None, cnp.ndarray index not None,
              double now, cnp.ndarray digests=None):
    """The notes of slots index[i], records of NOTE, after a step: its number, digest and time.

    digests  (n,) uint64, None for zeros; blocks, starts and index as for `gather_rows`
    """
    cdef Scattered s
    locate(&s, blocks, starts, index, NO_NOTES, True)
    if digests is not None:
        check_1d("digests", digests, cnp.NPY_UINT64, s.count)
    mark(&s, now, <const uint64_t *>data(digests))


NO_NOTES = np.empty(0, NOTE)


@cython.final
cdef class SlotStepper:
    """A chain of kernels that steps states where they lie, scattered over blocks of memory.

    kernels  cell kernels, AffineKernels and activation names, all of one dtype, sizes chained
    starts   the first row of each block, as for `gather_rows`
    states   for every part of the state, in the order of the cells, its blocks of rows
    answers  blocks of rows for the last answers; notes, blocks of records NOTE
    most     rows that are stepped at once
    watch    Version counters of everything that the kernels are snapshots of
    named    dicts that name the stages, with lists of the values that they held

    Its bits are those of the kernels' own calls.  One thread at a time may be inside.
    """

    cdef Chain chain
    cdef Buffer stages, columns, memory
    cdef readonly tuple kernels
    cdef Stepper checked           # of the same kernels; it sees the counters move
    cdef tuple blocks
    cdef cnp.ndarray starts
    cdef int typenum
    cdef Py_ssize_t n_in, n_out, n_states, capacity, most
    cdef Py_ssize_t room           # rows that there is memory for
    cdef Py_ssize_t work           # of one row
    cdef Scattered *parts          # the states', then the answers' and the notes'
    cdef bint inside

    def __cinit__(self, kernels, cnp.ndarray starts not None, tuple states not None,
                  tuple answers not None, tuple notes not None, Py_ssize_t most, *, watch=(),
                  named=()):
        cdef Stepper checked = Stepper(kernels, 0, watch=watch, named=named)
        cdef Py_ssize_t i, at = 0
        cdef CellKernel cell
        self.kernels, self.checked, self.starts = checked.kernels, checked, starts
        self.typenum, self.n_in, self.n_out = checked.typenum, checked.n_in, checked.n_out
        self.chain.table = checked.chain.table
        self.most = max(most, 1)
        self.stages = Buffer(len(self.kernels) * sizeof(Stage))
        memset(self.stages.data, 0, self.stages.size)
        self.chain.stages = <Stage *>self.stages.data
        self.chain.count = len(self.kernels)
        self.n_states = len(states)
        self.blocks = (*states, answers, notes)
        self.columns = Buffer(len(self.blocks) * sizeof(Scattered))
        self.parts = <Scattered *>self.columns.data
        for i in range(self.chain.count):
            self.lay_out(&self.chain.stages[i], self.kernels[i])
            if isinstance(self.kernels[i], CellKernel):
                cell = self.kernels[i]
                for _ in range(cell.n_states):
                    if at == self.n_states:
                        raise ValueError(f"there are {at} states, the cells have more")
                    self.find(at, empty_2d(self.typenum, 0, cell.n_out))
                    at += 1
        if at != self.n_states:
            raise ValueError(f"there are {self.n_states} states, the cells have {at}")
        self.find(at, empty_2d(self.typenum, 0, self.n_out))
        self.find(at + 1, NO_NOTES)
        for block in notes:
            self.capacity += len(block)

    cdef int find(self, Py_ssize_t i, cnp.ndarray rows) except -1:
        return locate(&self.parts[i], self.blocks[i], self.starts, NOWHERE, rows, True)

    cdef void lay_out(self, Stage *s, stage) except *:
        cdef CellKernel cell
        cdef AffineKernel affine
        s.table = self.chain.table
        if isinstance(stage, CellKernel):
            cell = stage
            s.cell, s.table, s.size = &cell.cell, cell.table, cell.n_out
            s.forward[0].steps = 1
            self.work += cell.work(1)
        elif isinstance(stage, AffineKernel):
            affine = stage
            s.layout, s.table = affine.layout, affine.table
            s.packed, s.bias, s.size = affine.weights.data, affine.bias.data, affine.n_out
            self.work += affine.n_in * affine.n_out
        else:
            s.function = activation(stage)

    @property
    def fresh(self):
        """False once a watched counter moved, or another layer stands under a name."""
        return self.checked.is_fresh()

    def step(self, cnp.ndarray index not None, x, clock, cnp.ndarray digests=None, out=None):
        """One step of the slots index (n,) int64, without repeats: answers (R, n), or out.

        x      (I, n), or (I,) for one slot, float32 or float64, of any strides
        clock  () -> the time that is noted, called right before the step
        out    an array of the kernels' dtype, of any strides

        The blocks of answers and notes are written, too, the notes as by `mark_rows`.  Returns
        None, and changes nothing, on any other x or out, on a number that only float64 holds, where
        their memory may overlap, when it is not `fresh`, and while another thread is inside.
        """
        check_1d("index", index, cnp.NPY_INT64, -1)
        cdef Py_ssize_t n = cnp.PyArray_DIM(index, 0), i
        cdef const int64_t *slots = <const int64_t *>data(index)
        cdef cnp.npy_intp dims[2]
        cdef Scattered *notes = &self.parts[self.n_states + 1]
        cdef cnp.ndarray y
        if n == 0 or not self.is_input(x, n) or not self.checked.is_fresh():
            return None
        if out is not None and (not self.is_answer(out, n) or may_overlap(x, out)):
            return None
        if digests is not None:
            check_1d("digests", digests, cnp.NPY_UINT64, n)
        for i in range(n):
            if slots[i] < 0 or slots[i] >= self.capacity:
                raise ValueError(f"index[{i}] is {slots[i]}, expected 0 to {self.capacity - 1}")
        if out is None:
            dims[0] = self.n_out
            dims[1] = n
            y = cnp.PyArray_EMPTY(2, dims, self.typenum, 1)
        else:
            y = out
        cdef double now = clock()  # it may call anything: the model, or this method
        if not self.enter():
            return None
        # From here on nothing calls Python, and nothing that the garbage collector counts is made:
        # whatever looks in on the blocks finds all of the step there, or nothing.
        try:
            if not self.checked.is_fresh():
                return None
            self.make_room(min(n, self.most))
            self.run(x, y, slots, n)
            notes.index = slots
            notes.count = n
            mark(notes, now, <const uint64_t *>data(digests))
        finally:
            self.inside = False
        return y

    cdef bint enter(self):
        """Whether no other thread is inside; then this one is, until it sets `inside` to False."""
        cdef bint free
        with cython.critical_section(self):
            free = not self.inside
            self.inside = True
        return free

    cdef bint is_input(self, object x, Py_ssize_t n):
        if not cnp.PyArray_CheckExact(x) or not cnp.PyArray_ISBEHAVED_RO(<cnp.ndarray>x):
            return False
        cdef cnp.ndarray array = x
        cdef int ndim = cnp.PyArray_NDIM(array), given = cnp.PyArray_TYPE(array)
        if given != cnp.NPY_FLOAT32 and given != cnp.NPY_FLOAT64:
            return False
        if ndim == 0 or ndim > 2 or cnp.PyArray_DIM(array, 0) != self.n_in:
            return False
        if n != (1 if ndim == 1 else cnp.PyArray_DIM(array, 1)):
            return False
        return not overflows(array, self.typenum == cnp.NPY_FLOAT64)

    cdef bint is_answer(self, object out, Py_ssize_t n):
        if not (cnp.PyArray_CheckExact(out) and cnp.PyArray_NDIM(<cnp.ndarray>out) == 2
                and cnp.PyArray_TYPE(<cnp.ndarray>out) == self.typenum
                and cnp.PyArray_ISBEHAVED(<cnp.ndarray>out)):
            return False
        return (cnp.PyArray_DIM(<cnp.ndarray>out, 0) == self.n_out
                and cnp.PyArray_DIM(<cnp.ndarray>out, 1) == n)

    cdef int make_room(self, Py_ssize_t rows) except -1:
        """Memory for x, and of every cell for h, h', c and scratch, of others for their output."""
        if rows <= self.room:
            return 0
        cdef Py_ssize_t item = self.chain.table.item, i, width = self.n_in, needed
        cdef Stage *s
        needed = rows_size(rows, width, item)
        for i in range(self.chain.count):
            s = &self.chain.stages[i]
            if s.cell != NULL or s.packed != NULL:
                width = s.size
            needed += (6 if s.cell != NULL else 1) * rows_size(rows, width, item)
        self.memory = Buffer(max(needed, 1))
        self.room = rows
        return 0

    cdef int run(self, cnp.ndarray x, cnp.ndarray y, const int64_t *slots,
                 Py_ssize_t n) except -1:
        cdef Py_ssize_t item = self.chain.table.item
        cdef int typenum = cnp.PyArray_TYPE(x)
        cdef const char *source = <const char *>cnp.PyArray_DATA(x)
        cdef char *to = <char *>cnp.PyArray_DATA(y)
        cdef Rows given, wanted
        given.is_double, given.n = typenum == cnp.NPY_FLOAT64, self.n_in
        given.step = cnp.PyArray_STRIDE(x, 0)
        given.row = cnp.PyArray_STRIDE(x, 1) if cnp.PyArray_NDIM(x) == 2 else self.n_in * item
        given.plain = typenum == self.typenum and (given.step == item or self.n_in == 1) and (
            given.row == self.n_in * item or n == 1)
        wanted.is_double, wanted.n = self.typenum == cnp.NPY_FLOAT64, self.n_out
        wanted.step = cnp.PyArray_STRIDE(y, 0)
        wanted.row = cnp.PyArray_STRIDE(y, 1)
        wanted.plain = (wanted.step == item or self.n_out == 1) and (
            wanted.row == self.n_out * item or n == 1)
        given.data, wanted.data = <char *>source, to
        cdef int count = thread_count if self.is_threaded(min(n, self.most)) else 1
        if n * self.work < SHORT_WORK:
            self.step_all(given, wanted, slots, n, 1)
        else:
            with nogil:
                self.step_all(given, wanted, slots, n, count)
        return 0

    cdef bint is_threaded(self, Py_ssize_t rows):
        for stage in self.kernels:
            if isinstance(stage, CellKernel) and (<CellKernel>stage).threads(1, rows) > 1:
                return True
        return False

    cdef void step_all(self, Rows given, Rows wanted, const int64_t *slots, Py_ssize_t n,
                       int count) noexcept nogil:
        cdef Py_ssize_t some
        while n > 0:
            some = min(n, self.most)
            self.step_some(&given, &wanted, slots, some, count)
            given.data += some * given.row
            wanted.data += some * wanted.row
            slots += some
            n -= some

    cdef void step_some(self, const Rows *given, const Rows *wanted, const int64_t *slots,
                        Py_ssize_t n, int count) noexcept nogil:
        """One call of the kernels; states and rows that lie one after the other stay there."""
        cdef Py_ssize_t item = self.chain.table.item, i, part = 0, width = self.n_in
        cdef char *at = <char *>self.memory.data
        cdef const void *x = given.data
        cdef void *y = NULL
        cdef bint stretch = True, last
        cdef Stage *s
        for i in range(1, n):
            stretch = stretch and slots[i] == slots[i - 1] + 1
        for i in range(self.n_states + 1):
            self.parts[i].index = slots
            self.parts[i].count = n
        if not given.plain:
            take_rows(given, at, n, item)
            x = at
        at += rows_size(n, width, item)
        self.chain.batch = n
        for i in range(self.chain.count):
            s = &self.chain.stages[i]
            last = i == self.chain.count - 1
            if s.cell != NULL or s.packed != NULL:
                width = s.size
            s.x[0] = x
            y = wanted.data if last and wanted.plain else at
            at += rows_size(n, width, item)
            s.y[0] = y
            if s.cell != NULL:
                at = self.place_cell(s, &self.parts[part], stretch, at, n)
                part += 1 if s.cell.kind != RECUR_LSTM else 2
            else:
                s.size = n * width if s.packed == NULL else width
            x = y
        recur_parallel(run_chain, &self.chain, count, longest_wait(n * self.work))
        part = 0
        for i in range(self.chain.count):
            s = &self.chain.stages[i]
            if s.cell == NULL:
                continue
            scatter_stretch(&self.parts[part], <const char *>s.y[0], stretch)
            part += 1
            if s.cell.kind == RECUR_LSTM:
                scatter_stretch(&self.parts[part], <const char *>s.forward[0].c, stretch)
                part += 1
        scatter_stretch(&self.parts[part], <const char *>y, stretch)
        if not wanted.plain:
            for i in range(n):
                copy_out(<const char *>y + i * self.n_out * item, item,
                         wanted.data + i * wanted.row, wanted.step, self.n_out)

    cdef char *place_cell(self, Stage *s, const Scattered *parts, bint stretch, char *at,
                          Py_ssize_t n) noexcept nogil:
        """Tells a cell where its state is: gathered at `at`, unless it is one stretch of memory."""
        cdef recur_forward *f = &s.forward[0]
        cdef Py_ssize_t block = rows_size(n, s.cell.n_hidden, self.chain.table.item)
        f.batch = n
        f.x = s.x[0]
        f.h = s.y[0]
        f.h_first = gather_stretch(&parts[0], stretch, at)
        at += block
        if s.cell.kind == RECUR_LSTM:
            f.c = gather_stretch(&parts[1], stretch, at)
            f.c_first = f.c
        at += block
        f.scratch = at if s.cell.kind == RECUR_GRUV3 else NULL
        return at + 3 * block


NOWHERE = np.empty(0, np.int64)


def hash_rows(cnp.ndarray rows not None):
    """A hash of each row's bytes, never 0: rows (n, ...), contiguous, of any dtype -> (n,) uint64.

    Of the row's words w_j of 32 bits, the last filled up with zeros: with
    o_j = j * 9E3779B97F4A7C15 | 1 (j from 1) and m_j = (w_j + 1) * o_j, the sum of
    (m_j ^ m_j >> 29) * BF58476D1CE4E5B9, all modulo 2**64, is folded by its own upper half.
    """
    check_rows("rows", rows, -1)
    cdef cnp.npy_intp n = cnp.PyArray_DIM(rows, 0)
    cdef Py_ssize_t size = cnp.PyArray_NBYTES(rows) // n if n else 0, i
    cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &n, cnp.NPY_UINT64, 0)
    cdef const unsigned char *at = <const unsigned char *>data(rows)
    cdef uint64_t *to = <uint64_t *>data(out)
    with nogil:
        for i in range(n):
            to[i] = hash_row(at + i * size, size)
    return out


cdef inline uint64_t mixed(uint64_t word, uint64_t j) noexcept nogil:
    cdef uint64_t m = (word + 1) * ((j * <uint64_t>0x9E3779B97F4A7C15) | 1)
    return (m ^ (m >> 29)) * <uint64_t>0xBF58476D1CE4E5B9


cdef uint64_t hash_row(const unsigned char *at, Py_ssize_t size) noexcept nogil:
    cdef uint64_t total = 0
    cdef uint32_t word
    cdef Py_ssize_t j, words = size // 4
    for j in range(words):
        memcpy(&word, at + 4 * j, 4)
        total += mixed(word, j + 1)
    if size % 4 or size == 0:
        word = 0
        memcpy(&word, at + 4 * words, size % 4)
        total += mixed(word, words + 1)
    total ^= total >> 32
    return total | 1
