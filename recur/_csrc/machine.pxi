# The CPU path, the threads, and the way into the pool.

cdef const recur_table *TABLE_F32
cdef const recur_table *TABLE_F64
cdef const recur_table *TABLES[RECUR_FORMATS]
cdef int thread_count = 1


def cpu_paths():
    """The code paths that this machine can run, the best last."""
    return tuple(recur_path_name(i).decode() for i in range(recur_path_count()))


def cpu_path():
    """The path in use: the best, or the one that RECUR_ARCH named at import."""
    return TABLE_F32.name.decode()


def set_num_threads(n):
    """How many threads a large call may use, from now on; the numbers that it gives stay the same.

    A call with too little work for a second thread keeps to one.  After a call that had others
    they look for the next one for up to 0.2 ms, which a loop of calls meets, and then sleep:
    between calls that are further apart nothing runs.  More threads than cores gain nothing.
    NumPy's own products have BLAS's threads.

    Raises ValueError unless n is a whole number of at least 1.
    """
    global thread_count
    if not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"set_num_threads: n is {n!r}, expected a whole number of at least 1")
    thread_count = min(int(n), 64)


def get_num_threads():
    """The number that `set_num_threads` set; at import RECUR_NUM_THREADS, else the cores."""
    return thread_count


cdef void choose_path() except *:
    global TABLE_F32, TABLE_F64
    paths = cpu_paths()
    name = os.environ.get("RECUR_ARCH") or paths[-1]
    if name not in paths:
        raise ImportError(
            f"RECUR_ARCH is {name!r}, expected one that this machine can run: {', '.join(paths)}")
    cdef int path = paths.index(name), i
    for i in range(RECUR_FORMATS):
        TABLES[i] = recur_path_table(path, i)
    TABLE_F32, TABLE_F64 = TABLES[<int>RECUR_F32], TABLES[<int>RECUR_F64]


cdef void choose_threads() except *:
    asked = os.environ.get("RECUR_NUM_THREADS")
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise ImportError(
                f"RECUR_NUM_THREADS is {asked!r}, expected a whole number of at least 1")
        set_num_threads(int(asked))
    elif hasattr(os, "sched_getaffinity"):
        set_num_threads(len(os.sched_getaffinity(0)))
    else:
        set_num_threads(os.cpu_count() or 1)


choose_path()
choose_threads()


# Multiply-adds, of which a thread does 50,000 in a microsecond.  A second thread halves a cell's
# step, and has to gain more than its barrier and what the two cores hand to each other: reading a
# number that another core wrote takes as long as 60 of them, all of this measured on two cores of a
# Sapphire Rapids.  Smaller steps keep to one thread.
cdef Py_ssize_t THREADED_STEP = 500_000
cdef Py_ssize_t HANDED_OVER = 125
# other products
cdef Py_ssize_t THREADED_CALL = 5_000_000
# Waking a thread that sleeps takes 50 to 200 microseconds, and the call waits: a shorter one has
# only those that look for work.
cdef Py_ssize_t WAKING_CALL = 20_000_000


cdef inline int longest_wait(Py_ssize_t work) noexcept nogil:
    """The microseconds that a call may wait for threads that sleep: a tenth of its own; 0: none."""
    return 0 if work < WAKING_CALL else min(work // 500_000, 10_000)


# Below this many multiply-adds a call keeps the GIL: giving it up and taking it back costs more.
cdef Py_ssize_t SHORT_WORK = 50_000


cdef inline void parallel(recur_task task, void *context, int count, Py_ssize_t work):
    if work < SHORT_WORK:
        recur_parallel(task, context, 1, 0)
    else:
        with nogil:
            recur_parallel(task, context, count, longest_wait(work))
