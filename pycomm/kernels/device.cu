// Arithmetic on device memory: reductions, products, and casts to narrow formats with error feedback.
//
// Compiled by NVRTC for the device at hand, and by a C++ compiler for tests on the host, so it needs
// no header and no intrinsic but those of CUDA C itself. Every kernel takes any number of threads,
// touches 16 bytes of values at a time where all of its pointers are aligned (of complex numbers one
// number), and needs no barrier: what the threads of a block have to agree on goes through atomics.
//
// Rounding is to nearest even everywhere; contraction into fused multiply-adds is switched off, so
// that results have the same bits as on hosts.

#include "numbers.cuh"
#include "arithmetic.cuh"
#include "encoding.cuh"
