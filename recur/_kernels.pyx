# cython: freethreading_compatible=True
"""The compiled kernels: cells, packed products, gate maths.  The stub file states the contract of
each; the arithmetic is in _csrc/, where recur.h is the place to begin.

This module checks arguments, owns memory and calls C.  It keeps no state but the choice of the CPU
path, the number of threads, and buffers kept for reuse.
"""

import itertools
import os
import threading
import time

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from libc.math cimport isfinite
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cnp.import_array()

include "_csrc/interface.pxi"
include "_csrc/machine.pxi"
include "_csrc/memory.pxi"
include "_csrc/products.pxi"
include "_csrc/cells.pxi"
include "_csrc/stepper.pxi"
include "_csrc/live.pxi"
include "_csrc/rows.pxi"
include "_csrc/slots.pxi"
include "_csrc/updates.pxi"
include "_csrc/tape.pxi"
include "_csrc/recorded.pxi"
