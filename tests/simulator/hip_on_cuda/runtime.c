/* Start, devices, errors: what HIP does by itself and the driver wants to be asked for. */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { DEVICES = 64, VERSION = 71500000 }; /* the interface that this library speaks: HIP 7.15 */

struct driver driver;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int started = HIP_NO_DEVICE;
static void *contexts[DEVICES];
static _Thread_local int current, last_error;
static _Thread_local void *active;

static void load(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    fprintf(stderr, "libamdhip64 by forwarding: %s\n", dlerror());
    return;
  }
#define CALL(name, arguments) *(void **)&driver.name = dlsym(library, #name);
  DRIVER_CALLS(CALL)
#undef CALL
  started = driver.cuInit ? driver.cuInit(0) : HIP_NO_DEVICE;
}

int start(void) {
  pthread_once(&once, load);
  return started;
}

int thread_device(void) { return current; }

int choose_device(int ordinal) {
  int count = 0, code = start();
  if (!code)
    code = driver.cuDeviceGetCount(&count);
  if (code)
    return code;
  if (ordinal < 0 || ordinal >= count || ordinal >= DEVICES)
    return HIP_INVALID_DEVICE;
  current = ordinal;
  return HIP_OK;
}

/* Each device's primary context is taken once and kept until the process ends, as HIP does. */
int begin(void) {
  int code = start();
  if (code)
    return code;
  pthread_mutex_lock(&lock);
  if (!contexts[current])
    code = driver.cuDevicePrimaryCtxRetain(&contexts[current], current);
  void *wanted = contexts[current];
  pthread_mutex_unlock(&lock);
  if (code || wanted == active)
    return code;
  code = driver.cuCtxSetCurrent(wanted);
  if (!code)
    active = wanted;
  return code;
}

/* Most numbers are the same. Those that HIP has not, or uses for something else, become its nearest. */
static int translated(int code) {
  switch (code) {
    case 714: case 715: case 716: case 717: case 718: return HIP_LAUNCH_FAILED;
    case 800: return HIP_NOT_SUPPORTED;
    case 34: case 36: case 46: case 47: case 102: case 402: case 703: case 711: case 721: case 909: case 911: case 912:
    case 913: case 916: case 917: case 918: case 919: return HIP_UNKNOWN;
    default: break;
  }
  return (code >= 220 && code <= 227) || (code >= 802 && code <= 812) ? HIP_UNKNOWN : code;
}

int note(int code) {
  code = translated(code);
  if (code != HIP_OK)
    last_error = code;
  return code;
}

EXPORT int hipGetLastError(void);
int hipGetLastError(void) {
  int code = last_error;
  last_error = HIP_OK;
  return code;
}

EXPORT int hipPeekAtLastError(void);
int hipPeekAtLastError(void) { return last_error; }

EXPORT int hipInit(unsigned flags);
int hipInit(unsigned flags) { return note(flags ? HIP_INVALID_VALUE : start()); }

EXPORT int hipRuntimeGetVersion(int *out);
int hipRuntimeGetVersion(int *out) {
  *out = VERSION;
  return HIP_OK;
}

EXPORT int hipDriverGetVersion(int *out);
int hipDriverGetVersion(int *out) {
  int code = start();
  return note(code ? code : driver.cuDriverGetVersion(out));
}

EXPORT int hipGetDeviceCount(int *count);
int hipGetDeviceCount(int *count) {
  int code = start();
  *count = 0;
  return note(code ? code : driver.cuDeviceGetCount(count));
}

EXPORT int hipSetDevice(int ordinal);
int hipSetDevice(int ordinal) { return note(choose_device(ordinal)); }

EXPORT int hipGetDevice(int *out);
int hipGetDevice(int *out) {
  *out = thread_device();
  return note(start());
}

EXPORT int hipDeviceGetAttribute(int *value, int attribute, int ordinal);
int hipDeviceGetAttribute(int *value, int attribute, int ordinal) {
  static const struct {
    int hip, cuda;
  } pairs[] = {{HIP_ATTRIBUTE_HOST_POINTER, 91}, {HIP_ATTRIBUTE_COMPUTE_MODE, 20}, {HIP_ATTRIBUTE_MAX_PITCH, 11},
               {HIP_ATTRIBUTE_PCI_BUS, 33},      {HIP_ATTRIBUTE_PCI_DEVICE, 34},   {HIP_ATTRIBUTE_PCI_DOMAIN, 50},
               {HIP_ATTRIBUTE_POOLS, 115},       {HIP_ATTRIBUTE_VMM, 102},         {HIP_ATTRIBUTE_HOST_REGISTER, 99},
               {HIP_ATTRIBUTE_POOL_HANDLES, 119}, {HIP_ATTRIBUTE_DMABUF, 124},     {HIP_ATTRIBUTE_WAIT_VALUE, 122}};
  int code = start();
  for (size_t i = 0; !code && i < sizeof pairs / sizeof *pairs; i++)
    if (pairs[i].hip == attribute)
      return note(driver.cuDeviceGetAttribute(value, pairs[i].cuda, ordinal));
  return note(code ? code : HIP_INVALID_VALUE);
}

/* Nobody shall take what was seen here for what an AMD device does. */
EXPORT int hipDeviceGetName(char *name, int size, int device);
int hipDeviceGetName(char *name, int size, int device) {
  static const char label[] = " (HIP by forwarding)";
  int code = start();
  if (!code)
    code = driver.cuDeviceGetName(name, size, device);
  if (!code && strlen(name) + sizeof label <= (size_t)size)
    strcat(name, label);
  return note(code);
}

FORWARD(hipDeviceGetUuid, (hipUuid *uuid, int device), cuDeviceGetUuid_v2, (uuid, device))
FORWARD(hipDeviceGetPCIBusId, (char *out, int size, int device), cuDeviceGetPCIBusId, (out, size, device))
FORWARD(hipDeviceTotalMem, (size_t *bytes, int device), cuDeviceTotalMem_v2, (bytes, device))
FORWARD(hipDeviceGet, (int *out, int ordinal), cuDeviceGet, (out, ordinal))
FORWARD(hipDeviceCanAccessPeer, (int *can, int one, int two), cuDeviceCanAccessPeer, (can, one, two))
FORWARD(hipDeviceSynchronize, (void), cuCtxSynchronize, ())
FORWARD(hipMemGetInfo, (size_t *unused, size_t *total), cuMemGetInfo_v2, (unused, total))
