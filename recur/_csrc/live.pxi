# Calls that a Stepper answers, without Python.
#
# The `__call__` of a layer or stream is a Python function, which knows all cases.  Where the state
# lies in a Stepper and nothing is recorded it would hand its one array on and return the answer: so
# C looks first, and goes to the function for all else.  A class that overrides `__call__` is called
# as any other.

ctypedef object (*call_slot)(object, object, PyObject *)

cdef extern from "Python.h":
    Py_ssize_t PyTuple_GET_SIZE(object)
    PyObject *PyTuple_GET_ITEM(object, Py_ssize_t)
    ctypedef struct TypeObject "PyTypeObject":
        call_slot tp_call

cdef call_slot call_in_python      # what Python puts there for a class with a `__call__`
cdef set layer_calls = set()       # the functions that `layer_call` has marked
cdef set stream_calls = set()

# Scopes and transactions that are open, of all threads: 0 says that this thread has none, without
# a look into its thread-local variables.  Read as it is: a thread sees what it wrote itself.
cdef Py_ssize_t open_count = 0
cdef object open_lock = object()


def opened():
    """Says that a scope or transaction was opened: layers look for it until it is `closed`."""
    global open_count
    with cython.critical_section(open_lock):
        open_count += 1


def closed():
    """Says that one of them has ended."""
    global open_count
    with cython.critical_section(open_lock):
        open_count -= 1


def layer_call(call):
    """Marks the `__call__` of a `Live` layer: a Stepper answers `m(x)` outside scopes."""
    layer_calls.add(call)
    return call


def stream_call(call):
    """Marks the `__call__` of a `Live` stream: a Stepper answers `s(x)` and `s(x, out)`."""
    stream_calls.add(call)
    return call


@cython.auto_pickle(False)
cdef class Live:
    """An object whose state may lie in a Stepper, its `_live`, which answers its calls then."""

    cdef object stepper

    @property
    def _live(self):
        return self.holder()

    @_live.setter
    def _live(self, new):
        with cython.critical_section(self):
            self.stepper = new

    cdef object holder(self):
        with cython.critical_section(self):
            return self.stepper


def answer_calls(cls):
    """Lets a Stepper answer the calls of a subclass of `Live`, if its `__call__` is marked."""
    if not issubclass(cls, Live):
        raise TypeError(f"answer_calls: {cls.__name__} is no subclass of Live")
    global call_in_python
    cdef TypeObject *type_object = <TypeObject *><PyObject *>cls
    call = getattr(cls, "__call__", None)
    if call not in layer_calls and call not in stream_calls:
        return
    if type_object.tp_call not in (answer_layer, answer_stream):
        call_in_python = type_object.tp_call
    type_object.tp_call = answer_layer if call in layer_calls else answer_stream


cdef inline Py_ssize_t count(PyObject *named):
    return 0 if named == NULL else len(<dict>named)


cdef object answer_layer(object self, object xs, PyObject *named):
    if open_count == 0 and PyTuple_GET_SIZE(xs) == 1 and count(named) == 0:
        live = (<Live>self).holder()
        if type(live) is Stepper:
            y = (<Stepper>live).step(<object>PyTuple_GET_ITEM(xs, 0), None)
            if y is None:
                y = (<Stepper>live).run_layer(<object>PyTuple_GET_ITEM(xs, 0))
            if y is not None:
                return y
    return call_in_python(self, xs, named)


cdef object answer_stream(object self, object xs, PyObject *named):
    live = (<Live>self).holder()
    if type(live) is Stepper:
        y = stream_answer(live, xs, named)
        if y is not None:
            return y
    return call_in_python(self, xs, named)


cdef object stream_answer(Stepper stepper, object xs, PyObject *named):
    """The answer to (x), (x, out) or (x, out=out), or None."""
    cdef Py_ssize_t given = PyTuple_GET_SIZE(xs), more = count(named)
    cdef object out = None
    if given == 2 and more == 0:
        out = <object>PyTuple_GET_ITEM(xs, 1)
    elif given == 1 and more == 1:
        if "out" not in <dict>named:
            return None
        out = (<dict>named)["out"]
    elif given != 1 or more != 0:
        return None
    cdef object x = <object>PyTuple_GET_ITEM(xs, 0)
    if out is not None and may_overlap(x, out):  # looked into in Python
        return None
    return stepper.step(x, out)


cdef bint may_overlap(object a, object b):
    """Whether the memory of two arrays may have bytes in common."""
    if not (cnp.PyArray_CheckExact(a) and cnp.PyArray_CheckExact(b)):
        return True
    cdef char *first[2]
    cdef char *last[2]
    span(a, &first[0], &last[0])
    span(b, &first[1], &last[1])
    return first[0] < last[1] and first[1] < last[0]


cdef void span(cnp.ndarray a, char **first, char **last) noexcept:
    """The first byte of an array's memory, and the one behind it."""
    cdef Py_ssize_t reach
    cdef int i
    first[0] = last[0] = <char *>cnp.PyArray_DATA(a)
    last[0] += cnp.PyArray_ITEMSIZE(a)
    for i in range(cnp.PyArray_NDIM(a)):
        reach = (cnp.PyArray_DIM(a, i) - 1) * cnp.PyArray_STRIDE(a, i)
        if reach < 0:
            first[0] += reach
        else:
            last[0] += reach
