/* A small thread pool: one job at a time, workers started when first needed.

   Waking a thread that sleeps takes as long as a step of a middle-sized cell, tens of microseconds,
   more where a core that has nothing to do is given back to a hypervisor.  So whoever waits, a worker
   for its next job, the caller for the last worker, a thread at a barrier for the others, looks for a
   short, bounded time before it sleeps, and whom it waits for makes a system call only if it sleeps.
   The looking one soon offers its turn at each look, to a thread that has no core of its own; where
   there are more threads than cores it does so at once, a few times, and sleeps.  A job too short for
   a thread to be woken has those that look, and the second in a row of such jobs calls the others for
   the next.

   Threads that other processes keep from their cores would be waited for at every barrier.  So a job
   begins with the workers that have come within a part of its time, and after one that spent much of
   its time asleep, or some in a row for which workers came too late, jobs are for one thread, for ten
   times as long as it took.  A worker that was called too late looks longer for the next job.

   A second caller, or a job that asks for one thread, runs in its own thread alone.  After a fork
   the child has no workers and starts its own.  Where there are no POSIX threads every job has one
   thread. */
#if defined(__linux__)
#define _GNU_SOURCE /* affinities */
#endif
#include "recur.h"

#if defined(_WIN32)

void recur_barrier(void *barrier) { (void)barrier; }

void recur_parallel(recur_task task, void *context, int count, int wait) {
    const unsigned word = recur_flush_subnormals();
    (void)count;
    (void)wait;
    task(context, 0, 1, NULL);
    recur_restore_control(word);
}

#else

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__) && defined(__GLIBC__)
#define HAS_AFFINITY 1
#else
#define HAS_AFFINITY 0
#endif

#define MOST_WORKERS 63
/* nanoseconds that a thread looks before it sleeps, and after which it offers its turn at each look:
   calls in a loop and the products of a window follow each other within some tens of microseconds */
#define PATIENCE 200000
#define OWN_TURN 20000
#define LOOKS 32 /* between two readings of the clock */
#define OTHERS_TURNS 16
#define MOST_LATE 3 /* jobs in a row for which a worker came too late */

/* A thread that has slept is told so under the pool's lock; `state` says whether it has to be told. */
enum { LOOKING, ASLEEP, POSTED, COME, GO };

typedef struct {
    atomic_uint state;
    int id;              /* of this job's threads */
#if HAS_AFFINITY
    int displaced;       /* it is kept from a core until it runs, and then has all of the mask */
    cpu_set_t mask;
#endif
    pthread_t thread;
    pthread_cond_t told;
    char apart[128]; /* neighbours look at their own cache line */
} worker;

typedef struct {
    unsigned count;
    atomic_uint arrived, round, asleep;
    pthread_cond_t passed;
} barrier_state;

static struct {
    pthread_mutex_t lock;   /* held by whoever goes to sleep, and to tell who sleeps */
    pthread_cond_t done;
    atomic_uint busy;       /* a caller has the pool; what has no lock of its own is the caller's */
    int started;            /* workers */
    int cores, here;        /* here: the one that the caller was on when it posted the job */
    int64_t rest;           /* until when jobs are for one thread */
    int late;               /* jobs in a row that have begun without a worker they had called */
    atomic_llong slept;     /* nanoseconds, by all threads of this job */
    int64_t missed;         /* when a job ended for which nobody was woken */
    int64_t patience;       /* of this job's threads */
    atomic_uint running;    /* workers that have not finished, + CALLER_SLEEPS */
    recur_task task;
    void *context;
    barrier_state barrier;
    worker workers[MOST_WORKERS];
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};
#define CALLER_SLEEPS 256u

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether *word, which was `before`, has changed; looks for `patience` nanoseconds.  0: for as many
   turns of other threads as may bring the one that is waited for. */
static int has_changed(atomic_uint *word, unsigned before, int64_t patience) {
    int64_t begun = 0;
    for (int turns = 0; patience == 0; turns++) {
        if (atomic_load_explicit(word, memory_order_acquire) != before) return 1;
        if (turns == OTHERS_TURNS) return 0;
        sched_yield();
    }
    for (unsigned looks = 1;; looks++) {
        if (atomic_load_explicit(word, memory_order_acquire) != before) return 1;
        pause_briefly();
        if (looks % LOOKS) continue;
        const int64_t now = nanoseconds();
        if (!begun) begun = now;
        if (now - begun > patience) return 0;
        if (now - begun > OWN_TURN) sched_yield();
    }
}

void recur_barrier(void *context) {
    barrier_state *b = context;
    if (!b) return;
    const unsigned round = atomic_load_explicit(&b->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&b->arrived, 1, memory_order_acq_rel) == b->count - 1) {
        atomic_store_explicit(&b->arrived, 0, memory_order_relaxed);
        atomic_store(&b->round, round + 1); /* in one order with `asleep`, here and below */
        if (atomic_load(&b->asleep)) {
            pthread_mutex_lock(&pool.lock);
            pthread_mutex_unlock(&pool.lock);
            pthread_cond_broadcast(&b->passed);
        }
        return;
    }
    if (has_changed(&b->round, round, pool.patience)) return;
    const int64_t asleep_from = nanoseconds();
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&b->asleep, 1);
    while (atomic_load(&b->round) == round) pthread_cond_wait(&b->passed, &pool.lock);
    atomic_fetch_sub(&b->asleep, 1);
    pthread_mutex_unlock(&pool.lock);
    atomic_fetch_add_explicit(&pool.slept, nanoseconds() - asleep_from, memory_order_relaxed);
}

static void run_flushed(recur_task task, void *context, int id, int count, barrier_state *barrier) {
    const unsigned word = recur_flush_subnormals();
    task(context, id, count, count > 1 ? barrier : NULL);
    recur_restore_control(word);
}

/* A core that is halted in a virtual machine passes for a busy one, and the scheduler then puts the
   thread that is woken, or begins, behind the one that does it.  So a worker is sent to the other cores
   first; once it runs, it may go anywhere again. */
#if HAS_AFFINITY
static int other_cores(worker *w, cpu_set_t *others) {
    const int here = sched_getcpu();
    w->displaced = 0;
    if (here < 0 || pthread_getaffinity_np(pthread_self(), sizeof *others, others)) return 0;
    w->mask = *others;
    CPU_CLR(here, others);
    return CPU_COUNT(others) > 0;
}

static void displace(worker *w, pthread_t thread) {
    cpu_set_t others;
    if (other_cores(w, &others)) w->displaced = !pthread_setaffinity_np(thread, sizeof others, &others);
}

static void displace_new(worker *w, pthread_attr_t *attributes) {
    cpu_set_t others;
    if (other_cores(w, &others)) w->displaced = !pthread_attr_setaffinity_np(attributes, sizeof others, &others);
}

static void settle(worker *self) {
    if (self->displaced) pthread_setaffinity_np(pthread_self(), sizeof self->mask, &self->mask);
    self->displaced = 0;
}

/* off the core that the caller works on: two that look at each other there would not be parted soon */
static void step_aside(worker *self) {
    if (pool.patience == 0 || sched_getcpu() != pool.here) return;
    displace(self, pthread_self());
    settle(self);
}

static int this_core(void) { return sched_getcpu(); }
#else
static void displace(worker *w, pthread_t thread) { (void)w, (void)thread; }
static void displace_new(worker *w, pthread_attr_t *attributes) { (void)w, (void)attributes; }
static void settle(worker *self) { (void)self; }
static void step_aside(worker *self) { (void)self; }
static int this_core(void) { return -1; }
#endif

/* by the caller: the worker sleeps */
static void tell(worker *w, unsigned state) {
    displace(w, w->thread);
    atomic_store(&w->state, state);
    pthread_mutex_lock(&pool.lock); /* by then it waits for the signal, or has seen the state */
    pthread_mutex_unlock(&pool.lock);
    pthread_cond_signal(&w->told);
}

static void wait_for_job(worker *self, int64_t patience) {
    while (!has_changed(&self->state, LOOKING, patience)) {
        unsigned state = LOOKING;
        if (!atomic_compare_exchange_strong(&self->state, &state, ASLEEP)) return;
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&self->state) == ASLEEP) pthread_cond_wait(&self->told, &pool.lock);
        pthread_mutex_unlock(&pool.lock);
        settle(self);
        patience = 10 * PATIENCE; /* if it was called for the job after the one that runs */
    }
}

static void *work(void *argument) {
    worker *self = argument;
    int64_t patience = PATIENCE;
    settle(self);
    for (;;) {
        wait_for_job(self, patience);
        unsigned posted = POSTED;
        if (!atomic_compare_exchange_strong(&self->state, &posted, COME)) { /* too late */
            patience = 10 * PATIENCE;
            continue;
        }
        while (!has_changed(&self->state, COME, PATIENCE)) continue;
        atomic_store_explicit(&self->state, LOOKING, memory_order_relaxed);
        patience = pool.patience;
        step_aside(self);
        run_flushed(pool.task, pool.context, self->id, (int)pool.barrier.count, &pool.barrier);
        /* the caller may return, and post the next job, from here on */
        if (atomic_fetch_sub(&pool.running, 1) == CALLER_SLEEPS + 1) {
            pthread_mutex_lock(&pool.lock);
            pthread_mutex_unlock(&pool.lock);
            pthread_cond_signal(&pool.done);
        }
    }
    return NULL;
}

static void forget_workers(void) { /* in the child of a fork; another thread's job may be under way */
    static const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pool.lock = mutex;
    pool.started = 0;
    atomic_store(&pool.busy, 0);
}

static int count_cores(void) {
#if defined(__linux__)
    cpu_set_t mine;
    if (sched_getaffinity(0, sizeof mine, &mine) == 0) return CPU_COUNT(&mine);
#endif
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

static void start_workers(int wanted) { /* by the caller that has the pool; as many as the system grants */
    static const pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    static int registered;
    if (!registered) {
        pthread_atfork(NULL, NULL, forget_workers);
        registered = 1;
    }
    if (pool.started == 0) {
        pool.cores = count_cores();
        pool.done = pool.barrier.passed = condition;
        atomic_store(&pool.barrier.arrived, 0);
        atomic_store(&pool.barrier.asleep, 0);
    }
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.started < wanted) {
        worker *next = &pool.workers[pool.started];
        next->told = condition;
        displace_new(next, &attributes);
        atomic_store(&next->state, LOOKING);
        if (pthread_create(&next->thread, &attributes, work, next)) break;
        pool.started++;
    }
    pthread_attr_destroy(&attributes);
}

/* Give the job to those of the first `helpers` workers that come for it within `wait` nanoseconds;
   returns how many. */
static int post(recur_task task, void *context, int helpers, int64_t wait) {
    pool.task = task;
    pool.context = context;
    pool.patience = helpers < pool.cores ? PATIENCE : 0;
    pool.here = this_core();
    atomic_store(&pool.slept, 0);
    for (int i = 0; i < helpers; i++) {
        unsigned looking = LOOKING;
        if (!atomic_compare_exchange_strong(&pool.workers[i].state, &looking, POSTED))
            tell(&pool.workers[i], POSTED);
    }
    int come = 0, late = 0;
    for (int i = 0; i < helpers; i++) {
        unsigned posted = POSTED;
        worker *w = &pool.workers[i];
        late = late || !has_changed(&w->state, POSTED, wait);
        if (!atomic_compare_exchange_strong(&w->state, &posted, LOOKING)) w->id = ++come;
        else w->id = 0;
    }
    pool.barrier.count = (unsigned)come + 1;
    atomic_store(&pool.running, (unsigned)come);
    for (int i = 0; i < helpers; i++)
        if (pool.workers[i].id) atomic_store(&pool.workers[i].state, GO);
    return come;
}

/* How many of the first `helpers` workers look; those that sleep are called if jobs come in a row. */
static int looking(int helpers) {
    const int in_a_row = nanoseconds() - pool.missed < PATIENCE;
    int found = helpers;
    for (int i = helpers - 1; i >= 0; i--) {
        if (atomic_load(&pool.workers[i].state) != ASLEEP) continue;
        if (in_a_row) tell(&pool.workers[i], LOOKING);
        found = i;
    }
    return found;
}

static void wait_for_workers(void) {
    unsigned running;
    int64_t asleep_from;
    do {
        running = atomic_load_explicit(&pool.running, memory_order_acquire);
        if (running == 0) return;
    } while (has_changed(&pool.running, running, pool.patience));
    asleep_from = nanoseconds();
    pthread_mutex_lock(&pool.lock);
    if (atomic_fetch_add(&pool.running, CALLER_SLEEPS))
        while (atomic_load(&pool.running) != CALLER_SLEEPS) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    atomic_fetch_add(&pool.slept, nanoseconds() - asleep_from);
}

void recur_parallel(recur_task task, void *context, int count, int wait) {
    int helpers = count - 1 < MOST_WORKERS ? count - 1 : MOST_WORKERS;
    if (helpers <= 0 || atomic_exchange(&pool.busy, 1)) {
        run_flushed(task, context, 0, 1, NULL);
        return;
    }
    if (pool.started < helpers) start_workers(helpers);
    if (helpers > pool.started) helpers = pool.started;
    const int64_t begun = nanoseconds();
    const int wanted = begun < pool.rest ? 0 : helpers;
    helpers = wanted && !wait ? looking(wanted) : wanted;
    const int64_t longest = 1000 * (int64_t)wait;
    const int come = helpers ? post(task, context, helpers, longest < PATIENCE ? PATIENCE : longest) : 0;
    run_flushed(task, context, 0, come + 1, &pool.barrier);
    if (come) wait_for_workers();
    if (helpers < wanted) pool.missed = nanoseconds();
    if (helpers && pool.patience) {
        const int64_t now = nanoseconds();
        pool.late = come < helpers ? pool.late + (pool.late < MOST_LATE) : 0;
        if (pool.late == MOST_LATE || atomic_load(&pool.slept) > (now - begun) / 4) pool.rest = now + 10 * (now - begun);
    }
    atomic_store(&pool.busy, 0);
}

#endif
