/* Streams (one worker thread and one queue each), the work on them, and events. */
#pragma once

#include "memory.h"

struct ds_event;
struct ds_stream;

struct ds_copy {
  uint64_t dst, src;
  uint64_t width, height, depth;         /* bytes, rows, layers */
  uint64_t dst_pitch, src_pitch;         /* bytes between rows */
  uint64_t dst_layer, src_layer;         /* bytes between layers */
};

enum ds_work { DS_COPY = 1, DS_FILL, DS_WRITE_VALUE, DS_WAIT_VALUE, DS_RECORD, DS_WAIT_EVENT, DS_HOST_CALL, DS_JOIN,
               DS_KERNEL, DS_FREE_POINTER };
enum ds_compare { DS_AT_LEAST = 0, DS_EQUAL, DS_AND, DS_NOR };

struct ds_op {
  struct ds_op *_Atomic next;
  enum ds_work work;
  uint64_t ticket;
  struct ds_copy copy;          /* copy, fill */
  void *staged;                 /* pageable source, taken at submission */
  uint64_t address, value;      /* fill, value work, free */
  int size;                     /* 1, 2, 4 or 8 bytes of `value` */
  enum ds_compare compare;
  struct ds_event *event;
  uint64_t event_ticket;
  void (*call)(void *);
  void *argument;
  struct ds_block *kept;        /* memory that has to stay until this is over */
  struct ds_stream *other;      /* join */
  uint64_t other_ticket;
};

enum ds_capture { DS_NOT_CAPTURING = 0, DS_CAPTURING, DS_CAPTURE_BROKEN };

struct ds_stream {
  struct ds_stream *next;       /* list of live streams */
  struct ds_device *device;
  void *owner;
  unsigned flags;
  int priority;                 /* lower goes first */
  uint64_t id;
  bool blocking;                /* ordered against the default stream of its owner */
  bool is_default, internal;    /* internal: the driver's own, not counted */
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct ds_op *_Atomic head;   /* oldest work, also read after our death by the late writer */
  struct ds_op *tail;
  uint64_t submitted;
  _Atomic uint64_t completed;
  int fences, wanted;           /* queued fences; someone needs the work done */
  bool closing, stalled;
  atomic_int refs;
  pthread_t thread;
  enum ds_capture capture;
  int capture_mode;
  uint64_t capture_id;
  pthread_t capture_thread;
};

/* stream.c */
struct ds_stream_wish {
  struct ds_device *device;
  void *owner;
  unsigned flags;
  int priority;
  bool blocking, is_default, internal;
};
enum ds_status ds_stream_new(const struct ds_stream_wish *wish, struct ds_stream **out);
bool ds_stream_exists(const struct ds_stream *stream);
bool ds_stream_outlived(const struct ds_stream *stream); /* its context ended before it was destroyed */
enum ds_status ds_stream_destroy(struct ds_stream *stream);
struct ds_op *ds_op_new(enum ds_work work);
enum ds_status ds_submit(struct ds_stream *stream, struct ds_op *op, uint64_t *ticket);
enum ds_status ds_wait_ticket(struct ds_stream *stream, uint64_t ticket);
enum ds_status ds_stream_sync(struct ds_stream *stream);
enum ds_status ds_stream_query(struct ds_stream *stream);
/* The next live stream of an owner (NULL: of all) by id, with a reference; start with 0. */
struct ds_stream *ds_next_stream(const void *owner, uint64_t after);
void ds_stream_drop(struct ds_stream *stream);
enum ds_status ds_sync_owner(void *owner);
void ds_destroy_streams(void *owner);
void ds_streams_kick(void);
struct ds_stream *ds_streams_head(void);
void ds_stall(struct ds_stream *stream, bool on); /* NULL: every stream, also new ones */
void ds_drain_waits(void); /* blocks while a value wait that is pending now is not satisfied */

/* work.c */
enum ds_status ds_check_copy(const struct ds_copy *copy);
enum ds_status ds_check_span(uint64_t address, uint64_t bytes, unsigned access);
enum ds_status ds_check_value(uint64_t address, int size);
enum ds_place { DS_AT_DEVICE, DS_AT_PINNED, DS_AT_PAGEABLE };
enum ds_place ds_place_of(uint64_t address);
void ds_run(struct ds_stream *stream, struct ds_op *op);
enum ds_status ds_run_copy(const struct ds_copy *copy, void *staged);
enum ds_status ds_run_fill(const struct ds_op *op);
bool ds_value_holds(const struct ds_op *op, uint64_t now);
enum ds_status ds_value_word(const struct ds_op *op, uint64_t *now, bool write);

/* event.c */
void ds_events_start(void);
enum { DS_EVENT_BLOCKING = 1, DS_EVENT_NO_TIMING = 2, DS_EVENT_SHARED = 4 };
enum ds_status ds_event_new(struct ds_device *device, void *owner, unsigned flags, struct ds_event **out);
bool ds_event_exists(const struct ds_event *event);
enum ds_status ds_event_destroy(struct ds_event *event);
enum ds_status ds_event_export(struct ds_event *event, uint8_t out[DS_HANDLE_BYTES]);
enum ds_status ds_event_open(struct ds_device *device, void *owner, const uint8_t handle[DS_HANDLE_BYTES],
                             struct ds_event **out);
enum ds_status ds_event_record(struct ds_event *event, struct ds_stream *stream);
enum ds_status ds_event_wait(struct ds_stream *stream, struct ds_event *event);
enum ds_status ds_event_query(struct ds_event *event);
enum ds_status ds_event_sync(struct ds_event *event);
enum ds_status ds_event_elapsed(struct ds_event *from, struct ds_event *to, float *ms);
struct ds_device *ds_event_device(struct ds_event *event);
void *ds_event_owner(struct ds_event *event);
void ds_destroy_events(void *owner);
void ds_event_finished(struct ds_event *event, uint64_t ticket);
bool ds_event_reached(struct ds_event *event, uint64_t ticket);
void ds_event_keep(struct ds_event *event);
void ds_event_drop(struct ds_event *event);

/* late.c */
void ds_late_start(void);
bool ds_late_pace(uint64_t bytes); /* false: a late write has to stop here; true in a live process */
