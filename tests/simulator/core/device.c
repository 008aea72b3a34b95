/* The list of devices, who may use them, and how much of their memory is in use on
 * the whole machine.  Use is read from the processes' open memfds, so that it is
 * right after any death and leaves nothing behind. */
#include "memory.h"
#include "stream.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { MAX_DEVICES = 16 };
static struct ds_device devices[MAX_DEVICES];
static struct ds_device *shown[MAX_DEVICES];
static int total, shown_count;
static pthread_once_t loaded = PTHREAD_ONCE_INIT;

void ds_device_uuid(const struct ds_device *device, bool whole, uint8_t out[16]) {
  const uint8_t uuid[16] = {0xd0, 0xe1, 0x51, 0x70, 0x0a, 0x5c, 0x4d, 0x2b, 0x9f, 0x31, 0, 0, 0, 0,
                            (uint8_t)(whole ? 0 : device->slice + 1), (uint8_t)(device->physical + 1)};
  memcpy(out, uuid, sizeof uuid);
}

static void make(int physical, int slice) {
  struct ds_device *device = &devices[total++];
  device->physical = physical;
  device->slice = slice;
  device->memory = (uint64_t)ds_switch(DS_memory_mb) << 20;
  device->exclusive_fd = -1;
  ds_device_uuid(device, false, device->uuid);
  if (slice < 0) {
    snprintf(device->name, sizeof device->name, "Simulated accelerator %d", physical);
  } else {
    device->memory /= (uint64_t)ds_switch(DS_slices);
    snprintf(device->name, sizeof device->name, "Simulated accelerator %d slice %d", physical, slice);
  }
  pthread_mutex_init(&device->engine_lock, NULL);
  pthread_cond_init(&device->engine_free, NULL);
}

/* DEVSIM_ORDER lists physical numbers in the order of enumeration. */
static void load(void) {
  const char *order = ds_text("order");
  long count = ds_switch(DS_devices), slices = ds_switch(DS_slices);
  for (long i = 0; i < count; i++) {
    long physical = i;
    if (*order) {
      char *end = NULL;
      physical = strtol(order, &end, 10);
      if (end == order || physical < 0 || physical >= count)
        break;
      order = end + (*end == ',');
    }
    for (long slice = slices ? 0 : -1; slice < slices && total < MAX_DEVICES; slice++)
      make((int)physical, (int)slice);
  }
  for (int i = 0; i < total; i++)
    shown[i] = &devices[i];
  shown_count = total;
  for (int i = 0; i < total; i++)
    devices[i].index = i;
}

int ds_device_count(void) {
  pthread_once(&loaded, load);
  return shown_count;
}

struct ds_device *ds_device_at(int index) {
  return index >= 0 && index < ds_device_count() ? shown[index] : NULL;
}

struct ds_device *ds_device_of(int physical, int slice) {
  for (int i = 0; i < ds_device_count(); i++)
    if (shown[i]->physical == physical && shown[i]->slice == slice)
      return shown[i];
  return NULL;
}

void ds_devices_show(const int *indexes, int n) {
  struct ds_device *chosen[MAX_DEVICES];
  pthread_once(&loaded, load);
  for (int i = 0; i < n; i++)
    chosen[i] = ds_device_at(indexes[i]);
  shown_count = n;
  for (int i = 0; i < n; i++) {
    shown[i] = chosen[i];
    shown[i]->index = i;
  }
}

bool ds_peer(const struct ds_device *a, const struct ds_device *b) {
  if (a == b)
    return true;
  return a->slice < 0 && b->slice < 0 && ds_switch(DS_peer);
}

static socklen_t room_address(struct sockaddr_un *address, int physical, int slice) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "devsim.%s.%d.%d", ds_text("room"), physical,
                   slice);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* A bound abstract name dies with its process, so a killed holder frees the device. */
enum ds_status ds_device_claim(struct ds_device *device) {
  long mode = ds_switch(DS_compute_mode);
  if (mode == 0 || device->exclusive_fd >= 0)
    return DS_OK;
  if (mode != 3)
    return DS_BUSY_DEVICE;
  struct sockaddr_un address;
  socklen_t length = room_address(&address, device->physical, device->slice);
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0)
    return DS_OS;
  if (bind(fd, (struct sockaddr *)&address, length) != 0) {
    close(fd);
    return DS_BUSY_DEVICE;
  }
  device->exclusive_fd = ds_hold_fd(fd, 1);
  return DS_OK;
}

/* ---- use of the machine ---- */
struct seen {
  ino_t inode;
  uint64_t bytes;
  int creator, holder;
};
struct survey {
  struct seen *items;
  size_t count, room;
  int physical, slice;
};

static void note(struct survey *survey, int pid, int dir, const char *entry) {
  char link[128];
  char prefix[96];
  ssize_t n = readlinkat(dir, entry, link, sizeof link - 1);
  int length = snprintf(prefix, sizeof prefix, "/memfd:devsim.%.60s.", ds_text("room"));
  if (n <= 0 || strncmp(link, prefix, (size_t)length) != 0)
    return;
  struct stat info;
  struct ds_header header;
  int fd = openat(dir, entry, O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    return;
  bool good = fstat(fd, &info) == 0 && pread(fd, &header, sizeof header, 0) == sizeof header;
  close(fd);
  if (!good || header.magic != DS_MAGIC || header.physical != survey->physical || header.slice != survey->slice)
    return;
  struct seen item = {info.st_ino, atomic_load(&header.used), header.creator, pid};
  if (survey->count == survey->room) {
    size_t room = survey->room ? survey->room * 2 : 64;
    struct seen *items = realloc(survey->items, room * sizeof *items);
    if (!items)
      return;
    survey->items = items;
    survey->room = room;
  }
  survey->items[survey->count++] = item;
}

static void walk(struct survey *survey) {
  DIR *processes = opendir("/proc");
  for (struct dirent *at; processes && (at = readdir(processes));) {
    char *end = NULL;
    long pid = strtol(at->d_name, &end, 10);
    char path[64];
    if (pid <= 0 || *end)
      continue;
    snprintf(path, sizeof path, "/proc/%ld/fd", pid);
    DIR *fds = opendir(path);
    for (struct dirent *entry; fds && (entry = readdir(fds));)
      if (entry->d_name[0] != '.')
        note(survey, (int)pid, dirfd(fds), entry->d_name);
    if (fds)
      closedir(fds);
  }
  if (processes)
    closedir(processes);
}

static int compare(const void *a, const void *b) {
  const struct seen *x = a, *y = b;
  if (x->inode != y->inode)
    return x->inode < y->inode ? -1 : 1;
  return x->holder - y->holder;
}

/* Memory counts once, for its creator while that lives, else for whoever holds it. */
static bool charged(const struct seen *item, const struct seen *first, const struct seen *end, int pid) {
  if (item->holder != pid)
    return false;
  int newest = 0;
  for (const struct seen *at = first; at < end && at->inode == item->inode; at++) {
    if (at->holder == item->creator)
      return pid == item->creator;
    newest = at->holder;
  }
  return !ds_switch(DS_holder) || newest == pid;
}

uint64_t ds_used(int physical, int slice, int pid) {
  struct survey survey = {.physical = physical, .slice = slice};
  uint64_t sum = 0;
  walk(&survey);
  if (survey.count)
    qsort(survey.items, survey.count, sizeof *survey.items, compare);
  const struct seen *end = survey.items + survey.count, *first = survey.items, *previous = NULL;
  for (const struct seen *at = survey.items; at < end; previous = at, at++) {
    if (!previous || previous->inode != at->inode)
      first = at;
    else if (previous->holder == at->holder || !pid)
      continue;
    if (!pid || charged(at, first, end, pid))
      sum += at->bytes;
  }
  free(survey.items);
  return sum;
}

void ds_lose(struct ds_device *device, int code) {
  int healthy = 0;
  atomic_compare_exchange_strong(&device->lost, &healthy, code);
  ds_streams_kick();
}
