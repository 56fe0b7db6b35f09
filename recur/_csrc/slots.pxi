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
