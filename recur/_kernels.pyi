"""The compiled kernels: cells, packed products, gate maths.

Memory. Every array is C-contiguous with features last: x (B, I), h (B, H), a sequence X (T, B, I),
weights (rows, cols). These are the `.T` views of the features-first arrays of the public layers.
One kernel works in one dtype, float32 or float64, and every array given to it has that dtype.
Inputs are read only while the call runs and are never written, unless a line below says so; every
returned array is new and belongs to the caller.

Errors. TypeError for a wrong dtype, ValueError for a wrong shape or layout; nothing was changed.

Numbers. One accumulator an output, in the order bias, Wi in k order, Wh in k order. So a step gives
the same bits for any batch size and any place in the batch, and a sequence gives the same bits as
its steps, with any number of threads. In cells, steppers, affine products and
weight_gradient subnormal numbers count as zero.

Threads. All arithmetic runs without the GIL; kernels are immutable and may be shared by threads. A
Stepper has state and belongs to one thread at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, final

import numpy as np
from numpy.typing import NDArray

Call = TypeVar("Call", bound=Callable[..., Any])
Array: TypeAlias = NDArray[Any]
State: TypeAlias = tuple[Array, ...]
StateGradient: TypeAlias = tuple[Array | None, ...]
Operands: TypeAlias = dict[str, tuple[Any, ...]]
GateName: TypeAlias = Literal["sigmoid", "hard_sigmoid"]
Storage: TypeAlias = Literal["bfloat16", "float16", "int8"]
ActivationName: TypeAlias = Literal["tanh", "relu", "sigmoid", "identity", "hard_sigmoid"]

class CellKernel:
    """What the four cell kernels share.  Not to be constructed itself.

    A kernel is an immutable snapshot of its weights: copied and packed when it is built, so later
    writes to the arrays do not reach it.  The packed form of the backward products is built at the
    first backward, once, under a lock.

    storage  how the matrices of a float32 kernel are held: "bfloat16", "float16", or "int8" with a
             scale for each row.  They are widened in registers; sums are float32, and int8's whole
             numbers are summed before they are scaled and the bias is added.  Such a kernel has no
             backward.  ValueError for a weight that is not finite or too large.  None: as given
    state    tuple of `n_states` arrays (B, H): (h,), and (h, c) for LSTM
    dstate   gradients of a state: the same tuple, where None stands for zeros
    operands the weights' gradients, not yet multiplied out.  name -> one of
             (dg (N, rows), x (N, cols))   the gradient is dg.T @ x
             (dg (N, rows),)               the gradient is dg.sum(0)
             ("dense", array)              the gradient is that array
             N = B for a step, T * B for a sequence.  dg and x may be column slices of a larger
             array (rows of stride 1, any distance between rows); `weight_gradient` and
             `bias_gradient` take them as they are.  They may share memory with `saved`, with x
             and with state: flush them, or copy them, before any of those is written.
    """

    n_in: int
    n_out: int
    n_states: int
    dtype: np.dtype[Any]
    storage: Storage | None
    gradient_names: tuple[str, ...]

    def matrices(self) -> dict[str, Array]:
        """Copies of Wi, Wh and Whh as the packed weights stand for them, in the kernel's dtype."""

    def step(self, x: Array, *state: Array, out: State | None = None) -> State:
        """One step.  x (B, I); returns the next state.

        out  tuple of arrays (B, H) to write instead of new ones; each may be the state's own array
        """

    def step_save(self, x: Array, *state: Array) -> tuple[State, State]:
        """One step, bit for bit as `step`, and what its backward needs: (state', saved).

        saved shares no memory with x, state or state'.
        """

    def step_backward(
        self,
        saved: State,
        x: Array,
        state: State,
        dstate: StateGradient,
        *,
        need_dx: bool,
        keep: bool,
    ) -> tuple[Array | None, State, Operands]:
        """Gradients of one step: (dx or None, gradient of the state before, operands).

        x, state  as they were given to `step_save`
        dstate    gradient of the state after the step (the output's gradient added to that of h)
        keep      False lets the call overwrite `saved`, which is then used up
        """

    def sequence(
        self, X: Array, *state: Array, lengths: Array | None = None
    ) -> tuple[Array, State]:
        """T steps: (Y (T, B, H), last state), bit for bit as the steps.

        lengths  (B,) int64: sample b stops after lengths[b] steps; from there its state stays and
                 its Y is 0
        """

    def sequence_save(
        self, X: Array, *state: Array, lengths: Array | None = None
    ) -> tuple[Array, State, State]:
        """`sequence` and what its backward needs: (Y, last state, saved).

        Without lengths Y is a view of `saved` (the outputs are kept once): it must not be written
        while `saved` is to be used.  The last state is a copy.
        """

    def sequence_backward(
        self,
        saved: State,
        X: Array,
        dY: Array | None,
        dstate: StateGradient,
        *,
        need_dx: bool,
        keep: bool,
        lengths: Array | None = None,
    ) -> tuple[Array | None, State, Operands]:
        """Gradients of T steps: (dX or None, gradient of the first state, operands).

        X, lengths  as they were given to `sequence_save`
        dY          (T, B, H), or None for zeros.  Steps past a sample's length get exactly zero
                    gradient, whatever X and dY hold there
        dstate      gradient of the last state
        keep        False lets the call overwrite `saved`; Y stays intact
        """

@final
class RNNKernel(CellKernel):
    """h' = act(Wi x + Wh h + b).

    Wi (H, I), Wh (H, H), b (H,) or None.  State (h,).  Gradients "Wi", "Wh", "b".
    """

    def __init__(
        self,
        Wi: Array,
        Wh: Array,
        b: Array | None = None,
        *,
        act: Literal["tanh", "relu", "sigmoid", "identity"] = "tanh",
        storage: Storage | None = None,
    ) -> None: ...

@final
class LSTMKernel(CellKernel):
    """g = Wi x + Wh h + b in blocks i, f, n, u;  c' = s(f) c + s(i) tanh(n);  h' = s(u) tanh(c').

    With peephole rows p_i, p_f, p_o: i += p_i c, f += p_f c, u += p_o c' before the gates.
    Wi (4H, I), Wh (4H, H), b (4H,) or None, peephole (3, H) or None.  State (h, c).
    Gradients "Wi", "Wh", "b", "peephole".
    """

    def __init__(
        self,
        Wi: Array,
        Wh: Array,
        b: Array | None = None,
        *,
        peephole: Array | None = None,
        gate: GateName = "sigmoid",
        storage: Storage | None = None,
    ) -> None: ...

@final
class GRUKernel(CellKernel):
    """r, z = s(Wi x + Wh h + b);  n = tanh(Wi_n x + b_n + r (Wh_n h + bh));  h' = (1 - z) n + z h.

    Wi (3H, I), Wh (3H, H), b (3H,) or None in row blocks r, z, n; bh (H,) or None.  State (h,).
    Gradients "Wi", "Wh", "b", "bh".
    """

    def __init__(
        self,
        Wi: Array,
        Wh: Array,
        b: Array | None = None,
        *,
        bh: Array | None = None,
        gate: GateName = "sigmoid",
        storage: Storage | None = None,
    ) -> None: ...

@final
class GRUv3Kernel(CellKernel):
    """r, z = s(Wi x + Wh h + b);  n = tanh(Wi_n x + b_n + Whh (r h));  h' = (1 - z) n + z h.

    Wi (3H, I), Wh (2H, H), b (3H,) or None, Whh (H, H).  State (h,).
    Gradients "Wi", "Wh", "b", "Whh".
    """

    def __init__(
        self,
        Wi: Array,
        Wh: Array,
        b: Array | None = None,
        *,
        Whh: Array,
        gate: GateName = "sigmoid",
        storage: Storage | None = None,
    ) -> None: ...

@final
class AffineKernel:
    """y = W x + b on packed weights: W (R, I), b (R,) or None.  An immutable snapshot, as cells."""

    n_in: int
    n_out: int
    dtype: np.dtype[Any]
    storage: Storage | None

    def __init__(
        self, W: Array, b: Array | None = None, *, storage: Storage | None = None
    ) -> None: ...
    def matrices(self) -> dict[str, Array]:
        """A copy of W as the packed weights stand for it."""

    def apply(self, x: Array, out: Array | None = None) -> Array:
        """x (N, I) -> (N, R), the same bits for any N.  out must not overlap x."""

    def backward_x(self, dy: Array) -> Array:
        """dy (N, R) -> dy @ W, (N, I), the same bits for any N.

        The transpose is packed at the first call, once, under a lock.  ValueError with `storage`.
        """

@final
class Version:
    """A counter that an owner of weights raises at each write, and that a Stepper reads in C."""

    count: int

    def __init__(self, count: int = 0) -> None: ...
    def bump(self) -> None:
        """Add one."""

@final
class Stepper:
    """A chain of kernels stepped by one call, with its recurrent state inside.

    stages   cell kernels, AffineKernels and activation names, all of one dtype, sizes chained
    batch    B, fixed for the life of the stepper; the state starts at zeros
    watch    Version counters of everything that the kernels are snapshots of
    named    dicts that name the stages, with lists of the values that they held

    Threads may share it: one at a time is inside, and whoever reads or writes a state waits.

    steps     how many steps it has taken
    stepping  whether a thread is in a step that has given up the GIL
    """

    steps: int
    stepping: bool

    batch: int
    n_in: int
    n_out: int
    dtype: np.dtype[Any]
    kernels: tuple[CellKernel | AffineKernel | ActivationName, ...]

    def __init__(
        self,
        stages: Sequence[CellKernel | AffineKernel | ActivationName],
        batch: int,
        *,
        watch: Sequence[Version] = (),
        named: Sequence[tuple[dict[str, Any], list[Any]]] = (),
    ) -> None: ...
    @property
    def fresh(self) -> bool:
        """False once a watched counter moved, or another layer stands under a name: build anew."""

    @property
    def complete(self) -> bool:
        """Whether all states lie here, so that it can step."""

    @property
    def empty(self) -> bool:
        """Whether all states were taken."""

    def __call__(self, x: Array, out: Array | None = None) -> Array | None:
        """One step, features first: x (I,) -> (R,) when batch is 1, or x (I, B) -> (R, B).

        x is a float32 or float64 array (converted) of any strides.  The answer is a new array of
        the stepper's dtype, whose `.T` is C-contiguous, or goes into `out`, an array of that dtype
        and of the answer's shape, of any strides, which may be x.  With `out` nothing is allocated.

        Returns None, and changes nothing, on any other x or out, on a number that only float64
        holds, once the stepper is not `fresh`, while a state is taken, and while another thread is
        inside: take the general path then.
        """

    def run(self, X: Array, out: Array | None = None) -> Array | None:
        """T steps: X (I, T) when batch is 1, or (I, B, T) -> (R, T) or (R, B, T), as one by one.

        X and out as in `__call__`.  The first call allocates memory for the results in between, of
        at most 256 steps.  None, and nothing changed, where a step would give None, and if the
        memory of X and out may overlap.
        """

    def states(self) -> tuple[State, ...]:
        """Copies of the state of each cell stage, in stage order: tuples of (B, H) arrays."""

    def state(self, index: int) -> State:
        """Copies of the state of one cell stage, the `index`-th of these."""

    def take_state(self, index: int) -> State:
        """`state(index)`, which lies elsewhere from now on: no step until it is set again."""

    def take_states(self) -> tuple[State, ...]:
        """`states()`, which lie elsewhere from now on: no step until they are set again."""

    def set_state(self, index: int, state: Sequence[Array]) -> None:
        """Copy the arrays (B, H) in as the state of one cell stage, the `index`-th of these."""

    def set_states(self, states: Sequence[State]) -> None:
        """Copy these in: one tuple of (B, H) arrays for each cell stage."""

class Live:
    """An object whose state may lie in a Stepper, its `_live`, which answers its calls then.

    In a subclass that `answer_calls` was told of, and whose `__call__` is marked, C looks at each
    call before Python does.
    """

    _live: Any

def layer_call(call: Call) -> Call:
    """Marks the `__call__` of a `Live` layer: a Stepper answers `m(x)` while nothing is open."""

def stream_call(call: Call) -> Call:
    """Marks the `__call__` of a `Live` stream: a Stepper answers `s(x)` and `s(x, out)`."""

def answer_calls(cls: type) -> None:
    """Lets a Stepper answer the calls of a subclass of `Live`, if its `__call__` is marked."""

def opened() -> None:
    """Says that a scope or transaction was opened, in any thread: layers look until `closed`."""

def closed() -> None:
    """Says that one of them has ended."""

next_seq: Callable[[], int]

class Operation:
    """An operation as a walk sees it: a name, and how gradients go through it.

    lasting  a node of such an operation is never used up
    """

    name: str
    lasting: ClassVar[bool]

    def __init__(self, name: str) -> None: ...
    def backward(self, walk: Any, node: Node, grads: dict[int, Array]) -> None:
        """Gets the gradients of the node's outputs, by index, and hands on those of its inputs."""

@final
class Node:
    """One recorded operation.

    seq     rises with every node: the order of creation is a topological order
    op      what its backward is; None once a sweep has used the node up
    inputs  a Tensor or Param where gradient may flow, None elsewhere; None once used up
    saved   what the operation's backward needs
    tape    the scope that it was recorded in
    A chain of any length is freed without recursion.
    """

    seq: int
    op: Operation | None
    inputs: tuple[Any, ...] | None
    saved: Any
    tape: Any

    def __init__(self, op: Operation, inputs: tuple[Any, ...], saved: Any, tape: Any) -> None: ...

class Recorded:
    """A value and the node that made it; `index` says which of the node's outputs it is."""

    _value: Array
    node: Node | None
    index: int

    def __init__(self, array: Array, node: Node | None, index: int = 0) -> None: ...

@final
class Slot:
    """What a walk knows of one output or leaf: its gradient so far, and posts not multiplied out.

    like   the value whose gradient this is: its shape and dtype
    owned  whether nobody else holds `grad`.  A first gradient is borrowed: the next one that comes
           is added into memory of the slot's own
    """

    like: Array
    grad: Array | None
    owned: bool

    def add(self, grad: Array, *, own: bool) -> None:
        """Adds to the gradient."""

class Walk:
    """The way back from a loss: which node comes next, and what gradient has reached it.

    A subclass gives `multiply_out(slot, posts)`, and `refuse(node)` and `check_thread(node)`, which
    raise: the one always, the other if the node's scope is open in another thread.
    """

    keep_graph: bool
    leaves: dict[Any, Slot]
    found: dict[tuple[Node, int], Array]

    def __init__(
        self,
        tape: Any,
        leaf_op: Operation,
        keep_graph: bool,
        wanted: set[tuple[Node, int]],
        rows_per_flush: int,
    ) -> None: ...
    def walk(self) -> None:
        """Visits the nodes that gradient has reached, the last made first; flushes the leaves."""

    def add(self, x: Recorded | None, grad: Array, *, own: bool = False) -> None:
        """Adds `grad` to what `x` gets.  `own` says that nobody else holds the array.

        A None (an input that takes no gradient) is passed over.
        """

    def buffer(self, x: Recorded) -> Array:
        """The gradient of `x` so far, as an array of zeros at first, to be added to in place."""

    def post(self, x: Recorded | None, dg: Array, by: Array | None = None) -> None:
        """Leaves `dg.T @ by` (without `by`: `dg.sum(0)`) to be added to what `x` gets.

        `dg` is (N, rows), `by` (N, columns), both C-contiguous, both unchanged until the walk ends.
        """

    def flush(self, slot: Slot) -> Array:
        """Multiplies the posts out, one product for all, and returns the gradient."""

@final
class GetItem(Operation):
    """x[key].  The gradient is added in place into one buffer of the source."""

    def record_view(self, x: Any, key: Any, tape: Any, kind: type) -> Any:
        """x[key] as a Tensor of type `kind`, if x is one and the key is of whole numbers, slices,
        None and `...`, with an axis left over; else None."""

@final
class Stack(Operation):
    """Arrays joined along a new axis."""

    def record_steps(self, xs: list[Any], tape: Any, kind: type) -> Any:
        """The joined Tensor, new axis last, if all are Tensors of one float type and shape that lie
        features first; else None."""

@final
class StepOp(Operation):
    """One step of a cell.  Outputs: the parts of the state, then for a vector x the output y."""

def record_step(
    op: StepOp, packed: Any, x: Any, state: tuple[Any, ...], tape: Any, kind: type
) -> tuple[tuple[Any, ...], Any]:
    """One step as one node of `tape`: (parts of the next state, y), Tensors of type `kind`.

    packed  has the `kernel`, and in `weights` what takes their gradient
    x       (I,) or (I, B), and each part of state (H, B): Tensors, or arrays that nobody writes
    """

def quick_step(
    op: StepOp, packed: Any, x: Any, state: tuple[Any, ...], tape: Any, kind: type
) -> tuple[tuple[Any, ...], Any] | None:
    """`record_step` if x and the state's h are Tensors of this tape or arrays, and fit; or None.

    A plain x of any real numbers is copied: the caller may write into his own.
    """

def weight_gradient(dg: Array, x: Array, out: Array, *, accumulate: bool) -> None:
    """out (rows, cols) = dg.T @ x, or += if accumulate.  dg (N, rows), x (N, cols).

    accumulate=False never reads out.  dg and x may be column slices.  N = 0 gives zeros.
    """

def bias_gradient(dg: Array, out: Array, *, accumulate: bool) -> None:
    """out (rows,) = dg.sum(0), or += if accumulate.  dg (N, rows) may be a column slice."""

def affine_forward(W: Array, x: Array, b: Array | None = None) -> Array:
    """x (N, I) -> x @ W.T + b, (N, R), bit for bit as an AffineKernel: W (R, I), b (R,).

    For many rows, over which packing W in the caches costs little, and nothing is to be kept.
    """

def affine_backward_x(W: Array, dy: Array) -> Array:
    """dy (N, R) -> dy @ W, (N, I), bit for bit as an AffineKernel: W (R, I)."""

def softmax_cross_entropy(
    logits: Array, target: Array, *, weights: Array | None = None
) -> tuple[Array, Array]:
    """loss_n = -w_n sum_c target_nc log softmax(logits)_nc, and dloss_n/dlogits (N, C).

    logits   (N, C)
    target   int64 (N,), each in [0, C) (ValueError otherwise; a row of weight 0 is exempt), or
             (N, C) in the dtype of logits
    weights  (N,) in the dtype of logits, or None for ones; a row of weight 0 gives exact zeros
    """

def embedding_gather(table: Array, index: Array, out: Array | None = None) -> Array:
    """table (V, F), index int64 (N,), each in [0, V) (ValueError) -> (N, F)."""

def embedding_scatter_add(dY: Array, index: Array, out: Array, *, accumulate: bool) -> None:
    """out (V, F) at index[n] += dY[n], in order of n.  accumulate=False zeroes out first."""

def gather_rows(blocks: tuple[Array, ...], starts: Array, index: Array, out: Array) -> Array:
    """out[i] = row index[i] of the blocks laid end to end; returns out.

    blocks  up to 64 arrays (m, ...) like out, whose rows are contiguous, and any distance apart
    starts  int64: the first row of each block, 0, m0, m0 + m1, ... (ValueError)
    index   int64 (n,), in range (ValueError)
    out     (n, ...) of any dtype; shares no memory with the blocks
    """

def scatter_rows(blocks: tuple[Array, ...], starts: Array, index: Array, rows: Array) -> None:
    """Row index[i] of the blocks = rows[i], in order of i; arguments as for `gather_rows`."""

NOTE: np.dtype[Any]
"""What a pool notes of every stream: step int64, digest uint64, time float64, answered bool."""

def mark_rows(
    blocks: tuple[Array, ...],
    starts: Array,
    index: Array,
    now: float,
    digests: Array | None = None,
) -> None:
    """Notes of a step: step += 1, digest (0 without digests, (n,) uint64), time = now, answered.

    blocks  as for `gather_rows`, of records NOTE
    """

@final
class SlotStepper:
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

    kernels: tuple[CellKernel | AffineKernel | ActivationName, ...]

    def __init__(
        self,
        kernels: Sequence[CellKernel | AffineKernel | ActivationName],
        starts: Array,
        states: tuple[tuple[Array, ...], ...],
        answers: tuple[Array, ...],
        notes: tuple[Array, ...],
        most: int,
        *,
        watch: Sequence[Version] = (),
        named: Sequence[tuple[dict[str, Any], list[Any]]] = (),
    ) -> None: ...
    @property
    def fresh(self) -> bool:
        """False once a watched counter moved, or another layer stands under a name: build anew."""

    def step(
        self,
        index: Array,
        x: Any,
        clock: Callable[[], float],
        digests: Array | None = None,
        out: Array | None = None,
    ) -> Array | None:
        """One step of the slots index (n,) int64, without repeats: answers (R, n), new or `out`.

        x      (I, n), or (I,) for one slot, float32 or float64, of any strides
        clock  gives the time that is noted; called right before the step

        The blocks of answers and notes are written, too, the notes as by `mark_rows`.  Returns None
        and changes nothing on any other x or out, on a number that only float64 holds, where their
        memory may overlap, when it is not `fresh`, and while another thread is inside.  ValueError
        for an index out of range.
        """

def hash_rows(rows: Array) -> Array:
    """A hash of each row's bytes, never 0: rows (n, ...) of any dtype -> (n,) uint64.

    Of the row's 32-bit words w_j (the last filled up with zeros; at least one) and the odd numbers
    o_j = j * 9E3779B97F4A7C15 | 1 (j from 1): m_j = (w_j + 1) o_j; the sum of
    (m_j ^ m_j >> 29) * BF58476D1CE4E5B9, all modulo 2**64, exclusive-or its upper half, with bit 0
    set.
    """

def arrays_from_here() -> object | None:
    """Lets the large arrays that this context makes lie on memory that earlier ones gave back.

    What comes back is for `arrays_from`: the handler that was there, or None if that is not NumPy's
    own, which then stays.
    """

def arrays_from(before: object | None) -> None:
    """Undoes `arrays_from_here`, which returned `before`."""

def new_vector(n: int, dtype: Any) -> Array:
    """A new array (n,); large ones on huge pages, at changing places within a page.

    For what an optimiser reads side by side: parameters, gradients, its states.
    """

def sum_of_squares(a: Array) -> float:
    """The sum of a_i^2: a (n,).  Squares are formed in the dtype of a, and may overflow there."""

def descent_update(x: Array, g: Array, *, rate: float, scale: float = 1) -> None:
    """x -= rate scale g, in place: x, g (n,), not overlapping.  Subnormals are kept."""

def momentum_update(
    x: Array, g: Array, velocity: Array, *, rate: float, rho: float, scale: float = 1
) -> None:
    """velocity = rho velocity + rate scale g;  x -= velocity, in place: all (n,)."""

def adam_update(
    x: Array,
    g: Array,
    mean: Array,
    square: Array,
    *,
    rate: float,
    beta: tuple[float, float],
    correction: float,
    epsilon: float,
    decay: float = 0,
    scale: float = 1,
) -> None:
    """Adam's step in place, with d = scale g; all arrays (n,), not overlapping.

    mean = beta1 mean + (1 - beta1) d;  square = beta2 square + (1 - beta2) d^2;
    x -= rate mean / (sqrt(correction square) + epsilon) + decay x.
    Each operation is rounded once, in the arrays' dtype.  Subnormals are kept.
    """

def exp(x: Array, out: Array | None = None) -> Array:
    """e**x elementwise, within 4 ulp.  Any shape; out may be x.  Subnormal results are kept."""

def tanh(x: Array, out: Array | None = None) -> Array:
    """tanh x elementwise, within 4 ulp.  Any shape; out may be x.  Subnormals are kept."""

def sigmoid(x: Array, out: Array | None = None) -> Array:
    """1 / (1 + e**-x) elementwise, within 4 ulp.  Any shape; out may be x.  Subnormals are kept."""

def cpu_paths() -> tuple[str, ...]:
    """The code paths this machine can run, best last: of plain, baseline, neon, avx2, avx512."""

def cpu_path() -> str:
    """The path in use: the best, or the one that RECUR_ARCH named at import."""

def set_num_threads(n: int) -> None:
    """How many threads a large call may use, from now on; no result depends on it.

    Between calls they look for the next one for up to 0.2 ms, then sleep.  ValueError on n < 1.
    """

def get_num_threads() -> int:
    """The number that `set_num_threads` set."""
