"""Print the CPU paths of the installed recur that this machine can run, for RECUR_ARCH."""

from recur import _kernels

print(*_kernels.cpu_paths())
