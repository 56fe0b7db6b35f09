/* Memory for weights and sequences.

   Training asks for the same large arrays in every window.  Fresh memory costs a page fault and the
   clearing of each page, as much as a tenth of a window, so blocks that were released wait here for
   the next call that fits.  Large blocks ask for huge pages, which spare the kernels most misses of
   the address translation. */
#include "recur.h"

#include <stdlib.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define LINE ((size_t)64)
#define HUGE_PAGE ((size_t)2 << 20)
/* from here on a block is worth a huge page, and worth keeping */
#define LARGE ((size_t)1 << 20)

/* lies in the line before the memory that is handed out */
typedef struct {
    void *block; /* what malloc gave */
    size_t size; /* usable */
} header;

static header *header_of(void *memory) { return (header *)((char *)memory - LINE); }

/* `lines` cache lines behind a boundary */
static void *fresh(size_t size, size_t boundary, size_t lines) {
    size_t whole = size + lines * LINE;
    if (whole % boundary >= boundary / 2) whole += boundary - whole % boundary;
    void *block = malloc(whole + boundary);
    if (!block) return NULL;
    char *start = (char *)(((uintptr_t)block + boundary - 1) / boundary * boundary);
#if defined(MADV_HUGEPAGE)
    if (boundary == HUGE_PAGE) madvise(start, whole, MADV_HUGEPAGE); /* only advice: may be refused */
#endif
    void *memory = start + lines * LINE;
    header_of(memory)->block = block;
    header_of(memory)->size = whole - lines * LINE;
    return memory;
}

static void drop(void *memory) { free(header_of(memory)->block); }

#if defined(_WIN32) || defined(__SANITIZE_ADDRESS__)

void *recur_allocate(size_t size) { return fresh(size, LINE, 1); }
void recur_release(void *memory) {
    if (memory) drop(memory);
}

#else

#include <stdatomic.h>

#define KEPT 16
#define MOST_KEPT ((size_t)128 << 20) /* bytes of all that is kept */

static void *kept[KEPT]; /* the first `count`, the oldest first */
static int count;
static size_t kept_bytes;
/* Whoever finds it taken does without: nobody waits, and a fork in between does no harm. */
static atomic_flag taken = ATOMIC_FLAG_INIT;

static void *remove_kept(int i) {
    void *memory = kept[i];
    kept_bytes -= header_of(memory)->size;
    count--;
    for (; i < count; i++) kept[i] = kept[i + 1];
    return memory;
}

void *recur_allocate(size_t size) {
    void *found = NULL;
    if (size >= LARGE && !atomic_flag_test_and_set_explicit(&taken, memory_order_acquire)) {
        for (int i = count - 1; i >= 0 && !found; i--) { /* the latest is likeliest to be in a cache */
            const size_t has = header_of(kept[i])->size;
            if (has >= size && has - size <= size) found = remove_kept(i);
        }
        atomic_flag_clear_explicit(&taken, memory_order_release);
    }
    if (found) return found;
    if (size < LARGE) return fresh(size, LINE, 1);
    /* arrays of one shape, read in step, must not compete for the same lines of a cache */
    static atomic_uint shift;
    const unsigned turn = atomic_fetch_add_explicit(&shift, 1, memory_order_relaxed) % 16;
    return fresh(size, HUGE_PAGE, 1 + 13 * turn);
}

void recur_release(void *memory) {
    if (!memory) return;
    const size_t size = header_of(memory)->size;
    if (size >= LARGE && size <= MOST_KEPT && !atomic_flag_test_and_set_explicit(&taken, memory_order_acquire)) {
        while (count == KEPT || kept_bytes + size > MOST_KEPT) drop(remove_kept(0));
        kept[count++] = memory;
        kept_bytes += size;
        memory = NULL;
        atomic_flag_clear_explicit(&taken, memory_order_release);
    }
    if (memory) drop(memory);
}

#endif
