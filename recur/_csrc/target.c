/* All kernels for one CPU target.  The build compiles this file once for each, with
   RECUR_TARGET        the path's name
   RECUR_VECTOR_BYTES  bytes of a register; 0 where the compiler has no vector extensions
   REGISTERS           how many vector registers there are, which sets the size of the tiles */
#include <string.h>
#include <math.h>

#include "recur.h"

#if RECUR_VECTOR_BYTES >= 32
#include <immintrin.h>
#elif defined(__aarch64__) && RECUR_VECTOR_BYTES
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))
#define PREFETCH(p) __builtin_prefetch(p)
#define PREFETCH_FAR(p) __builtin_prefetch(p, 0, 2) /* to the second cache */
#elif defined(__GNUC__)
#define UNROLL _Pragma("GCC unroll 16") /* else gcc indexes the accumulators and keeps them in memory */
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))
#define PREFETCH(p) __builtin_prefetch(p)
#define PREFETCH_FAR(p) __builtin_prefetch(p, 0, 2) /* to the second cache */
#else
#define UNROLL
#define INLINE static __inline
#define ALIGNED __declspec(align(64))
#define PREFETCH(p) ((void)(p))
#define PREFETCH_FAR(p) ((void)(p))
#endif

/* rows a tile, by vectors a panel: as many accumulators as leave room for the weights and one x */
#if REGISTERS >= 32
#define TILE_ROWS_2 8
#define TILE_ROWS_3 7
#define TILE_ROWS_4 6
#elif RECUR_VECTOR_BYTES >= 32
#define TILE_ROWS_2 6
#define TILE_ROWS_3 4
#define TILE_ROWS_4 3
#else /* no fused multiply-add: the product needs a register, too */
#define TILE_ROWS_2 4
#define TILE_ROWS_3 3
#define TILE_ROWS_4 2
#endif
#define MAX_TILE_ROWS 8

#if RECUR_VECTOR_BYTES
#define LANES_MAX (RECUR_VECTOR_BYTES / 4)
#else
#define LANES_MAX 1
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

/* formats of weights, as the preprocessor compares them: recur_format's, but FULL for both REALs */
#define FULL 0
#define BF16 1
#define F16 2
#define INT8 3

#define REAL double
#define INT int64_t
#define UINT uint64_t
#define IS_DOUBLE 1
#define FORMAT FULL
#define NAME(name) name##_f64
#include "real.h"
#undef REAL
#undef INT
#undef UINT
#undef IS_DOUBLE
#undef FORMAT
#undef NAME

#define REAL float
#define INT int32_t
#define UINT uint32_t
#define IS_DOUBLE 0

#define FORMAT FULL
#define NAME(name) name##_f32
#include "real.h"
#undef FORMAT
#undef NAME

#define FORMAT BF16
#define NAME(name) name##_bf16
#include "real.h"
#undef FORMAT
#undef NAME

#define FORMAT F16
#define NAME(name) name##_f16
#include "real.h"
#undef FORMAT
#undef NAME

#define FORMAT INT8
#define NAME(name) name##_int8
#include "real.h"
