# A chain of kernels in one call.

@cython.final
cdef class Version:
    """A counter that an owner of weights raises at each write, and that a Stepper reads."""

    cdef public long long count

    def __cinit__(self, count=0):
        self.count = count

    def bump(self):
        """Add one."""
        self.count += 1


# What a stepper has seen of a counter.
cdef struct Watched:
    PyObject *version  # held by `watch`
    long long count


# One stage of a chain.  A cell's step needs other memory for h' than for h, so two buffers take
# turns, and there are two forms of each call, for even and for odd steps.
cdef struct Stage:
    const recur_table *table    # of the format of its weights
    const recur_cell *cell      # NULL for the other kinds
    recur_forward forward[2]
    recur_layout layout         # AffineKernel
    const void *packed          # its weights; NULL for an activation
    const void *bias
    int function
    const void *x[2]
    void *y[2]
    Py_ssize_t size             # numbers in y
    recur_forward block         # of a cell, for several steps: see `run`
    void *block_x
    void *block_y


cdef struct Chain:
    const recur_table *table
    Stage *stages
    Py_ssize_t count, batch
    int turn
    Py_ssize_t steps            # of the block under way


cdef void run_stage(Chain *chain, Stage *stage, int id, int count, void *barrier) noexcept nogil:
    cdef int turn = chain.turn
    if stage.cell != NULL:
        stage.table.forward(stage.cell, &stage.forward[turn], id, count, barrier)
    elif stage.packed != NULL:
        stage.table.product(&stage.layout, stage.packed, stage.bias, NULL, stage.x[turn],
                            stage.layout.depth, chain.batch, stage.y[turn], id, count)
    elif id == 0:
        stage.table.map(stage.function, stage.x[turn], stage.y[turn], stage.size)


cdef void run_chain(void *context, int id, int count, void *barrier) noexcept nogil:
    cdef Chain *chain = <Chain *>context
    cdef Py_ssize_t i
    for i in range(chain.count):
        run_stage(chain, &chain.stages[i], id, count, barrier)
        if count > 1:
            recur_barrier(barrier)


cdef void run_block(void *context, int id, int count, void *barrier) noexcept nogil:
    cdef Chain *chain = <Chain *>context
    cdef Stage *s
    cdef Py_ssize_t i
    for i in range(chain.count):
        s = &chain.stages[i]
        if s.cell != NULL:
            s.table.forward(s.cell, &s.block, id, count, barrier)
        elif s.packed != NULL:
            s.table.product(&s.layout, s.packed, s.bias, NULL, s.block_x, s.layout.depth,
                            chain.steps * chain.batch, s.block_y, id, count)
        elif id == 0:
            s.table.map(s.function, s.block_x, s.block_y, chain.steps * s.size)
        if count > 1:
            recur_barrier(barrier)


cdef void copy_in(const char *x, Py_ssize_t step, bint is_double, void *to, bint to_double,
                  Py_ssize_t n) noexcept nogil:
    """n numbers `step` bytes apart into contiguous memory, converted."""
    cdef Py_ssize_t i
    cdef double value
    if is_double == to_double and step == (8 if is_double else 4):
        memcpy(to, x, n * step)
        return
    for i in range(n):
        value = (<double *>x)[0] if is_double else (<float *>x)[0]
        if to_double:
            (<double *>to)[i] = value
        else:
            (<float *>to)[i] = <float>value
        x += step


cdef bint overflows(cnp.ndarray x, bint to_double) noexcept:
    """Whether conversion makes a number of x (I,), (I, B) or (I, B, T) infinite: NumPy says so."""
    cdef Py_ssize_t n[3]
    cdef Py_ssize_t step[3]
    cdef Py_ssize_t i, j, k
    cdef const char *plane
    cdef const char *row
    cdef double number
    cdef bint found = False
    if to_double or cnp.PyArray_TYPE(x) != cnp.NPY_FLOAT64:
        return False
    cdef int ndim = cnp.PyArray_NDIM(x)
    for i in range(3):
        n[i], step[i] = 1, 0
    for i in range(ndim):  # features innermost, the last axis outermost
        j = 2 if i == 0 else 0 if i == ndim - 1 else 1
        n[j], step[j] = cnp.PyArray_DIM(x, i), cnp.PyArray_STRIDE(x, i)
    if n[0] > 1 and step[0] < step[2]:  # the shortest steps innermost
        n[0], n[2] = n[2], n[0]
        step[0], step[2] = step[2], step[0]
    for i in range(n[0]):
        plane = <const char *>cnp.PyArray_DATA(x) + i * step[0]
        for j in range(n[1]):
            row = plane + j * step[1]
            for k in range(n[2]):
                number = (<const double *>(row + k * step[2]))[0]
                found |= isfinite(number) and not isfinite(<float>number)
    return found


cdef void copy_out(const char *source, Py_ssize_t item, char *to, Py_ssize_t step,
                   Py_ssize_t n) noexcept nogil:
    """n contiguous numbers to places `step` bytes apart."""
    cdef Py_ssize_t i
    if step == item:
        memcpy(to, source, n * item)
        return
    for i in range(n):
        if item == 8:
            (<double *>to)[0] = (<const double *>source)[i]
        else:
            (<float *>to)[0] = (<const float *>source)[i]
        to += step


cdef bint holds(dict names, list values) noexcept:
    """Whether the values of a dict are these, in order."""
    cdef Py_ssize_t at = 0, i = 0
    cdef PyObject *value
    with cython.critical_section(names):
        if len(names) != len(values):
            return False
        while PyDict_Next(names, &at, NULL, &value):
            if value != <PyObject *>values[i]:
                return False
            i += 1
        return True


# An array of steps, (F, T) or (F, B, T): bytes from feature to feature, sample to sample, time to
# time.
cdef struct Steps:
    char *data
    Py_ssize_t feature, sample, time
    bint is_double


cdef Steps steps_of(cnp.ndarray a) noexcept:
    cdef int ndim = cnp.PyArray_NDIM(a)
    cdef Steps steps
    steps.data = <char *>cnp.PyArray_DATA(a)
    steps.feature = cnp.PyArray_STRIDE(a, 0)
    steps.sample = cnp.PyArray_STRIDE(a, 1)  # of no account where there is one sample
    steps.time = cnp.PyArray_STRIDE(a, ndim - 1)
    steps.is_double = cnp.PyArray_TYPE(a) == cnp.NPY_FLOAT64
    return steps


cdef bint is_rows(const Steps *a, Py_ssize_t item, Py_ssize_t batch, Py_ssize_t width) noexcept:
    """Whether the steps lie in memory as kernels read and write them: (T, B, F), contiguous."""
    return (a.is_double == (item == 8) and a.feature == item
            and (batch == 1 or a.sample == width * item) and a.time == batch * width * item)


cdef void copy_steps(const Steps *x, Py_ssize_t first, Py_ssize_t n, Py_ssize_t batch,
                     Py_ssize_t width, char *to, bint to_double) noexcept nogil:
    """Steps [first, first + n) into contiguous rows (n, batch, width), converted."""
    cdef Py_ssize_t item = 8 if to_double else 4, row = batch * width, t, b, i, start, stop
    cdef const char *source
    if x.is_double != to_double or x.feature == item:
        for t in range(n):
            for b in range(batch):
                copy_in(x.data + b * x.sample + (first + t) * x.time, x.feature, x.is_double,
                        to, to_double, width)
                to += width * item
        return
    # a few features of all steps after one another: the lines that hold them stay in cache
    for b in range(batch):
        for start in range(0, width, 16):
            stop = min(start + 16, width)
            for t in range(n):
                source = x.data + b * x.sample + (first + t) * x.time + start * x.feature
                for i in range(t * row + b * width + start, t * row + b * width + stop):
                    if to_double:
                        (<double *>to)[i] = (<const double *>source)[0]
                    else:
                        (<float *>to)[i] = (<const float *>source)[0]
                    source += x.feature


cdef inline Py_ssize_t aligned(Py_ssize_t size) noexcept:
    """Room for so many bytes from one cache line on."""
    return (size + 63) // 64 * 64


@cython.final
cdef class Stepper:
    """A chain of kernels stepped by one call, with its recurrent state inside.

    stages   cell kernels, AffineKernels and activation names, all of one dtype, sizes chained
    batch    B, fixed; the state starts at zeros
    watch    Version counters of everything that the kernels are snapshots of
    named    dicts that name the stages, with lists of the values that they held
    Threads may share it: one at a time is inside.  ValueError, TypeError on stages that do not fit.
    """

    cdef Chain chain
    cdef Buffer stages, memory, watched
    cdef Buffer blocks             # what `run` needs, from its first call on
    cdef Py_ssize_t block_size, block_scratch  # its bytes; where the cells' scratch begins
    cdef char *block_in            # in it, where X and Y go that do not lie as rows
    cdef char *block_out
    cdef readonly tuple kernels
    cdef tuple watch, named
    cdef int typenum
    cdef cnp.dtype descr
    cdef void *x
    cdef list cell_stages          # indices
    cdef list here                 # for each, whether its state lies in this stepper
    cdef Py_ssize_t away           # how many do not
    cdef Py_ssize_t work
    cdef bint threaded             # whether a step has work for more than one thread
    cdef bint inside               # whether a thread is
    cdef readonly bint stepping    # whether that thread takes a step
    cdef readonly long long steps
    cdef readonly Py_ssize_t batch
    cdef readonly Py_ssize_t n_in
    cdef readonly Py_ssize_t n_out
    cdef readonly object dtype

    def __cinit__(self, stages, batch, *, watch=(), named=()):
        self.kernels = tuple(stages)
        self.batch = batch
        if batch < 0:
            raise ValueError(f"batch is {batch}, expected at least 0")
        if not self.kernels or isinstance(self.kernels[0], str):
            raise ValueError("a Stepper needs stages, the first of them a kernel")
        self.dtype = self.descr = self.kernels[0].dtype
        self.typenum = cnp.NPY_FLOAT64 if self.dtype == np.float64 else cnp.NPY_FLOAT32
        self.chain.table = table_of(self.typenum)
        self.n_in = self.n_out = self.kernels[0].n_in
        self.check_stages()
        self.look_at(tuple(watch))
        self.named = tuple(named)
        for names, held in self.named:
            if not isinstance(names, dict) or not isinstance(held, list):
                raise TypeError(f"named holds {type(names).__name__} and {type(held).__name__}, "
                                "expected dict and list")
        self.lay_out()
        self.size_blocks()

    cdef int look_at(self, tuple watch) except -1:
        cdef Py_ssize_t i
        cdef Watched *watched
        for version in watch:
            if not isinstance(version, Version):
                raise TypeError(f"watch holds {type(version).__name__}, expected Version")
        self.watch = watch
        self.watched = Buffer(max(len(watch), 1) * sizeof(Watched))
        watched = <Watched *>self.watched.data
        for i in range(len(watch)):
            watched[i].version = <PyObject *>watch[i]
            watched[i].count = (<Version>watch[i]).count
        return 0

    cdef int check_stages(self) except -1:
        for i, stage in enumerate(self.kernels):
            if isinstance(stage, str):
                activation(stage)
                continue
            if not isinstance(stage, (CellKernel, AffineKernel)):
                raise TypeError(
                    f"stage {i} is {type(stage).__name__}, expected a kernel or an activation")
            if stage.dtype != self.dtype:
                raise TypeError(f"stage {i} is {stage.dtype}, the first is {self.dtype}")
            if stage.n_in != self.n_out:
                raise ValueError(
                    f"stage {i} takes {stage.n_in} features, the one before gives {self.n_out}")
            self.n_out = stage.n_out
        return 0

    cdef void lay_out(self) except *:
        """Give each stage its memory: x, then for each h twice and c, or y; GRUv3's scratch."""
        cdef Py_ssize_t item = self.chain.table.item, B = self.batch, i, n, needed, block
        widths = [self.n_in]
        for stage in self.kernels:
            widths.append(widths[len(widths) - 1] if isinstance(stage, str) else stage.n_out)
        # each block starts on a cache line, so that a stage's stores meet no other stage's loads
        blocks = [aligned(B * n * item) for n in widths]
        needed = blocks[0] + sum(6 * block for block in blocks[1:])
        self.memory = Buffer(max(needed, 1))
        memset(self.memory.data, 0, needed)
        self.stages = Buffer(len(self.kernels) * sizeof(Stage))
        memset(self.stages.data, 0, self.stages.size)
        self.chain.stages = <Stage *>self.stages.data
        self.chain.count = len(self.kernels)
        self.chain.batch = B
        self.cell_stages = []
        self.here = []
        self.threaded = False
        self.x = self.memory.data
        cdef char *at = <char *>self.memory.data + <Py_ssize_t>blocks[0]
        cdef void *x0 = self.x
        cdef void *x1 = self.x
        cdef Stage *s
        for i in range(self.chain.count):
            s = &self.chain.stages[i]
            block = blocks[i + 1]
            s.size = B * <Py_ssize_t>widths[i + 1]
            s.x[0], s.x[1] = x0, x1
            s.y[0], s.y[1] = at, at
            s.table = self.chain.table
            stage = self.kernels[i]
            if isinstance(stage, CellKernel):
                self.lay_out_cell(s, stage, at, block)
                self.cell_stages.append(i)
                self.here.append(True)
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
        s.table = kernel.table
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
        self.threaded = self.threaded or kernel.is_threaded(1, self.batch)

    cdef void lay_out_affine(self, Stage *s, AffineKernel kernel) except *:
        s.layout = kernel.layout
        s.table = kernel.table
        s.packed = kernel.weights.data
        s.bias = kernel.bias.data
        self.work += self.batch * kernel.n_in * kernel.n_out

    @property
    def fresh(self):
        """False once a watched counter moved, or another layer stands under a name."""
        return self.is_fresh()

    cdef bint is_fresh(self) noexcept:
        cdef Watched *watched = <Watched *>self.watched.data
        cdef Py_ssize_t i
        for i in range(len(self.watch)):
            if (<Version>watched[i].version).count != watched[i].count:
                return False
        for names, held in self.named:
            if not holds(<dict>names, <list>held):
                return False
        return True

    def __call__(self, x, out=None):
        """One step, features first: x (I,) -> (R,) when batch is 1, or x (I, B) -> (R, B).

        x is a float32 or float64 array of any strides.  The answer is new, or goes into `out`, an
        array of the stepper's dtype and the answer's shape, of any strides.  Returns None, and
        changes nothing, on any other x or out, on a number that only float64 holds, once the
        stepper is not `fresh`, while a state is taken back, and while another thread is inside.
        """
        return self.step(x, out)

    cdef object step(self, object x, object out):
        if not cnp.PyArray_CheckExact(x):
            return None
        cdef cnp.ndarray array = x
        cdef int ndim = cnp.PyArray_NDIM(array), given = cnp.PyArray_TYPE(array)
        if given != cnp.NPY_FLOAT32 and given != cnp.NPY_FLOAT64:
            return None
        if not cnp.PyArray_ISBEHAVED_RO(array):
            return None
        if ndim == 0 or ndim > 2 or cnp.PyArray_DIM(array, 0) != self.n_in:
            return None
        if self.batch != (1 if ndim == 1 else cnp.PyArray_DIM(array, 1)):
            return None
        if out is not None and not self.is_answer(out, ndim, -1):
            return None
        if overflows(array, self.typenum == cnp.NPY_FLOAT64):
            return None
        cdef cnp.ndarray y = self.new_answer(ndim) if out is None else out
        if not self.enter():
            return None
        if self.away or not self.is_fresh():
            self.inside = False
            return None
        self.take(array, ndim)
        self.run_step()
        self.give(y, ndim)
        self.steps += 1
        self.inside = False
        return y

    cdef bint is_answer(self, object out, int ndim, Py_ssize_t steps):
        """Whether it can take the answer of one step, where steps is -1, or of so many."""
        if not (cnp.PyArray_CheckExact(out) and cnp.PyArray_NDIM(<cnp.ndarray>out) == ndim
                and cnp.PyArray_TYPE(<cnp.ndarray>out) == self.typenum
                and cnp.PyArray_ISBEHAVED(<cnp.ndarray>out)):
            return False
        if cnp.PyArray_DIM(<cnp.ndarray>out, 0) != self.n_out:
            return False
        if steps >= 0:
            ndim -= 1
            if cnp.PyArray_DIM(<cnp.ndarray>out, ndim) != steps:
                return False
        return ndim == 1 or cnp.PyArray_DIM(<cnp.ndarray>out, 1) == self.batch

    cdef cnp.ndarray new_answer(self, int ndim):
        cdef cnp.npy_intp dims[2]
        dims[0] = self.n_out
        dims[1] = self.batch
        return cnp.PyArray_EMPTY(ndim, dims, self.typenum, 1)

    def run(self, X, out=None):
        """T steps: X (I, T) when batch is 1, or (I, B, T) -> (R, T) or (R, B, T), as one by one.

        X and out as in `__call__`.  Returns None, and changes nothing, where a step would, and if
        the two may overlap.
        """
        return self.run_steps(X, out)

    cdef object run_layer(self, object X):
        """`run` for (I, B, T) through one cell, None where the general path may be faster."""
        if self.chain.count > 1 or not cnp.PyArray_CheckExact(X) or cnp.PyArray_NDIM(X) != 3:
            return None
        cdef Steps x = steps_of(X)
        if self.batch >= SMALL_BATCH and not is_rows(
                &x, self.chain.table.item, self.batch, self.n_in):
            return None
        return self.run_steps(X, None)

    cdef object run_steps(self, object X, object out):
        if not cnp.PyArray_CheckExact(X):
            return None
        cdef cnp.ndarray array = X
        cdef int ndim = cnp.PyArray_NDIM(array), given = cnp.PyArray_TYPE(array)
        if given != cnp.NPY_FLOAT32 and given != cnp.NPY_FLOAT64:
            return None
        if not cnp.PyArray_ISBEHAVED_RO(array):
            return None
        if ndim < 2 or ndim > 3 or cnp.PyArray_DIM(array, 0) != self.n_in:
            return None
        if self.batch != (1 if ndim == 2 else cnp.PyArray_DIM(array, 1)):
            return None
        if overflows(array, self.typenum == cnp.NPY_FLOAT64):
            return None
        cdef Py_ssize_t T = cnp.PyArray_DIM(array, ndim - 1)
        cdef cnp.npy_intp dims[3]
        dims[0] = self.n_out
        dims[1] = self.batch
        dims[ndim - 1] = T
        cdef cnp.ndarray Y
        if out is None:
            Y = cnp.PyArray_EMPTY(ndim, dims, self.typenum, 1)
        elif self.is_answer(out, ndim, T) and not may_overlap(X, out):
            Y = out
        else:
            return None
        cdef Buffer blocks = None
        if self.blocks is None:
            blocks = Buffer(self.block_size)
        if not self.enter():
            return None
        if self.away or not self.is_fresh():
            self.inside = False
            return None
        if self.blocks is None:
            self.lay_out_blocks(blocks)
        self.run_blocks(array, Y, T)
        self.steps += T
        self.inside = False
        return Y

    cdef Py_ssize_t longest(self) noexcept:
        """How many steps are computed at once: their intermediate results stay in cache."""
        return max(1, 256 // max(self.batch, 1))

    cdef void size_blocks(self) except *:
        """How much memory the steps of a block need, behind it the cells' scratch."""
        cdef Py_ssize_t item = self.chain.table.item, B = self.batch, n = self.longest(), i
        cdef Py_ssize_t needed = aligned(n * B * self.n_in * item), scratch = 1, row
        cdef Stage *s
        for i in range(self.chain.count):
            s = &self.chain.stages[i]
            needed += aligned(n * s.size * item)
            if s.cell != NULL:
                row = s.size * (<CellKernel>self.kernels[i]).gates * item
                s.block.chunk = min(n, max(1, AHEAD // max(row, 1))) if 0 < B < SMALL_BATCH else 0
                scratch = max(scratch, 3 * s.size * item + s.block.chunk * row)
        self.block_scratch = needed
        self.block_size = needed + scratch

    cdef void lay_out_blocks(self, Buffer blocks) noexcept:
        """Give each stage its part of this memory."""
        cdef Py_ssize_t item = self.chain.table.item, B = self.batch, n = self.longest(), i
        cdef char *at = <char *>blocks.data
        cdef char *scratch = at + self.block_scratch
        cdef void *x = at
        cdef Stage *s
        self.blocks = blocks
        self.block_in = at
        at += aligned(n * B * self.n_in * item)
        for i in range(self.chain.count):
            s = &self.chain.stages[i]
            s.block_x = x
            s.block_y = x = at
            self.block_out = at
            at += aligned(n * s.size * item)
            if s.cell != NULL:
                s.block.batch = B
                s.block.h_step = s.size
                s.block.c_first = s.block.c = s.forward[0].c
                s.block.scratch = scratch
                if s.block.chunk:
                    s.block.projected = scratch + 3 * s.size * item

    cdef void run_blocks(self, cnp.ndarray X, cnp.ndarray Y, Py_ssize_t T) noexcept:
        cdef Py_ssize_t i
        cdef int count = 1
        for i in range(self.chain.count):
            if self.chain.stages[i].cell != NULL:
                count = max(count, (<CellKernel>self.kernels[i]).threads(T, self.batch))
        cdef Steps x = steps_of(X), y = steps_of(Y)
        cdef Py_ssize_t item = self.chain.table.item, n = self.longest()
        cdef bint in_place = is_rows(&x, item, self.batch, self.n_in)
        cdef bint out_place = is_rows(&y, item, self.batch, self.n_out)
        if in_place and out_place and self.chain.count == 1:
            n = max(T, 1)
        if T * self.work < SHORT_WORK:
            self.run_all(&x, &y, in_place, out_place, T, n, 1)
            return
        self.stepping = True
        with nogil:
            self.run_all(&x, &y, in_place, out_place, T, n, count)
        self.stepping = False

    cdef void run_all(self, const Steps *x, const Steps *y, bint in_place, bint out_place,
                      Py_ssize_t T, Py_ssize_t longest, int count) noexcept nogil:
        """T steps, `longest` at once; X and Y are read and written where they lie, or by copies."""
        cdef Py_ssize_t B = self.batch, item = self.chain.table.item, at = 0, n, t, b, i
        cdef Stage *first = self.chain.stages
        cdef Stage *last = &self.chain.stages[self.chain.count - 1]
        cdef Stage *s
        cdef char *row
        while at < T:
            n = min(longest, T - at)
            first.block_x = x.data + at * x.time if in_place else self.block_in
            last.block_y = y.data + at * y.time if out_place else self.block_out
            if not in_place:
                copy_steps(x, at, n, B, self.n_in, self.block_in, item == 8)
            for i in range(self.chain.count):
                s = &self.chain.stages[i]
                s.block.steps = n
                s.block.x = s.block_x
                s.block.h = s.block_y
                s.block.h_first = s.forward[self.chain.turn].h_first
            self.chain.steps = n
            recur_parallel(run_block, &self.chain, count, longest_wait(n * self.work))
            for i in range(self.chain.count):
                s = &self.chain.stages[i]
                if s.cell != NULL:
                    memcpy(<void *>s.block.h_first, <char *>s.block_y + (n - 1) * s.size * item,
                           s.size * item)
            if not out_place:
                row = self.block_out
                for t in range(at, at + n):
                    for b in range(B):
                        copy_out(row, item, y.data + b * y.sample + t * y.time, y.feature,
                                 self.n_out)
                        row += self.n_out * item
            at += n

    # Threads.  A short step keeps the GIL, so nobody can look in on it; a long one gives it up.
    # While a thread is inside, nothing that the garbage collector counts is made: what a collection
    # runs may call the model, or read its state, in the same thread, and would wait for itself.

    cdef bint enter(self):
        """Whether no other thread is inside; then this one is, until it sets `inside` to False."""
        cdef bint free
        with cython.critical_section(self):
            free = not self.inside
            self.inside = True
        return free

    cdef int wait(self) except -1:
        """`enter`, once another thread's step is done."""
        while not self.enter():
            time.sleep(1e-5)
        return 0

    cdef void take(self, cnp.ndarray x, int ndim) noexcept:
        cdef Py_ssize_t I = self.n_in, item = self.chain.table.item, b
        cdef Py_ssize_t step = cnp.PyArray_STRIDE(x, 0)
        cdef char *source = <char *>cnp.PyArray_DATA(x)
        cdef bint given = cnp.PyArray_TYPE(x) == cnp.NPY_FLOAT64
        cdef bint wanted = self.typenum == cnp.NPY_FLOAT64
        for b in range(self.batch):
            copy_in(source, step, given, <char *>self.x + b * I * item, wanted, I)
            if ndim == 2:
                source += cnp.PyArray_STRIDE(x, 1)

    cdef void run_step(self) noexcept:
        if self.work < SHORT_WORK:
            recur_parallel(run_chain, &self.chain, 1, 0)
        else:
            self.stepping = True
            with nogil:
                recur_parallel(run_chain, &self.chain, thread_count if self.threaded else 1,
                               longest_wait(self.work))
            self.stepping = False
        self.chain.turn ^= 1

    cdef void give(self, cnp.ndarray y, int ndim) noexcept:
        cdef Stage *last = &self.chain.stages[self.chain.count - 1]
        cdef Py_ssize_t item = self.chain.table.item, R = self.n_out, b
        cdef Py_ssize_t step = cnp.PyArray_STRIDE(y, 0)
        cdef const char *source = <const char *>last.y[self.chain.turn ^ 1]
        cdef char *to = <char *>cnp.PyArray_DATA(y)
        for b in range(self.batch):
            copy_out(source, item, to, step, R)
            source += R * item
            if ndim == 2:
                to += cnp.PyArray_STRIDE(y, 1)

    cdef Py_ssize_t cell_stage(self, Py_ssize_t index) except -1:
        if not 0 <= index < len(self.cell_stages):
            raise IndexError(f"there are {len(self.cell_stages)} states, none of index {index}")
        return self.cell_stages[index]

    cdef tuple empty_state(self, Py_ssize_t index):
        """New arrays for the state of one cell stage."""
        cdef Stage *s = &self.chain.stages[self.cell_stage(index)]
        cdef Py_ssize_t H = s.cell.n_hidden
        cdef object h = empty_2d(self.typenum, self.batch, H)
        if s.cell.kind != RECUR_LSTM:
            return (h,)
        return h, empty_2d(self.typenum, self.batch, H)

    cdef void move(self, Py_ssize_t index, tuple state, bint out) noexcept:
        """Copy a cell stage's present state out into these arrays, or in from them."""
        cdef Stage *s = &self.chain.stages[<Py_ssize_t>self.cell_stages[index]]
        cdef recur_forward *f = &s.forward[self.chain.turn]  # h is the next step's h_first
        cdef Py_ssize_t i
        cdef void *mine
        cdef cnp.ndarray array
        for i in range(len(state)):
            array = state[i]
            mine = <void *>f.h_first if i == 0 else <void *>f.c_first
            if out:
                memcpy(data(array), mine, cnp.PyArray_NBYTES(array))
            else:
                memcpy(mine, data(array), cnp.PyArray_NBYTES(array))

    cdef void leave(self, Py_ssize_t index) noexcept:
        """The state of a cell stage lies elsewhere from now on."""
        self.away += self.here[index]
        self.here[index] = False

    @property
    def complete(self):
        """Whether all states lie here, so that it can step."""
        return self.away == 0

    @property
    def empty(self):
        """Whether all states were taken back."""
        return self.away == len(self.cell_stages)

    def states(self):
        """Copies of each cell stage's state, in stage order: tuples of (B, H) arrays."""
        return self.copies(False)

    def take_states(self):
        """`states()`, which lie elsewhere from now on: no step until they are set again."""
        return self.copies(True)

    cdef tuple copies(self, bint taken):
        cdef Py_ssize_t i, n = len(self.cell_stages)
        cdef tuple states = tuple([self.empty_state(i) for i in range(n)])
        self.wait()
        for i in range(n):
            self.move(i, states[i], True)
            if taken:
                self.leave(i)
        self.inside = False
        return states

    def state(self, index):
        """Copies of the state of the cell stage that is `index`-th among these."""
        return self.copy(index, False)

    def take_state(self, index):
        """`state(index)`, which lies elsewhere from now on: no step until it is set again."""
        return self.copy(index, True)

    cdef tuple copy(self, Py_ssize_t index, bint taken):
        cdef tuple state = self.empty_state(index)
        self.wait()
        self.move(index, state, True)
        if taken:
            self.leave(index)
        self.inside = False
        return state

    def set_state(self, index, state):
        """Copy the arrays (B, H) of one cell stage's state in."""
        state = tuple(state)
        self.check_state(index, state)
        self.wait()
        self.put(index, state)
        self.inside = False

    def set_states(self, states):
        """Copy these in: one tuple of (B, H) arrays for each cell stage.  All or none."""
        states = tuple([tuple(state) for state in states])
        if len(states) != len(self.cell_stages):
            raise ValueError(f"states has {len(states)} tuples, expected {len(self.cell_stages)}")
        cdef Py_ssize_t i
        for i in range(len(self.cell_stages)):
            self.check_state(i, states[i])
        self.wait()
        for i in range(len(self.cell_stages)):
            self.put(i, states[i])
        self.inside = False

    cdef int check_state(self, Py_ssize_t index, tuple state) except -1:
        kernel = self.kernels[self.cell_stage(index)]
        (<CellKernel>kernel).check_state("state", state, self.batch)
        return 0

    cdef void put(self, Py_ssize_t index, tuple state) noexcept:
        self.move(index, state, False)
        self.away -= not self.here[index]
        self.here[index] = True
