/* Memory for weights, sequences, and the large arrays that NumPy makes inside a scope.

   Training asks for the same large arrays in every window.  Fresh memory costs a page fault and the
   clearing of each page, as much as a tenth of a window, so blocks that were released wait here for
   the next call that fits.  Large blocks ask for huge pages, which spare the kernels most misses of
   the address translation. */
#include "recur.h"

#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define LINE ((size_t)64)
#define PAGE ((size_t)4096)
#define HUGE_PAGE ((size_t)2 << 20)
/* from here on a block is worth a huge page */
#define LARGE ((size_t)1 << 20)
/* from here on a block is worth keeping: malloc may return such to the system at once */
#define KEEPABLE ((size_t)1 << 17)
#define MOST_KEPT ((size_t)512 << 20) /* bytes of all that is kept */

/* lies in the line before the memory that is handed out */
typedef struct {
    void *block; /* what malloc gave */
    size_t size; /* usable */
} header;

static header *header_of(void *memory) { return (header *)((char *)memory - LINE); }

/* `lines` cache lines behind a boundary */
static void *fresh(size_t size, size_t boundary, size_t lines) {
    size_t whole = size + lines * LINE;
    if (boundary == HUGE_PAGE && whole % boundary >= boundary / 2) whole += boundary - whole % boundary;
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

#define KEPT 64

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
    if (size >= KEEPABLE && !atomic_flag_test_and_set_explicit(&taken, memory_order_acquire)) {
        /* the smallest that fits leaves the larger ones to who needs them; of equals the latest, which
           is likeliest to be in a cache */
        size_t least = 2 * size + 1;
        int best = -1;
        for (int i = count - 1; i >= 0; i--) {
            const size_t has = header_of(kept[i])->size;
            if (has >= size && has < least) least = has, best = i;
        }
        if (best >= 0) found = remove_kept(best);
        atomic_flag_clear_explicit(&taken, memory_order_release);
    }
    if (found) return found;
    if (size < KEEPABLE) return fresh(size, LINE, 1);
    /* arrays of one shape, read in step, must not compete for the same lines of a cache */
    static atomic_uint shift;
    const unsigned turn = atomic_fetch_add_explicit(&shift, 1, memory_order_relaxed) % 16;
    return fresh(size, size < LARGE ? PAGE : HUGE_PAGE, 1 + 13 * turn);
}

void recur_release(void *memory) {
    if (!memory) return;
    const size_t size = header_of(memory)->size;
    if (size >= KEEPABLE && size <= MOST_KEPT && !atomic_flag_test_and_set_explicit(&taken, memory_order_acquire)) {
        while (count == KEPT || kept_bytes + size > MOST_KEPT) drop(remove_kept(0));
        kept[count++] = memory;
        kept_bytes += size;
        memory = NULL;
        atomic_flag_clear_explicit(&taken, memory_order_release);
    }
    if (memory) drop(memory);
}

#endif

/* What NumPy calls for the memory of an array (NEP 49).  The origin lies just before that memory: in
   the line of the header above, or alone. */
typedef struct {
    size_t size; /* asked for */
    size_t from_here; /* 0: from malloc */
} origin;

static origin *origin_of(void *memory) { return (origin *)memory - 1; }

static void *with_origin(void *memory, size_t size, size_t from_here) {
    if (!memory) return NULL;
    const origin o = {size, from_here};
    *origin_of(memory) = o;
    return memory;
}

static void *behind_origin(void *block, size_t size) {
    return block ? with_origin((origin *)block + 1, size, 0) : NULL;
}

void *recur_array_malloc(void *context, size_t size) {
    (void)context;
    if (size >= KEEPABLE) return with_origin(recur_allocate(size), size, 1);
    return behind_origin(malloc(size + sizeof(origin)), size);
}

void *recur_array_calloc(void *context, size_t count, size_t item) {
    if (item && count > (SIZE_MAX - sizeof(origin)) / item) return NULL;
    const size_t size = count * item;
    /* larger than what is kept: the system's own zeros, page by page as they are read */
    if (size < KEEPABLE || size > MOST_KEPT) return behind_origin(calloc(1, size + sizeof(origin)), size);
    void *memory = recur_array_malloc(context, size);
    return memory ? memset(memory, 0, size) : NULL;
}

void recur_array_free(void *context, void *memory, size_t size) {
    (void)context;
    (void)size;
    if (!memory) return;
    if (origin_of(memory)->from_here) recur_release(memory);
    else free(origin_of(memory));
}

void *recur_array_realloc(void *context, void *memory, size_t size) {
    if (!memory) return recur_array_malloc(context, size);
    const size_t had = origin_of(memory)->size;
    if (!origin_of(memory)->from_here && size < KEEPABLE)
        return behind_origin(realloc(origin_of(memory), size + sizeof(origin)), size);
    void *moved = recur_array_malloc(context, size);
    if (!moved) return NULL;
    memcpy(moved, memory, had < size ? had : size);
    recur_array_free(context, memory, had);
    return moved;
}
