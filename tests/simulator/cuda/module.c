/* Modules and launches, as far as their blocking goes: loading and unloading
 * code stands still while a value wait is pending, a launch does not.  No code runs. */
#include "front.h"

#include <stdlib.h>
#include <string.h>

struct function {
  struct function *next;
  char name[128];
};

struct module {
  struct module *next;
  struct function *functions;
  bool any_name; /* binary code: its names are not read */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct module *modules;

static struct function *add(struct module *module, const char *name, size_t length) {
  struct function *function = calloc(1, sizeof *function);
  if (!function || length >= sizeof function->name) {
    free(function);
    return NULL;
  }
  memcpy(function->name, name, length);
  function->next = module->functions;
  module->functions = function;
  return function;
}

/* The ".entry NAME" lines of a PTX text. */
static void read_names(struct module *module, const char *text) {
  for (const char *at = text; (at = strstr(at, ".entry"));) {
    at += strlen(".entry");
    at += strspn(at, " \t\r\n");
    size_t length = strcspn(at, " \t\r\n(");
    if (length)
      add(module, at, length);
  }
}

static int load(CUmodule *out, const void *image) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!out || !image)
    return CU_INVALID_VALUE;
  bool binary = !memcmp(image, "\177ELF", 4);
  if (!binary && !strstr(image, ".version"))
    return CU_INVALID_IMAGE;
  TRY(cu_not_capturing());
  ds_drain_waits();
  struct module *module = calloc(1, sizeof *module);
  if (!module)
    return CU_OUT_OF_MEMORY;
  module->any_name = binary;
  if (!binary)
    read_names(module, image);
  pthread_mutex_lock(&lock);
  module->next = modules;
  modules = module;
  pthread_mutex_unlock(&lock);
  ds_count(DS_C_live_modules, 1);
  *out = module;
  return CU_OK;
}

API(cuModuleLoadData, 2000, cuModuleLoadData, (CUmodule *out, const void *image), (out, image)) {
  return load(out, image);
}

API(cuModuleLoadDataEx, 2010, cuModuleLoadDataEx, (CUmodule *out, const void *image, unsigned n, int *options, void **values),
    (out, image, n, options, values)) {
  (void)n, (void)options, (void)values;
  return load(out, image);
}

API(cuModuleUnload, 2000, cuModuleUnload, (CUmodule module), (module)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  pthread_mutex_lock(&lock);
  struct module **link = &modules;
  while (*link && *link != module)
    link = &(*link)->next;
  bool found = *link != NULL;
  if (found)
    *link = module->next;
  pthread_mutex_unlock(&lock);
  if (!found)
    return CU_INVALID_HANDLE;
  ds_drain_waits();
  for (struct function *at = module->functions, *next; at; at = next) {
    next = at->next;
    free(at);
  }
  free(module);
  ds_count(DS_C_live_modules, -1);
  return CU_OK;
}

API(cuModuleGetFunction, 2000, cuModuleGetFunction, (CUfunction *out, CUmodule module, const char *name),
    (out, module, name)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!out || !name)
    return CU_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  const struct module *known = modules;
  while (known && known != module)
    known = known->next;
  struct function *function = known ? module->functions : NULL;
  while (function && strcmp(function->name, name))
    function = function->next;
  if (known && !function && module->any_name)
    function = add(module, name, strlen(name));
  pthread_mutex_unlock(&lock);
  *out = function;
  return !known ? CU_INVALID_HANDLE : function ? CU_OK : CU_NOT_FOUND;
}

static bool is_function(CUfunction function) {
  bool found = false;
  pthread_mutex_lock(&lock);
  for (const struct module *module = modules; module; module = module->next)
    for (const struct function *at = module->functions; at; at = at->next)
      found = found || at == function;
  pthread_mutex_unlock(&lock);
  return found;
}

API(cuLaunchKernel, 4000, cuLaunchKernel,
    (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
     CUstream handle, void **parameters, void **extra),
    (function, gx, gy, gz, bx, by, bz, shared, handle, parameters, extra)) {
  struct ds_stream *stream = NULL;
  int code = CU_OK;
  (void)parameters, (void)extra;
  TRY(cu_stream(handle, &stream));
  if (!is_function(function))
    return CU_INVALID_HANDLE;
  if (!gx || !gy || !gz || !bx || !by || !bz || (uint64_t)bx * by * bz > 1024 || shared > 232448)
    return CU_INVALID_VALUE;
  if (cu_capturing(stream, &code))
    return code;
  return cu_code(ds_submit(stream, ds_op_new(DS_KERNEL), NULL), stream->device);
}

API(cuModuleGetLoadingMode, 11070, cuModuleGetLoadingMode, (int *mode), (mode)) {
  TRY(cu_initialized());
  if (!mode)
    return CU_INVALID_VALUE;
  const char *wanted = getenv("CUDA_MODULE_LOADING");
  *mode = wanted && !strcmp(wanted, "EAGER") ? 1 : 2;
  return CU_OK;
}
