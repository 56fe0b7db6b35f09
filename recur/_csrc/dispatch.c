/* Which paths this machine can run, the layouts of a cell's matrices, and the control word. */
#include "recur.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif
#ifdef HAVE_avx2
#include <cpuid.h>
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

/* RECUR_TARGETS(X): one X(path) for each object that was built, best last; the build defines
   HAVE_<path> for each */
#ifdef HAVE_baseline
#define IF_baseline(X) X(baseline)
#else
#define IF_baseline(X)
#endif
#ifdef HAVE_avx2
#define IF_avx2(X) X(avx2)
#else
#define IF_avx2(X)
#endif
#ifdef HAVE_avx512
#define IF_avx512(X) X(avx512)
#else
#define IF_avx512(X)
#endif
#ifdef HAVE_neon
#define IF_neon(X) X(neon)
#else
#define IF_neon(X)
#endif
#define RECUR_TARGETS(X) X(plain) IF_baseline(X) IF_neon(X) IF_avx2(X) IF_avx512(X)

#define DECLARE(path)                                                                  \
    extern const recur_table recur_table__f32_##path, recur_table__f64_##path,         \
        recur_table__bf16_##path, recur_table__f16_##path, recur_table__int8_##path;
RECUR_TARGETS(DECLARE)

static int can_run_plain(void) { return 1; }
#ifdef HAVE_baseline
static int can_run_baseline(void) { return 1; }
#endif
#ifdef HAVE_neon
static int can_run_neon(void) { return 1; }
#endif
#ifdef HAVE_avx2
static int has_f16c(void) { /* not every compiler that this builds with knows its name */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
static int can_run_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
#endif
#ifdef HAVE_avx512
static int can_run_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
#endif

static const struct {
    int (*can_run)(void);
    const recur_table *tables[RECUR_FORMATS];
} paths[] = {
#define ROW(path)                                                              \
    {can_run_##path,                                                           \
     {[RECUR_F32] = &recur_table__f32_##path, [RECUR_F64] = &recur_table__f64_##path, \
      [RECUR_BF16] = &recur_table__bf16_##path, [RECUR_F16] = &recur_table__f16_##path, \
      [RECUR_INT8] = &recur_table__int8_##path}},
    RECUR_TARGETS(ROW)
};

int recur_path_count(void) {
    int count = 0;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) count += paths[i].can_run() != 0;
    return count;
}

const recur_table *recur_path_table(int path, int format) {
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (paths[i].can_run() && path-- == 0) return paths[i].tables[format];
    return NULL;
}

const char *recur_path_name(int path) { return recur_path_table(path, RECUR_F32)->name; }

recur_layout recur_input_layout(int kind, ptrdiff_t n_in, ptrdiff_t n_hidden) {
    const int gates = kind == RECUR_LSTM ? 4 : kind == RECUR_RNN ? 1 : 3;
    const recur_layout m = {gates, gates == 1 ? 2 : 1, n_hidden, n_in};
    return m;
}

recur_layout recur_hidden_layout(int kind, ptrdiff_t n_hidden) {
    recur_layout m = recur_input_layout(kind, n_hidden, n_hidden);
    if (kind == RECUR_GRUV3) m.gates = 2;
    return m;
}

recur_layout recur_hidden_back_layout(int kind, ptrdiff_t n_hidden) {
    return recur_plain_layout(n_hidden, recur_hidden_layout(kind, n_hidden).gates * n_hidden);
}

recur_layout recur_plain_layout(ptrdiff_t rows, ptrdiff_t depth) {
    const recur_layout m = {1, 2, rows, depth};
    return m;
}

#if defined(__x86_64__) || defined(_M_X64)
unsigned recur_flush_subnormals(void) {
    const unsigned word = _mm_getcsr();
    _mm_setcsr(word | 0x8040); /* flush results to zero, read subnormals as zero */
    return word;
}
void recur_restore_control(unsigned word) {
    /* exception flags raised meanwhile are dropped: the kernels report nothing through them */
    _mm_setcsr(word);
}
#elif defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__)
unsigned recur_flush_subnormals(void) {
    const unsigned word = __builtin_aarch64_get_fpcr();
    __builtin_aarch64_set_fpcr(word | 1u << 24);
    return word;
}
void recur_restore_control(unsigned word) { __builtin_aarch64_set_fpcr(word); }
#elif defined(__aarch64__) && defined(__clang__)
unsigned recur_flush_subnormals(void) {
    const unsigned word = (unsigned)__builtin_arm_rsr64("fpcr");
    __builtin_arm_wsr64("fpcr", word | 1u << 24);
    return word;
}
void recur_restore_control(unsigned word) { __builtin_arm_wsr64("fpcr", word); }
#else
unsigned recur_flush_subnormals(void) { return 0; }
void recur_restore_control(unsigned word) { (void)word; }
#endif
