/* A small thread pool: one job at a time, workers started when first needed and asleep between jobs.

   A second caller, or a job that asks for one thread, runs in its own thread alone.  After a fork
   the child has no workers and starts its own.  Where there are no POSIX threads every job has one
   thread. */
#include "recur.h"

#if defined(_WIN32)

void recur_barrier(void *barrier) { (void)barrier; }

void recur_parallel(recur_task task, void *context, int count) {
    const unsigned word = recur_flush_subnormals();
    (void)count;
    task(context, 0, 1, NULL);
    recur_restore_control(word);
}

#else

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define MOST_WORKERS 63
/* looks at a barrier before the thread gives up its turn: steps are microseconds long, so the
   others are near, unless they have no core to run on */
#define SPINS 4000

typedef struct {
    int count;
    atomic_int arrived, round;
} barrier_state;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t job_posted, job_done;
    int busy;               /* a caller has the pool */
    int workers;            /* started */
    int wanted, running;    /* workers that the job takes; that have not finished it */
    unsigned long job;      /* number of the job posted last */
    recur_task task;
    void *context;
    barrier_state barrier;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .job_posted = PTHREAD_COND_INITIALIZER, .job_done = PTHREAD_COND_INITIALIZER};

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

void recur_barrier(void *context) {
    barrier_state *barrier = context;
    if (!barrier) return;
    const int round = atomic_load_explicit(&barrier->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&barrier->arrived, 1, memory_order_acq_rel) == barrier->count - 1) {
        atomic_store_explicit(&barrier->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&barrier->round, round + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&barrier->round, memory_order_acquire) == round; spins++) {
        if (spins < SPINS)
            pause_briefly();
        else
            sched_yield();
    }
}

static void run_flushed(recur_task task, void *context, int id, int count, barrier_state *barrier) {
    const unsigned word = recur_flush_subnormals();
    task(context, id, count, count > 1 ? barrier : NULL);
    recur_restore_control(word);
}

static void *work(void *argument) {
    const int id = (int)(intptr_t)argument;
    unsigned long done = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.job == done || id > pool.wanted) {
            if (id > pool.wanted) done = pool.job;
            pthread_cond_wait(&pool.job_posted, &pool.lock);
        }
        done = pool.job;
        const recur_task task = pool.task;
        void *context = pool.context;
        const int count = pool.wanted + 1;
        pthread_mutex_unlock(&pool.lock);
        run_flushed(task, context, id, count, &pool.barrier);
        pthread_mutex_lock(&pool.lock);
        if (--pool.running == 0) pthread_cond_signal(&pool.job_done);
    }
    return NULL;
}

static void forget_workers(void) { /* in the child of a fork */
    static const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    pool.lock = mutex;
    pool.job_posted = pool.job_done = condition;
    pool.busy = pool.workers = pool.wanted = pool.running = 0;
    atomic_store(&pool.barrier.arrived, 0); /* another thread's job may have been under way */
}

static void start_workers(int wanted) { /* with the lock held; as many as the system grants */
    static int registered;
    if (!registered) {
        pthread_atfork(NULL, NULL, forget_workers);
        registered = 1;
    }
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (pool.workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, work, (void *)(intptr_t)(pool.workers + 1))) break;
        pool.workers++;
    }
    pthread_attr_destroy(&detached);
}

void recur_parallel(recur_task task, void *context, int count) {
    int helpers = count - 1 < MOST_WORKERS ? count - 1 : MOST_WORKERS;
    if (helpers > 0) {
        pthread_mutex_lock(&pool.lock);
        if (pool.busy) {
            helpers = 0;
        } else {
            start_workers(helpers);
            if (helpers > pool.workers) helpers = pool.workers;
        }
        if (helpers > 0) {
            pool.busy = 1;
            pool.wanted = pool.running = helpers;
            pool.task = task;
            pool.context = context;
            pool.barrier.count = helpers + 1;
            pool.job++;
            pthread_cond_broadcast(&pool.job_posted);
        }
        pthread_mutex_unlock(&pool.lock);
    }
    if (helpers <= 0) {
        run_flushed(task, context, 0, 1, NULL);
        return;
    }
    run_flushed(task, context, 0, helpers + 1, &pool.barrier);
    pthread_mutex_lock(&pool.lock);
    while (pool.running) pthread_cond_wait(&pool.job_done, &pool.lock);
    pool.busy = pool.wanted = 0;
    pthread_mutex_unlock(&pool.lock);
}

#endif
