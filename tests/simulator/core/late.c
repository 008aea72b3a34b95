/* Late writes: after SIGKILL of a process its queued copies and value writes still
 * land for some milliseconds, and its pidfd becomes readable only after them.
 *
 * A helper process shares the address space (not the fds), so it outlives the kill
 * with queues, sources and mappings intact.  It traces one idle thread of ours: a
 * traced dead thread keeps the process from counting as gone until it is reaped.
 * After the kill nobody else runs in this address space, so locks are taken afresh.
 */
#include "stream.h"

#include <linux/close_range.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STACK = 64 << 10, READY = 1, REFUSED = 2 };

static _Alignas(64) char stack[STACK];
static long window_us, quiet_us;
static pid_t kept_thread;
static atomic_int allowed, state;
static uint64_t began_us, bytes_total, bytes_done;

/* Spreads the writes over most of the window, so that small last ones fall into it too.
 * A slow machine may need longer: false only when it is far over. */
bool ds_late_pace(uint64_t bytes) {
  if (!began_us)
    return true;
  bytes_done += bytes;
  uint64_t due = (uint64_t)window_us * bytes_done / (bytes_total ? bytes_total : 1) * 3 / 4;
  uint64_t spent = ds_now_us() - began_us;
  if (due > spent)
    ds_sleep_us((long)(due - spent));
  return ds_now_us() - began_us < 4 * (uint64_t)window_us;
}

static bool moves_bytes(const struct ds_op *op) { return op->work == DS_COPY || op->work == DS_FILL; }

static uint64_t size_of(const struct ds_op *op) {
  return op->copy.width * op->copy.height * (op->work == DS_COPY ? op->copy.depth : 1);
}

/* False: the stream stands here, as it would without its process. */
static bool pass(const struct ds_op *op) {
  uint64_t now = 0;
  switch (op->work) {
    case DS_COPY: return ds_run_copy(&op->copy, op->staged) == DS_OK;
    case DS_FILL: return ds_run_fill(op) == DS_OK;
    case DS_WRITE_VALUE: return ds_value_word(op, &now, true) == DS_OK;
    case DS_WAIT_VALUE: return ds_value_word(op, &now, false) == DS_OK && ds_value_holds(op, now);
    case DS_WAIT_EVENT: return ds_event_reached(op->event, op->event_ticket);
    case DS_HOST_CALL: return false;
    default: return true; /* records stay unfinished: a dead process's event never fires */
  }
}

static void write_late(void) {
  ds_locks_afresh();
  for (struct ds_stream *stream = ds_streams_head(); stream; stream = stream->next)
    for (struct ds_op *op = atomic_load(&stream->head); op; op = atomic_load(&op->next))
      bytes_total += moves_bytes(op) ? size_of(op) : 0;
  began_us = ds_now_us();
  for (struct ds_stream *stream = ds_streams_head(); stream; stream = stream->next)
    for (struct ds_op *op = atomic_load(&stream->head); op && pass(op); op = atomic_load(&op->next))
      if (!ds_late_pace(0))
        return;
}

static int watch(void *unused) {
  (void)unused;
  siginfo_t info = {0};
  syscall(SYS_close_range, 0u, ~0u, 0);
  while (!atomic_load(&allowed))
    sched_yield();
  if (ptrace(PTRACE_SEIZE, kept_thread, 0, 0) != 0) {
    atomic_store(&state, REFUSED);
    syscall(SYS_exit_group, 0);
  }
  atomic_store(&state, READY);
  while (waitid(P_PID, (id_t)kept_thread, &info, WEXITED | WNOWAIT | __WALL) != 0)
    ;
  if (info.si_code != CLD_EXITED) {
    write_late();
    ds_sleep_us(quiet_us);
  }
  waitpid(kept_thread, NULL, __WALL); /* now the process is gone for everybody */
  syscall(SYS_exit_group, 0);
  return 0;
}

/* Lends its thread-local storage to the helper, and so must never use it again. */
static void *keep(void *unused) {
  (void)unused;
  kept_thread = (pid_t)syscall(SYS_gettid);
  int helper = clone(watch, stack + STACK, CLONE_VM, NULL);
  if (helper < 0)
    atomic_store(&state, REFUSED);
  else
    prctl(PR_SET_PTRACER, helper, 0, 0, 0);
  atomic_store(&allowed, 1);
  for (;;)
    syscall(SYS_ppoll, NULL, 0, NULL, NULL, 0);
  return NULL;
}

static void start(void) {
  sigset_t all, before;
  pthread_t thread;
  if (!(window_us = ds_switch(DS_late_ms) * 1000))
    return;
  quiet_us = ds_switch(DS_late_quiet_ms) * 1000;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = pthread_create(&thread, NULL, keep, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  while (!failed && !atomic_load(&state))
    ds_sleep_us(100);
  if (failed || atomic_load(&state) == REFUSED)
    fprintf(stderr, "devsim: late writes are off: tracing an own thread is not permitted here\n");
}

void ds_late_start(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, start);
}
